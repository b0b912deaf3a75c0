"""Distillation of sentence embeddings (Reimers and Gurevych 2020): the embedding is drawn to the teacher's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmdistill import losses
from llmdistill.batch import Batch, LossSum, Outputs
from llmdistill.config import RunConfig
from llmdistill.errors import UserError
from llmdistill.losses.terms import SequenceTerm
from llmdistill.methods.annotations import PreTrainedConfig, Tensor
from llmdistill.methods.entry import MethodEntry, check_settings
from llmdistill.methods.layers import same_direction
from llmdistill.methods.method import Method
from llmdistill.models.families import shape_of
from llmdistill.objective import TOKENS, Objective


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Distillation of the embedding of each sentence (data.kind sentences). A weight of 0 drops the term."""

    cosine: float = 1.0
    """Weight of 1 - cos between the embeddings of student and teacher."""
    mse: float = 1.0
    """Weight of the squared error between them, as the mean over their width (Reimers and Gurevych 2020, eq. 1).
    Between embeddings of length 1 it is (1 - cos) times 2 over the width, so it matters if the teacher does not
    normalize."""

    margin: float = 0.0
    """Weight of the squared error between the margins q·p - q·n of student and teacher, of a query, a positive and a
    negative (MarginMSE, Hofstätter et al. 2020); needs data.sentences.triples. The widths may differ if the other
    weights are 0."""

    def __post_init__(self) -> None:
        """Raises ValueError if a weight is out of its range."""
        check_settings("embedding", self, ("cosine", "mse", "margin"))


def build_embedding(
    settings: EmbeddingConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """cosine · (1 - cos) + mse · mean squared error + margin · MarginMSE, of embeddings by the objective's pooling."""
    causal = same_direction(teacher, student, method="embedding")
    if objective.sequences != "embeddings":
        raise UserError("method embedding compares embeddings of sentences: set data.kind to sentences")
    widths = shape_of(student).hidden_size, shape_of(teacher).hidden_size
    if widths[0] != widths[1] and (settings.cosine > 0 or settings.mse > 0):
        raise UserError(
            f"method embedding compares embeddings, but they are {widths[1]} wide in the teacher and {widths[0]} in "
            "the student: give the student the teacher's width (factors or fewer layers keep it), or learn margins "
            "alone (embedding.cosine and mse 0, embedding.margin 1)"
        )
    measures = {
        "cosine": _compared(losses.sequence_embedding_cosine, Batch.has_target),
        "mse": _compared(losses.sequence_embedding_mse, Batch.has_target),
        "margin": _compared(losses.sequence_margin_mse, _targets),
    }
    weights = {name: getattr(settings, name) for name in measures if getattr(settings, name) > 0}
    terms = [SequenceTerm(name, True, measures[name]) for name in weights]
    return Method(weights, sequence_terms=terms, shift=causal, pooling=objective.pooling)


def _compared(
    measure: Callable[[Tensor, Tensor, Tensor], LossSum], of_batch: Callable[[Batch], Tensor]
) -> Callable[[Outputs, Outputs | None, Batch], LossSum]:
    def loss(student: Outputs, teacher: Outputs | None, batch: Batch) -> LossSum:
        assert student.sequence_logits is not None, "the student gives no embeddings"
        assert teacher is not None
        assert teacher.sequence_logits is not None, "the teacher gives no embeddings"
        return measure(student.sequence_logits, teacher.sequence_logits, of_batch(batch))

    return loss


def _targets(batch: Batch) -> Tensor:
    assert batch.targets is not None
    return batch.targets


def check_embedding(settings: EmbeddingConfig, config: RunConfig) -> None:
    """Raise a ValueError unless the run has sentences, and triples for margins."""
    if config.data.kind != "sentences":
        raise ValueError(
            f"method embedding compares embeddings of sentences, but data.kind is {config.data.kind}: set it to "
            "sentences"
        )
    if settings.margin > 0 and not config.data.sentences.triples:
        raise ValueError(
            "embedding.margin needs queries with a positive and a negative: set data.sentences.triples, or the weight 0"
        )


EMBEDDING = MethodEntry(
    label="Embedding",
    help="the embeddings of sentences",
    settings=EmbeddingConfig,
    build=build_embedding,
    check=check_embedding,
)
