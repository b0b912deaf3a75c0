"""Shapes of models and students: what configs say, their notation, and the weights and layers students start from."""

import copy
import re

import pytest
import torch
from tiny import SETTINGS, shaken, tiny_config
from transformers import AutoConfig, AutoModel, AutoModelForPreTraining, BertConfig, RobertaForSequenceClassification

from llmdistill.errors import UserError
from llmdistill.models.families import FAMILIES, family_of, is_causal, layers_of, shape_of
from llmdistill.models.layer_maps import parse_layer_map, uniform_map
from llmdistill.models.load import auto_class, build_meta
from llmdistill.students.shapes import (
    StudentShape,
    check_sizes,
    first_parts,
    initialize,
    parse_shape,
    shape_config,
    teacher_layers,
)

SIZES = {"num_hidden_layers": 4, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": 30}
GROUPED = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 3}
CHANGES = {
    "gpt2": {"n_inner": 96},
    "distilbert": {"hidden_dim": 96},
    "llama": {"attention_bias": True},
    "qwen3": {"head_dim": 16},
}
KINDS = [name for name, family in FAMILIES.items() if family.layer_axes is not None and name in SETTINGS]
CONFIGS = {}
for name in KINDS:
    sizes = {key: size for key, size in GROUPED.items() if key in SIZES or key in SETTINGS[name]}
    CONFIGS[name] = tiny_config(name, **sizes, **CHANGES.get(name, {}))
"""Heads are 8 features wide (Qwen3's 16), two share keys and values where they do."""


def teacher_of(kind):
    """A teacher whose every parameter, norms and biases included, holds numbers of its own."""
    config = copy.deepcopy(CONFIGS[kind])
    auto = AutoModelForPreTraining if kind == "bert" else auto_class(config, "lm_head")
    return shaken(auto.from_config(config).eval())


def student_of(teacher, shape):
    return type(teacher)(shape_config(teacher.config, parse_shape(shape))).eval()


def start(student, teacher, init, layers):
    check_sizes(init, shape_of(student.config), shape_of(teacher.config))
    initialize(student, teacher, first_parts(student.config, teacher.config, layers))


def sliced(kind):
    teacher = teacher_of(kind)
    student = student_of(teacher, "2x24x4")
    start(student, teacher, "slice", [1, 3])
    return student, teacher


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes(name):
    settings = SETTINGS["roberta" if name == "xlm-roberta" else name]
    names = ("intermediate_size", "ffn_dim", "moe_intermediate_size", "n_inner", "hidden_dim")
    widths = {key: 40 for key in names if key in settings}
    config = AutoConfig.for_model(name, **{**settings, "num_hidden_layers": 2, **widths})
    shape = shape_of(config)
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.intermediate_size) == (2, 16, 4, 40)
    assert len(layers_of(build_meta(config))) == 2


def test_sliding_windows():
    assert shape_of(tiny_config("mistral", sliding_window=7)).windows == (7, 7)
    assert shape_of(tiny_config("mistral", sliding_window=None)).windows == (None, None)
    assert shape_of(tiny_config("qwen2", sliding_window=7)).windows == (None, None)
    mixed = tiny_config("qwen3", use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert shape_of(mixed).windows == (None, 7)


def test_an_encoder_as_decoder_is_a_family_of_its_own():
    config = BertConfig(is_decoder=True, num_hidden_layers=2)
    assert is_causal(config)
    assert family_of(config).causal
    assert family_of(config).makes_mask
    assert not is_causal(BertConfig())


def test_notation():
    assert parse_shape("6x384x12") == StudentShape(depth=6, width=384, heads=12, intermediate=None)
    assert parse_shape(" 4×312×12×1200 ") == StudentShape(depth=4, width=312, heads=12, intermediate=1200)
    assert parse_shape("32x3072x32x9216x128") == StudentShape(32, 3072, 32, intermediate=9216, head_dim=128)


@pytest.mark.parametrize(("text", "said"), [
    ("6x384", r"assistants\[0\] .* is no shape: write DEPTHxWIDTHxHEADS"),
    ("0x384x12", "is no shape"),
    ("6x20x6", "6 heads .* one of 1, 2, 4, 5, 10, 20 heads"),
    ("2x24x3", "student.shape: 3 heads cannot share keys and values 2 at a time, as the teacher's 6 do"),
    ("2x20x4", "student.shape: 4 heads of the width 20 have no even number of features each"),
    ("2x24x4x50x7", "student.shape: 4 heads of the width 24 have no even number of features each"),
])  # fmt: skip
def test_what_is_no_shape_for_a_llama(text, said):
    with pytest.raises(UserError, match=said):
        shape_config(CONFIGS["llama"], parse_shape(text, key="assistants[0]"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_has_the_shape_and_is_the_teachers_in_all_else(kind):
    teacher = CONFIGS[kind]
    before = copy.deepcopy(teacher.to_dict())
    sizes = shape_of(shape_config(teacher, parse_shape("3x24x4")))
    assert (sizes.num_layers, sizes.hidden_size, sizes.num_heads) == (3, 24, 4)
    assert sizes.intermediate_size == 48
    assert sizes.num_kv_heads == (2 if hasattr(teacher, "num_key_value_heads") else 4)
    assert sizes.head_dim == (12 if kind == "qwen3" else 6)
    assert shape_of(shape_config(teacher, parse_shape("3x24x4x50"))).intermediate_size == 50
    assert teacher.to_dict() == before
    same = shape_config(teacher, parse_shape("4x48x6"))
    assert {**same.to_dict(), "max_window_layers": 0} == {**before, "max_window_layers": 0}
    deeper = shape_of(shape_config(teacher, parse_shape("7x96x6")))
    assert (deeper.num_layers, deeper.hidden_size) == (7, 96)


def test_the_shape_of_minitron_keeps_the_width_of_the_heads():
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336}
    llama = tiny_config("llama", **sizes, num_key_value_heads=8)
    sizes = shape_of(shape_config(llama, parse_shape("32x3072x32x9216x128")))  # Llama-3.1-Minitron-4B-Width
    assert (sizes.hidden_size, sizes.num_kv_heads, sizes.intermediate_size, sizes.head_dim) == (3072, 8, 9216, 128)
    assert shape_of(shape_config(llama, parse_shape("32x3072x32"))).head_dim == 96
    assert shape_of(shape_config(CONFIGS["bert"], parse_shape("2x20x4"))).head_dim == 5
    assert shape_of(shape_config(CONFIGS["gpt2"], parse_shape("2x24x4x50x6"))).head_dim == 6
    with pytest.raises(UserError, match=r"the heads of a gpt2 have width / heads = 6 features each, not 8"):
        shape_config(CONFIGS["gpt2"], parse_shape("2x24x4x50x8"))


def test_windows_are_spread_over_the_layers():
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}
    teacher = tiny_config("qwen3", **{**GROUPED, "num_hidden_layers": 6}, **windows)
    assert shape_of(shape_config(teacher, parse_shape("4x48x6"))).windows == (None, None, 4, 4)
    assert shape_of(shape_config(teacher, parse_shape("8x48x6"))).windows == (None,) * 4 + (4,) * 4
    shaped = shape_config(teacher, parse_shape("4x48x6"))
    assert shaped.layer_types.index("sliding_attention") == shaped.max_window_layers


def test_uniform_map():
    assert uniform_map(3, 12) == [4, 8, 12]
    assert uniform_map(2, 5) == [3, 5]  # 2.5 -> 3
    assert uniform_map(5, 12) == [2, 5, 7, 10, 12]  # 2.4 4.8 7.2 9.6 12
    assert uniform_map(5, 2) == [1, 1, 1, 2, 2]  # 0.4 is no layer: the first


def test_maps_of_three_of_six_layers():
    given = ("uniform", "spread", "first", "last", "6, 1,6 ")
    found = [parse_layer_map(spec, 3, 6, key="k") for spec in given]
    assert found == [[2, 4, 6], [1, 3, 5], [1, 2, 3], [4, 5, 6], [6, 1, 6]]
    assert parse_layer_map("0,0,6", 3, 6, key="k", may_skip=True) == [0, 0, 6]


@pytest.mark.parametrize(("spec", "depth", "may_skip", "message"), [
    ("0,0,6", 3, False, "x.y 0,0,6 does not fit: give 3 numbers, one for each layer of the student, from 1 to the te"),
    ("0,0,0", 3, True, "x.y 0,0,0: no layer of the student has a layer of the teacher"),
    ("2,4", 3, True, "x.y 2,4 does not fit: give 3 numbers, one for each layer of the student, from 0 (0: none) to"),
    ("middle", 3, True, "x.y 'middle' names no layers: give uniform, spread, first, last, or numbers from 1"),
    ("first", 7, True, "x.y first: the student has 7 layers and the teacher 6; give a number for each layer"),
])  # fmt: skip
def test_what_is_no_map(spec, depth, may_skip, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_layer_map(spec, depth, 6, key="x.y", may_skip=may_skip)


def test_the_teachers_layers_are_counted_from_zero_and_no_fewer_than_the_students():
    assert teacher_layers("spread", 5, 12, key="student.layers") == [0, 2, 4, 7, 9]
    with pytest.raises(UserError, match=r"a student of 13 layers cannot be made of a teacher's 12; .*random"):
        teacher_layers("spread", 13, 12, key="student.layers")


@pytest.mark.parametrize("kind", KINDS)
def test_a_sliced_student_runs_and_holds_only_the_teachers_numbers(kind):
    student, teacher = sliced(kind)
    known = torch.cat([parameter.detach().flatten() for parameter in teacher.parameters()])
    assert torch.isin(torch.cat([parameter.detach().flatten() for parameter in student.parameters()]), known).all()
    with torch.no_grad():
        logits = student(input_ids=torch.arange(3, 19).view(2, 8))[0]
    assert logits.shape == (2, 8, 30)
    assert logits.isfinite().all()


PLAIN = [head * 8 + feature for head in range(4) for feature in range(6)]
"""The first 6 of 8 features of the first 4 heads."""
ROTARY = [head * 8 + feature for head in range(4) for feature in (0, 1, 2, 4, 5, 6)]
"""The same where feature i turns with i + 4."""
AXES = {
    "W": range(24),
    "F": range(48),
    "P": PLAIN,
    "R": ROTARY,
    "p": PLAIN[:12],
    "r": ROTARY[:12],  # two heads of keys for four of queries
    "Q": [block * 48 + index for block in range(3) for index in PLAIN],
    "*": slice(None),
}
"""Rows or columns that a student of 24 channels and 48 neurons takes."""
PLACES = {
    "bert": {
        **{"self.query": "PW", "self.key": "PW", "self.value": "PW", "attention.output.dense": "WP"},
        **{"intermediate.dense": "FW", "output.dense": "WF", "embeddings": "*W", "dense": "WW"},
        **{"seq_relationship": "*W", "predictions": "*"},
    },
    "gpt2": {"c_attn": "WQ", "attn.c_proj": "PW", "c_fc": "WF", "c_proj": "FW", "wte": "*W", "wpe": "*W"},
    "llama": {
        **{"q_proj": "RW", "k_proj": "rW", "v_proj": "pW", "o_proj": "WP", "gate_proj": "FW", "up_proj": "FW"},
        **{"down_proj": "WF", "embed_tokens": "*W", "lm_head": "*W"},
    },
}
"""By the end of a module's name, or a part of it, the axes of its weight; the first that fits holds."""


@pytest.mark.parametrize("kind", PLACES)
def test_slices(kind):
    """Of every parameter: norms and biases are as wide as what they are added to."""
    student, teacher = sliced(kind)
    whole = dict(teacher.named_parameters())
    for name, parameter in student.named_parameters():
        source = whole[re.sub(r"\.(\d)\.", lambda layer: f".{2 * int(layer[1]) + 1}.", name)]
        axes = next((axes for place, axes in PLACES[kind].items() if place in name and "norm" not in name.lower()), "W")
        outputs = axes[-1 if kind == "gpt2" else 0]
        expected = source[AXES[outputs]] if source.ndim == 1 else source[AXES[axes[0]]][:, AXES[axes[1]]]
        assert torch.equal(parameter, expected), name


def test_slices_of_head_norms():
    student, teacher = sliced("qwen3")  # 12 of 16 features
    own, theirs = student.model.layers[1].self_attn.q_norm, teacher.model.layers[3].self_attn.q_norm
    assert torch.equal(own.weight, theirs.weight[[*range(6), *range(8, 14)]])


def test_heads_that_one_of_them_lacks_are_left_alone():
    teacher = teacher_of("roberta")
    student = RobertaForSequenceClassification(teacher.config)
    fresh = copy.deepcopy(student.classifier.state_dict())
    start(student, teacher, "layers", [0, 1, 2, 3])
    assert all(torch.equal(value, fresh[name]) for name, value in student.classifier.state_dict().items())
    classifier = student_of(student, "2x24x4")
    start(classifier, student, "slice", [0, 1])
    assert torch.equal(classifier.classifier.dense.weight, student.classifier.dense.weight[:24, :24])
    assert torch.equal(classifier.classifier.out_proj.weight, student.classifier.out_proj.weight[:, :24])
    # A base model alone, whose pooler a model for masked words does not have.
    bare = AutoModel.from_config(teacher.config)
    start(bare, teacher, "layers", [0, 1, 2, 3])
    assert torch.equal(bare.embeddings.word_embeddings.weight, teacher.base_model.embeddings.word_embeddings.weight)


@pytest.mark.parametrize(("init", "shape", "expected"), [
    ("layers", "2x24x4", "init layers .* width is 24 and the teacher's 48: take init important, slice or random"),
    ("layers", "2x48x6x48", "student's feed-forward width is 48 and the teacher's 96"),
    ("slice", "2x96x6", "student.init slice .* student's width of 96 is more than the teacher's 48"),
    ("slice", "2x48x12", "number of heads of 12 is more"),
    ("slice", "2x48x4", "head width of 12 is more than the teacher's 8"),
])  # fmt: skip
def test_sizes_that_a_way_cannot_fill(init, shape, expected):
    teacher = teacher_of("bert")
    with pytest.raises(UserError, match=expected):
        start(student_of(teacher, shape), teacher, init, [0, 1])
