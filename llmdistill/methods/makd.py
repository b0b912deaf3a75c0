"""MaKD: multi-aspect knowledge distillation, each layer of the student against the same layer of the teacher."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmdistill import losses
from llmdistill.batch import Aspect
from llmdistill.config.marks import OVER_0
from llmdistill.errors import UserError
from llmdistill.methods import layers
from llmdistill.methods.annotations import PreTrainedConfig
from llmdistill.methods.entry import MethodEntry, Preset, check_weights
from llmdistill.methods.output import SoftPositions, label_terms, positions_of, soft_terms
from llmdistill.models.families import family_of, shape_of
from llmdistill.objective import TOKENS, Objective
from llmdistill.step.method import Method


@dataclass(frozen=True, kw_only=True)
class MakdConfig:
    """The terms of MaKD (eq. 12-19), and their layers. Weight 0 drops a term."""

    matrix_layers: str = "lower"
    """Layers of the matrix losses: lower, upper, all, none, or numbers from 1 such as 1-3,6."""
    layer_layers: str = "upper"
    """Layers of the attention and hidden-state losses, in the same notation."""
    teacher_layers: str | None = None
    """The teacher's layer for each layer of the student: uniform, spread, first, last, or a number for each, such as
    2,4,6, with 0 for a layer that learns from none; the models may then differ in depth, and the layers of the losses
    are the student's. Default: the layer of the same number, as in the paper."""
    query: float = 1.0
    """Weight of the queries' MSE (eq. 15)."""
    key: float = 1.0
    """Weight of the keys' MSE (eq. 15)."""
    value: float = 1.0
    """Weight of the values' MSE (eq. 15)."""
    ffn_up: float = 1.0
    """Weight of the MSE of the up projection's output (eq. 16)."""
    ffn_gate: float = 1.0
    """Weight of the MSE of the gate projection's output, in models that have one (not in the paper)."""
    ffn_down: float = 1.0
    """Weight of the MSE of the down projection's output (eq. 16)."""
    attention: float = 1.0
    """Weight of KL(A_student || A_teacher) (eq. 12)."""
    hidden: float = 1.0
    """Weight of the MSE of the layers' outputs (eq. 13)."""
    logits: float = 1.0
    """Weight of the soft cross-entropy on the logits (eq. 18)."""
    label: float = 0.0
    """Weight of the cross-entropy on the labels (not in the paper)."""
    temperature: float = field(default=1.0, metadata=OVER_0)
    """Temperature of the soft cross-entropy (t in eq. 18)."""
    positions: SoftPositions = "masked"
    """Tokens of an encoder at which the soft cross-entropy is computed: the masked ones, where masked-word prediction
    (§3.2) predicts, or all real tokens. A decoder's are always those of the answers."""
    scale: layers.Scale = "token"
    """What squared errors are divided by. token: the mean square of the teacher's features at that token, so that no
    layer and no token weighs more because its features are large (in a pretrained decoder they differ by factors of
    10,000); plain: nothing, as in the paper."""

    def __post_init__(self) -> None:
        """Raises ValueError if a weight or the temperature is out of its range."""
        check_weights("makd", self, TERMS)


MATRIX_TERMS: tuple[Aspect, ...] = ("query", "key", "value", "ffn_up", "ffn_gate", "ffn_down")
"""Terms of the matrix aspect (eq. 17), each with the name of its tap."""

TERMS = (*MATRIX_TERMS, "attention", "hidden", "logits", "label")
"""All terms, in the order of the log. The weight of each term is a setting of the same name."""


def build_makd(
    settings: MakdConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """Build the loss of MaKD (eq. 19): matrix terms in some layers, attention and hidden states in others, and logits.

    A term is the sum over its layers of the mean over tokens, so it grows with the number of layers. A term with weight
    0 or without layers is left out: it is not in the weights, is not computed, and requests no taps. If sequences have
    targets, logits and label have a counterpart of the same weight for them (sequence_logits, sequence_label).
    """
    # By the student's number: the settings name layers of the student, and a map may leave some of them out.
    pairs = {
        pair.student: pair
        for pair in layers.pair_equal_shapes(settings.teacher_layers, teacher, student, method="makd")
    }
    layers.check_scores(settings.attention, teacher, student, method="makd")
    family, depth = family_of(student), shape_of(student).num_layers
    layer_sets = [
        layers.parse_layers(getattr(settings, key), depth, key=f"makd.{key}")
        for key in ("matrix_layers", "layer_layers")
    ]
    matrix_pairs, layer_pairs = ([pairs[layer] for layer in named if layer in pairs] for named in layer_sets)
    # A family names the projections of its feed-forward part; only gated ones have ffn_gate.
    aspects = [name for name in MATRIX_TERMS if not name.startswith("ffn_") or getattr(family, name) is not None]
    # One term for each aspect and pair of layers; those of the same name share a weight, and the step adds them up.
    inner = [
        *(layers.mse_term(aspect, pair, scale=settings.scale) for aspect in aspects for pair in matrix_pairs),
        *(
            layers.attention_term(pair, losses.attention_kl, causal=family.causal)
            for pair in layer_pairs
            if settings.attention > 0  # attention_term refuses windows to both sides, which matter to it alone
        ),
        *(layers.mse_term("hidden", pair, scale=settings.scale) for pair in layer_pairs),
    ]
    positions = positions_of(settings.positions, causal=family.causal)
    output = soft_terms("logits", settings.logits, objective, temperature=settings.temperature, positions=positions)
    terms = layers.weigh(settings, inner) | output | label_terms(settings.label, objective)
    if not terms.weights:
        raise UserError("makd: no term is left to train with: give one a weight over 0, and layers to act in")
    return Method(**vars(terms), shift=family.causal)


MAKD = MethodEntry(
    label="MaKD",
    help="the depth-partitioned losses",
    settings=MakdConfig,
    build=build_makd,
    uses_output=True,
    grid={"makd.logits": [1.0, 10.0]},
    presets={"makd_minilm": Preset(label="MaKD + MiniLM", settings={"also": ["minilm"]})},
)
