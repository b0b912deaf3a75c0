"""The heads that a task may need: the class of transformers that loads a model with it, its output, and its targets.

A new head is a row in HEADS. A task of another package adds it in the file of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.batch import Batch, LossSum
from llmdistill.losses import sequence
from llmdistill.models.pooling import load_dense
from llmdistill.objective import CompareLogits, Targets

HeadName = str
"""A key of HEADS."""

Inputs = Mapping[str, Any]
"""What a model is called with, or gives, by the names of transformers."""


def _compare_logits(student: Tensor, teacher: Tensor, batch: Batch, divergence: CompareLogits) -> LossSum:
    return divergence(student, teacher, batch.has_target())


def _label_loss(loss: Callable[[Tensor, Tensor], LossSum], output: Tensor, batch: Batch) -> LossSum:
    assert batch.targets is not None, "the batch has no targets"
    return loss(output, batch.targets)


CLASSES = Targets(
    label_loss=partial(_label_loss, sequence.sequence_cross_entropy),
    compare=_compare_logits,
    # A head for next sentences has two classes, also where num_labels is 1 or missing.
    num_classes=lambda config, batch: max(2, config.num_labels or 0),
    from_inputs=lambda inputs: (None, inputs.get("labels")),
    of_zeros=lambda zeros_BT: zeros_BT[:, 0],
)
"""A class of each sequence; the output is (B, C)."""


SCORES = Targets(
    label_loss=partial(_label_loss, sequence.sequence_mse),
    # Scores, as of STS-B, have no distribution that a divergence could compare.
    compare=lambda student, teacher, batch, _: sequence.sequence_score_mse(student, teacher, batch.has_target()),
    own_measure="mse",
    from_inputs=lambda inputs: (None, None if inputs.get("labels") is None else inputs["labels"].float().flatten()),
    of_zeros=lambda zeros_BT: zeros_BT[:, 0].float(),
)
"""A score of each sequence; the output is (B, 1)."""


_ENDS = ("start_positions", "end_positions")
SPANS = Targets(
    label_loss=partial(_label_loss, sequence.sequence_cross_entropy),
    compare=_compare_logits,
    num_classes=lambda config, batch: batch.input_ids.shape[1],
    from_inputs=lambda inputs: (
        None,
        torch.stack([inputs[key] for key in _ENDS], dim=1) if inputs.keys() >= set(_ENDS) else None,
    ),
    of_zeros=lambda zeros_BT: zeros_BT[:, :2],
    is_per_token=True,
)
"""The positions of the first and the last token of a span in each sequence; the output is (B, 2, T)."""


EMBEDDINGS = Targets(
    label_loss=None,
    compare=None,
    # Every sentence counts. Labels (B,) are its place in a triple, for margins.
    from_inputs=lambda inputs: (
        None,
        inputs["input_ids"].new_zeros(len(inputs["input_ids"])) if inputs.get("labels") is None else inputs["labels"],
    ),
    of_zeros=lambda zeros_BT: zeros_BT[:, 0],
)
"""The embedding that the teacher gives to each sequence; the output is (B, W)."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """What a model ends in."""

    auto_class: str
    """The class of transformers that loads a model with the head."""
    decoder_class: str = "AutoModelForCausalLM"
    """The class that loads a decoder with the head; by default a decoder always has its LM head."""
    endings: tuple[str, ...] = ()
    """How the names of the classes end that have the head, the usual one first; none if the name does not tell it."""
    title: str = ""
    """What messages call it, such as `classifier`."""
    missing: str | None = None
    """What the checkpoint must have if the weights of the head are missing; by default the title."""
    pipeline_tag: str = "feature-extraction"
    """The tag of such a model on the hub."""
    has_tokens: bool = False
    """Whether it predicts tokens of the vocabulary."""
    targets: Callable[[PreTrainedConfig], Targets | None] | None = None
    """What its output learns, by the model's config; None if it has no output beside that for tokens."""
    output: Callable[[Inputs, Batch], Tensor | None] = lambda outputs, batch: outputs.get("logits")
    """Finds this output among those of the model; None if they lack it."""
    needs_padding_token: bool = False
    """Whether a decoder reads its output at the last token before the padding."""
    load_rest: Callable[[PreTrainedModel, str | Path], None] | None = None
    """Loads the modules of a folder that transformers does not know."""

    @property
    def learns_labels(self) -> bool:
        """Whether the head has weights that labels train."""
        return bool(self.title)

    @property
    def with_head(self) -> str:
        """How a message goes on that asks for a checkpoint with the head."""
        return f" with {self.missing or f'a {self.title}'}" if self.title else ""


HEADS: dict[HeadName, Head] = {
    "pretraining": Head(
        auto_class="AutoModelForPreTraining",
        endings=("ForPreTraining",),
        title="LM head and next-sentence head",
        missing="its masked-word and next-sentence heads (data.text.next_sentence=false drops the latter)",
        pipeline_tag="fill-mask",
        has_tokens=True,
        # Others of that name have only an LM head, or one of another kind (ELECTRA).
        targets=lambda config: CLASSES if config.model_type == "bert" else None,
        output=lambda outputs, batch: outputs.get("seq_relationship_logits"),
    ),
    "lm_head": Head(
        auto_class="AutoModelForMaskedLM",
        endings=("ForMaskedLM", "ForPreTraining"),
        title="language-model head",
        missing="its language-model head (terms on hidden states, matrices and relations need none: set the weights of "
        "those on the output to 0)",
        pipeline_tag="fill-mask",
        has_tokens=True,
    ),
    "sequence": Head(
        auto_class="AutoModelForSequenceClassification",
        decoder_class="AutoModelForSequenceClassification",
        endings=("ForSequenceClassification",),
        title="classifier",
        pipeline_tag="text-classification",
        targets=lambda config: SCORES if config.num_labels == 1 else CLASSES,
        needs_padding_token=True,
    ),
    "span": Head(
        auto_class="AutoModelForQuestionAnswering",
        decoder_class="AutoModelForQuestionAnswering",
        # XLM, Flaubert and XLNet have a beam search under the plain name.
        endings=("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
        title="head for spans",
        missing="a head for spans (start and end of an answer)",
        pipeline_tag="question-answering",
        targets=lambda config: SPANS,
        # Padding is no place for an answer: the distribution of a sequence must not depend on its batch.
        output=lambda outputs, batch: (
            torch.stack([outputs["start_logits"], outputs["end_logits"]], dim=1).masked_fill(
                (batch.attention_mask == 0)[:, None], float("-inf")
            )
            if "start_logits" in outputs
            else None
        ),
    ),
    # An encoder, with the Dense of sentence-transformers if it has one.
    "embedding": Head(auto_class="AutoModel", targets=lambda config: EMBEDDINGS, load_rest=load_dense),
    "none": Head(auto_class="AutoModel"),
    # Those of the class that saved the model, see `models.load.auto_class`.
    "saved": Head(auto_class=""),
}
"""The heads by name; the name of a class tells the first head whose ending it has."""


def find_head(model: PreTrainedModel) -> Head | None:
    """Return the head of a model by the name of its class; None if that tells none."""
    name = type(model).__name__
    return next((head for head in HEADS.values() if head.endings and name.endswith(head.endings)), None)
