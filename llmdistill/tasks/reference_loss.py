"""Cross-entropy of labels under a model, and the perplexity of the references of instructions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.data.collate import collate
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.sampler import scoring_batches
from llmdistill.models.families import has_segments
from llmdistill.progress import progress
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.tasks.perplexity import perplexity_of

_LOGITS = 2**27
"""Largest number of logits of a batch, half a GiB in fp32; a batch has one example at least."""


@torch.no_grad()
def label_loss(model: PreTrainedModel, batch: Batch, *, shift: bool) -> tuple[float, int]:
    """Return the sum of the cross-entropy in nats over the labels of a batch, and their number.

    The logits of the whole batch are computed at once. shift: each position predicts the next label (decoders).
    """
    located = batch.with_label_rows(shift=shift).to(model.device)
    inputs = {"input_ids": located.input_ids, "attention_mask": located.attention_mask}
    if located.token_type_ids is not None and has_segments(model.config):
        inputs["token_type_ids"] = located.token_type_ids
    assert located.label_rows is not None
    rows_NV = model(**inputs).logits.flatten(0, 1).index_select(0, located.label_rows)
    labels_N = located.row_labels(shift=shift)
    return float(functional.cross_entropy(rows_NV.float(), labels_N, reduction="sum")), len(labels_N)


def score_references(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    limits: Limits,
    *,
    batch_size: int,
    world: World,
) -> dict[str, Any]:
    """Return how well a decoder predicts the first reference of each example, its end token included.

    The ranks share the examples, and every rank must call this function. The tokens are those of the given tokenizer,
    so that models with different tokenizers cannot be compared.

    Returns:
        ``{"reference_loss": nats per token, "perplexity": its exponential, "reference_tokens"}``; nothing for a model
        whose loss is not finite, for a tokenizer without an end token, or without examples.
    """
    if tokenizer.eos_token_id is None:
        return {}
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    vocabulary = model.config.get_text_config().vocab_size
    batches = scoring_batches(
        encode(examples, tokenizer, limits).items,
        partial(collate, pad_token_id=padding),
        batch_size=max(1, min(batch_size, _LOGITS // (limits.max_length * vocabulary))),
        rank=world.rank,
        world_size=world.size,
    )
    pairs = [
        label_loss(model, batch, shift=True)
        for _, batch in progress(batches, "Perplexity of the references", "batches")
    ]
    sums = [math.fsum(loss for loss, _ in pairs), sum(number for _, number in pairs)]
    total, count = all_reduce_sum(torch.tensor(sums, dtype=torch.float64, device=world.device)).tolist()
    loss = total / count if count else math.nan
    if not math.isfinite(loss):
        return {}
    return {"reference_loss": loss, "perplexity": perplexity_of(loss), "reference_tokens": int(count)}
