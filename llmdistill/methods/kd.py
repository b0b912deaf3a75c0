"""Distillation of the output (Hinton et al. 2015; GKD; DistiLLM): a divergence, and the loss on the labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmdistill import losses
from llmdistill.config import RunConfig
from llmdistill.config.marks import OVER_0, takes
from llmdistill.methods.annotations import PreTrainedConfig
from llmdistill.methods.entry import MethodEntry, Preset
from llmdistill.methods.layers import check_direction
from llmdistill.methods.output import SoftPositions, divergence_terms, label_terms, positions_of
from llmdistill.objective import TOKENS, Objective
from llmdistill.step.method import Method

# At 0 or 1 the mixture is one of the two models, and the divergence is 0 or a plain KL.
_MIXED = takes(lambda value: 0 < value < 1, "give a number between 0 and 1, both excluded")
_RATIO = takes(lambda value: 0 < value <= 1, "give a number over 0 and up to 1 (method sft has no teacher)")


@dataclass(frozen=True, kw_only=True)
class KdConfig:
    """KD for each token: a divergence to the teacher, and the labels."""

    divergence: str = "forward_kl"
    """forward_kl: KL(T||S), the usual one; reverse_kl: KL(S||T); jsd: GKD's generalized Jensen-Shannon;
    skew_forward_kl, skew_reverse_kl: DistiLLM's, against a mixture; tvd: total variation distance; log_ratio:
    reverse_kl by nothing but the tokens that the student has sampled (a policy gradient), with data.on_policy; on given
    answers it is reverse_kl."""
    beta: float = field(default=0.5, metadata=_MIXED)
    """Share of the teacher in the mixture of jsd, between 0 and 1."""
    alpha: float = field(default=0.1, metadata=_MIXED)
    """Share in the mixture of skew_forward_kl (of the teacher) and skew_reverse_kl (of the student)."""
    temperature: float = field(default=1.0, metadata=OVER_0)
    """Temperature that softens both distributions; the divergence is multiplied by its square (Hinton et al. 2015)."""
    ratio: float = field(default=0.5, metadata=_RATIO)
    """Weight of the divergence; the cross-entropy on the labels has weight 1 - ratio. With 1 the student learns from
    the teacher alone."""
    spans: Literal["alm", "uld"] = "alm"
    """If teacher and student have different tokenizers: how a stretch of text is compared that they cut into different
    tokens. alm: by its likelihood (ALM, with tau 100); uld: by the sorted distributions over its first token (ULD).
    Tokens that both know are compared by the divergence, over the tokens that both know."""
    positions: SoftPositions = "masked"
    """Tokens of an encoder at which the divergence is computed: the masked ones, as in MiniLM's MLM-KD (§4.2.2), or all
    real tokens. A decoder's are always those of the answers."""

    def __post_init__(self) -> None:
        """Raises ValueError for a divergence that DIVERGENCES does not have."""
        if self.divergence not in losses.DIVERGENCES:
            names = ", ".join(losses.DIVERGENCES)
            raise ValueError(f"kd.divergence is {self.divergence}: give one of {names}")


def build_kd(
    settings: KdConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """Build ratio · divergence + (1 - ratio) · cross-entropy on the labels, for tokens, sequences, or both.

    The term of the divergence is named after it. Scores have no distribution, so both terms become a squared error; the
    one to the teacher's scores is `sequence_mse`. Answers that the student generated itself are no labels: on such
    batches only the divergence is computed.
    """
    causal = check_direction(teacher, student, method="kd")
    to_teacher = losses.TokenTerm(
        settings.divergence,
        losses.DIVERGENCES[settings.divergence].build(settings),
        settings.temperature,
        positions=positions_of(settings.positions, causal=causal),
        spans=settings.spans,
    )
    measure = None if objective.targets is None else objective.targets.own_measure
    terms = divergence_terms(to_teacher, settings.ratio, objective, sequence_name=measure)
    terms |= label_terms(1 - settings.ratio, objective)
    return Method(**vars(terms), shift=causal)


def check_kd(settings: KdConfig, config: RunConfig) -> None:
    """Raise a ValueError for numbers that do not fit the answers that the student generates itself."""
    if config.method == "kd" and config.data.on_policy == 1 and settings.ratio < 1:
        raise ValueError("data.on_policy 1 leaves no labels to learn, but kd.ratio keeps some: set kd.ratio to 1")
    if settings.divergence == "log_ratio" and settings.temperature != 1:
        raise ValueError(
            "kd.divergence is log_ratio, but kd.temperature is not 1, at which the student samples: make it 1"
        )


KD = MethodEntry(
    label="KD",
    help="a divergence to the teacher's output",
    settings=KdConfig,
    build=build_kd,
    check=check_kd,
    uses_output=True,
    other_tokens=True,
    grid={"kd.ratio": [0.5, 1.0]},
    presets={
        **{
            entry.preset: Preset(label=entry.label, settings={"kd.divergence": name})
            for name, entry in losses.DIVERGENCES.items()
            if entry.preset is not None
        },
        "gkd": Preset(
            label="GKD", settings={"kd.divergence": "jsd", "kd.ratio": 1.0}, grid={"data.on_policy": [0.25, 0.5]}
        ),
        "sampled": Preset(
            label="sampled reverse KL",
            settings={"kd.divergence": "log_ratio", "kd.ratio": 1.0, "data.on_policy": 1.0},
            grid={},  # without given answers there are no labels, so the ratio is 1
        ),
        "uld": Preset(label="KD, spans by ULD", settings={"kd.spans": "uld"}),
        "kd_minilm": Preset(label="KD + MiniLM", settings={"also": ["minilm"]}),
    },
)
"""Its presets are the divergences of the papers."""
