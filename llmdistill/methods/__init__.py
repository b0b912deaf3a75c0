"""The training methods. Each method builds its weighted loss terms from its settings and the configs of both models.

To add a method, write a file with its settings and a function that returns a `Method`, and add an entry to METHODS. A
user's own method is added to METHODS before the command line is parsed. This package does not import torch before a
method is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmdistill.methods.combined import combine
from llmdistill.methods.distilbert import DistilbertConfig, build_distilbert
from llmdistill.methods.entry import MethodEntry, Preset
from llmdistill.methods.kd import PRESETS, KdConfig, build_kd, check_kd
from llmdistill.methods.kroneckerbert import KroneckerbertConfig, build_kroneckerbert
from llmdistill.methods.makd import MakdConfig, build_makd
from llmdistill.methods.method import Method
from llmdistill.methods.minilm import MinilmConfig, build_minilm
from llmdistill.methods.minilmv2 import Minilmv2Config, build_minilmv2, check_minilmv2
from llmdistill.methods.sft import build_sft, check_seqkd
from llmdistill.methods.tinybert import TinybertConfig, build_tinybert
from llmdistill.objective import TOKENS, Objective

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["METHODS", "Method", "MethodEntry", "Preset", "build_method"]

METHODS: dict[str, MethodEntry] = {
    "makd": MethodEntry(
        label="MaKD",
        help="the depth-partitioned losses",
        settings=MakdConfig,
        build=build_makd,
        uses_output=True,
        on_policy=True,
        grid={"makd.logits": [1.0, 10.0]},
        presets={"makd_minilm": Preset(label="MaKD + MiniLM", settings={"also": ["minilm"]})},
    ),
    "kd": MethodEntry(
        label="KD",
        help="a divergence to the teacher's output",
        settings=KdConfig,
        build=build_kd,
        check=check_kd,
        uses_output=True,
        on_policy=True,
        grid={"kd.ratio": [0.5, 1.0]},
        presets=PRESETS,
    ),
    "minilm": MethodEntry(
        label="MiniLM",
        help="attention and value relation of one layer",
        settings=MinilmConfig,
        build=build_minilm,
    ),
    "minilmv2": MethodEntry(
        label="MiniLMv2",
        help="relations between queries, keys and values of one layer",
        settings=Minilmv2Config,
        build=build_minilmv2,
        check=check_minilmv2,
        searches_layer=True,
    ),
    "distilbert": MethodEntry(
        label="DistilBERT",
        help="the softened output, the labels, and the last hidden states",
        settings=DistilbertConfig,
        build=build_distilbert,
        uses_output=True,
    ),
    "tinybert": MethodEntry(
        label="TinyBERT",
        help="embedding, attention scores and hidden states of evenly spread layers",
        settings=TinybertConfig,
        build=build_tinybert,
    ),
    "kroneckerbert": MethodEntry(
        label="KroneckerBERT",
        help="embedding, attention scores and feed-forward outputs of all layers, the output, and the labels",
        settings=KroneckerbertConfig,
        build=build_kroneckerbert,
        uses_output=True,
        copies_classifier=True,
    ),
    "sft": MethodEntry(
        label="SFT",
        help="cross-entropy on the labels alone, without teacher",
        build=build_sft,
        needs_teacher=False,
        uses_output=True,
    ),
    "seqkd": MethodEntry(
        label="SeqKD",
        help="sft on answers that the teacher wrote (data.train is what `llmdistill generate` made)",
        build=build_sft,
        check=check_seqkd,
        needs_teacher=False,
        teacher_writes=True,
    ),
    "none": MethodEntry(
        label="untrained", help="no training, only scores", build=build_sft, needs_teacher=False, trains=False
    ),
}
"""The methods by the name that users type. Their settings have the same name."""


def build_method(
    names: Sequence[str],
    settings: Mapping[str, Any],
    teacher: PreTrainedConfig,
    student: PreTrainedConfig,
    objective: Objective = TOKENS,
) -> Method:
    """Build one method, or combine several methods into one.

    Args:
        names: keys of METHODS.
        settings: the settings of each method by its name; a method that is missing here gets its default settings.
        teacher: the teacher's config.
        student: the student's config.
        objective: the targets that the batches have.

    Raises:
        UserError: the settings of a method do not fit the models, or the models do not fit each other.
    """
    methods = {
        name: METHODS[name].build(settings.get(name, METHODS[name].defaults()), teacher, student, objective)
        for name in names
    }
    return methods[names[0]] if len(names) == 1 else combine(methods)
