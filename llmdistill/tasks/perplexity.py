"""The cross-entropy and perplexity of a model on a text."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.config import TextConfig
from llmdistill.data.corpus import tokenise
from llmdistill.data.in_memory import Data, write_rows
from llmdistill.data.text import validation_batches
from llmdistill.embedded import locate
from llmdistill.models.families import family_of


@torch.no_grad()
def score_text(model: PreTrainedModel, batches: Sequence[Batch]) -> dict[str, float]:
    """Return the mean cross-entropy in nats over all labels, its exponential (perplexity), and the number of labels.

    A decoder predicts each next token, an encoder the masked tokens. The logits of a whole batch are computed at once.
    """
    shift = family_of(model.config).causal
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for batch in batches:
        located = batch.with_label_rows(shift=shift).to(model.device)
        inputs = {"input_ids": located.input_ids, "attention_mask": located.attention_mask}
        if located.token_type_ids is not None:
            inputs["token_type_ids"] = located.token_type_ids
        assert located.label_rows is not None
        rows_NV = model(**inputs).logits.flatten(0, 1).index_select(0, located.label_rows)
        labels_N = located.row_labels(shift=shift)
        total += functional.cross_entropy(rows_NV.float(), labels_N, reduction="sum").double().cpu()
        count += len(labels_N)
    loss = float(total) / count
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": count}


def score_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Data, *, max_length: int, batch_size: int
) -> dict[str, float]:
    """Call `score_text` for a whole text, which is split into sequences of up to max_length tokens.

    Raises:
        UserError: the text cannot be read or is too short.
    """
    defaults = TextConfig()
    with tempfile.TemporaryDirectory() as folder:
        reference = locate(str(data)) if isinstance(data, str | Path) else write_rows(data, Path(folder))
        batches = validation_batches(
            tokenise(reference, tokenizer, cache_dir=folder),
            tokenizer,
            objective="next" if family_of(model.config).causal else "masked",
            max_length=max_length,
            mask_share=defaults.mask_share,
            whole_words=defaults.whole_words,
            next_sentence=False,
            limit=sys.maxsize,
            batch_size=batch_size,
            rank=0,
            world_size=1,
        )
    return score_text(model, batches)
