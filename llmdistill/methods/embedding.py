"""Distillation of sentence embeddings (Reimers and Gurevych 2020): the student imitates the teacher's embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from llmdistill import losses
from llmdistill.batch import Batch, LossSum, Mapped, Outputs
from llmdistill.config import RunConfig
from llmdistill.errors import UserError
from llmdistill.losses.terms import SequenceTerm
from llmdistill.methods.annotations import PreTrainedConfig, Tensor
from llmdistill.methods.entry import MethodEntry, check_weights
from llmdistill.methods.layers import check_direction
from llmdistill.models.families import shape_of
from llmdistill.objective import TOKENS, Objective
from llmdistill.step.method import Method


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """The embedding of each sentence (data.kind sentences). Weight 0 drops a term."""

    cosine: float = 1.0
    """Weight of 1 - cos between the embeddings of student and teacher."""
    mse: float = 1.0
    """Weight of the squared error between them, as the mean over their width (Reimers and Gurevych 2020, eq. 1).
    Between embeddings of length 1 it is (1 - cos) times 2 over the width, so it matters if the teacher does not
    normalize."""

    margin: float = 0.0
    """Weight of the squared error between the margins q·p - q·n of student and teacher, of a query, a positive and a
    negative (MarginMSE, Hofstätter et al. 2020); needs data.sentences.triples."""
    projection: Literal["drop", "keep"] = "drop"
    """For a student of another width than the teacher's, what becomes of the learned matrix that maps its embedding to
    the teacher's width. drop: it is left out of the saved student, whose embedding has the student's width; margins are
    those of this embedding. keep: it is the student's Dense (sentence-transformers), and the embedding has the
    teacher's width."""

    def __post_init__(self) -> None:
        """Raises ValueError if a weight is out of its range."""
        check_weights("embedding", self, ("cosine", "mse", "margin"))


def build_embedding(
    settings: EmbeddingConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """Build cosine · (1 - cos) + mse · mean squared error + margin · MarginMSE, of the objective's embeddings."""
    causal = check_direction(teacher, student, method="embedding")
    if objective.pooling is None:
        raise UserError("method embedding compares embeddings of sentences: set data.kind to sentences")
    modes = len(objective.pooling.modes)
    # The results of several modes of pooling are side by side.
    widths = modes * shape_of(student).hidden_size, modes * shape_of(teacher).hidden_size
    projections: dict[Mapped, tuple[int, int]] = {}
    if widths[0] != widths[1] and settings.projection == "keep":
        # The student keeps this matrix as its Dense, so that all terms compare its outputs, the margins too.
        projections["dense"] = widths
    elif widths[0] != widths[1] and (settings.cosine > 0 or settings.mse > 0):
        projections["sentence"] = widths
    measures = {
        "cosine": _compare_embeddings(
            losses.sequence_embedding_cosine, Batch.has_target, mapped="sentence" in projections
        ),
        "mse": _compare_embeddings(losses.sequence_embedding_mse, Batch.has_target, mapped="sentence" in projections),
        # Margins are numbers, so embeddings of any two widths can be compared without a matrix.
        "margin": _compare_embeddings(losses.sequence_margin_mse, attrgetter("targets")),
    }
    weights = {name: getattr(settings, name) for name in measures if getattr(settings, name) > 0}
    terms = [SequenceTerm(name, True, measures[name]) for name in weights]
    return Method(weights, sequence_terms=terms, shift=causal, projections=projections, pooling=objective.pooling)


def _compare_embeddings(
    measure: Callable[[Tensor, Tensor, Tensor], LossSum], read_batch: Callable[[Batch], Tensor], *, mapped: bool = False
) -> Callable[[Outputs, Outputs | None, Batch], LossSum]:
    def loss(student: Outputs, teacher: Outputs | None, batch: Batch) -> LossSum:
        embeddings = student.projected if mapped else student.sequence_logits
        assert embeddings is not None, "the student gives no embeddings"
        # The teacher's are never mapped: they are what the matrix maps to.
        assert teacher is not None
        assert teacher.sequence_logits is not None, "the teacher gives no embeddings"
        return measure(embeddings, teacher.sequence_logits, read_batch(batch))

    return loss


def check_embedding(settings: EmbeddingConfig, config: RunConfig) -> None:
    """Raise a ValueError for margins without triples."""
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
