"""Shapes of students: their notation, their configs, and the weights they start from."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForPreTraining,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
    RobertaForSequenceClassification,
)

from llmdistill.errors import UserError
from llmdistill.models.families import FAMILIES, family_of, layers_of, shape_of
from llmdistill.models.load import auto_class
from llmdistill.models.shapes import (
    StudentShape,
    check_sizes,
    first_parts,
    initialize,
    parse_shape,
    shaped_config,
    teacher_layers,
)

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 96,
    "vocab_size": 30,
}
GROUPED = {**SIZES, "num_key_value_heads": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OF_GPT2 = {"n_layer": 4, "n_embd": 48, "n_head": 6, "n_inner": 96, "n_positions": 20, "vocab_size": 30}
GPT2 = GPT2Config(**OF_GPT2, bos_token_id=1, eos_token_id=1)
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {**OF_GPT2, "bos_token_id": 1, "eos_token_id": 1},
    "distilbert": {"dim": 48, "hidden_dim": 96, "n_heads": 6, "n_layers": 4, "vocab_size": 30},
    "llama": {**GROUPED, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 16},
}
KINDS = [name for name, family in FAMILIES.items() if family.layer_axes is not None]
CONFIGS = {
    name: AutoConfig.for_model(name, **CHANGES.get(name, GROUPED if FAMILIES[name].causal else SIZES)) for name in KINDS
}
"""Heads are 8 features wide (Qwen3's 16), two share keys and values where they do."""
EVERY = pytest.mark.parametrize("kind", KINDS)


def teacher_of(kind: str) -> PreTrainedModel:
    """A teacher whose every parameter, norms and biases included, holds numbers of its own."""
    config = copy.deepcopy(CONFIGS[kind])
    torch.manual_seed(0)
    auto = AutoModelForPreTraining if kind == "bert" else auto_class(config, "lm_head")
    model: PreTrainedModel = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def student_of(teacher: PreTrainedModel, shape: str) -> PreTrainedModel:
    torch.manual_seed(1)
    model: PreTrainedModel = type(teacher)(shaped_config(teacher.config, parse_shape(shape))).eval()
    return model


def start(student: PreTrainedModel, teacher: PreTrainedModel, init: str, layers: list[int]) -> None:
    check_sizes(init, shape_of(student.config), shape_of(teacher.config))
    initialize(student, teacher, first_parts(student.config, teacher.config, layers))


def sliced(kind: str, shape: str = "2x24x4", layers: tuple[int, ...] = (1, 3)) -> tuple[Any, Any]:
    teacher = teacher_of(kind)
    student = student_of(teacher, shape)
    start(student, teacher, "slice", list(layers))
    return student, teacher


@torch.no_grad()
def outputs(model: PreTrainedModel) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=torch.arange(3, 19).view(2, 8))[0]
    return result


def test_notation() -> None:
    assert parse_shape("6x384x12") == StudentShape(depth=6, width=384, heads=12, intermediate=None)
    assert parse_shape(" 4×312×12×1200 ") == StudentShape(depth=4, width=312, heads=12, intermediate=1200)
    assert parse_shape("32x3072x32x9216x128") == StudentShape(32, 3072, 32, intermediate=9216, head_dim=128)


@pytest.mark.parametrize(
    "text", ["", "6", "6x384", "6x384x12x1536x2x2", "6x384xtwelve", "0x384x12", "6x384x12x0", "-6x4x2"]
)
def test_other_notations_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(UserError, match=r"assistants\[0\] .* is no shape: write DEPTHxWIDTHxHEADS"):
        parse_shape(text, key="assistants[0]")


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(UserError, match=r"student.shape 6x20x6: 6 heads .* one of 1, 2, 4, 5, 10, 20 heads"):
        parse_shape("6x20x6")


@EVERY
def test_a_config_has_the_shape_and_is_the_teachers_in_all_else(kind: str) -> None:
    teacher = CONFIGS[kind]
    before = copy.deepcopy(teacher.to_dict())
    sizes = shape_of(shaped_config(teacher, parse_shape("3x24x4")))
    assert (sizes.num_layers, sizes.hidden_size, sizes.num_heads) == (3, 24, 4)
    assert sizes.intermediate_size == 48
    assert sizes.num_kv_heads == (2 if hasattr(teacher, "num_key_value_heads") else 4)
    assert sizes.head_dim == (12 if kind == "qwen3" else 6)
    assert shape_of(shaped_config(teacher, parse_shape("3x24x4x50"))).intermediate_size == 50
    assert teacher.to_dict() == before
    same = shaped_config(teacher, parse_shape("4x48x6"))
    assert {**same.to_dict(), "max_window_layers": 0} == {**before, "max_window_layers": 0}
    deeper = shape_of(shaped_config(teacher, parse_shape("7x96x6")))
    assert (deeper.num_layers, deeper.hidden_size) == (7, 96)


def test_the_shape_of_minitron_keeps_the_width_of_the_heads() -> None:
    llama = LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336
    )
    sizes = shape_of(shaped_config(llama, parse_shape("32x3072x32x9216x128")))  # Llama-3.1-Minitron-4B-Width
    assert (sizes.hidden_size, sizes.num_kv_heads, sizes.intermediate_size, sizes.head_dim) == (3072, 8, 9216, 128)
    assert shape_of(shaped_config(llama, parse_shape("32x3072x32"))).head_dim == 96
    with pytest.raises(UserError, match="no even number of features each"):
        shaped_config(llama, parse_shape("32x3072x32x9216x127"))
    assert shape_of(shaped_config(GPT2, parse_shape("2x24x4x50x6"))).head_dim == 6
    with pytest.raises(UserError, match=r"the heads of a gpt2 have width / heads = 6 features each, not 8"):
        shaped_config(GPT2, parse_shape("2x24x4x50x8"))


def test_windows_are_spread_over_the_layers() -> None:
    teacher = Qwen3Config(
        **GROUPED | {"num_hidden_layers": 6}, use_sliding_window=True, sliding_window=4, max_window_layers=3
    )
    assert shape_of(shaped_config(teacher, parse_shape("4x48x6"))).windows == (None, None, 4, 4)
    assert shape_of(shaped_config(teacher, parse_shape("8x48x6"))).windows == (None,) * 4 + (4,) * 4
    shaped: Any = shaped_config(teacher, parse_shape("4x48x6"))
    assert shaped.layer_types.index("sliding_attention") == shaped.max_window_layers
    mistral = MistralConfig(**GROUPED, sliding_window=5)
    assert shape_of(shaped_config(mistral, parse_shape("2x48x6"))).windows == (5, 5)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("2x24x3", "student.shape: 3 heads cannot share keys and values 2 at a time, as the teacher's 6 do"),
        ("2x20x4", "student.shape: 4 heads of the width 20 have no even number of features each"),
    ],
)
def test_proportions_that_do_not_come_out_even(shape: str, expected: str) -> None:
    for kind in ("llama", "qwen2"):
        with pytest.raises(UserError, match=expected):
            shaped_config(CONFIGS[kind], parse_shape(shape))
    shaped_config(CONFIGS["bert"], parse_shape(shape))


def test_the_teachers_layers_are_counted_from_zero_and_no_fewer_than_the_students() -> None:
    assert teacher_layers("spread", 5, 12, key="student.layers") == [0, 2, 4, 7, 9]
    with pytest.raises(UserError, match=r"a student of 13 layers cannot be made of a teacher's 12; .*random"):
        teacher_layers("spread", 13, 12, key="student.layers")
    with pytest.raises(UserError, match="'middle' names no layers: give uniform, spread, first, last, important, or"):
        teacher_layers("middle", 3, 12, key="student.layers")


@EVERY
def test_the_same_size_is_the_teacher_itself(kind: str) -> None:
    teacher = teacher_of(kind)
    student = student_of(teacher, "4x48x6")
    start(student, teacher, "slice", [0, 1, 2, 3])
    assert all(torch.equal(own, theirs) for own, theirs in zip(student.parameters(), teacher.parameters(), strict=True))
    assert torch.equal(outputs(student), outputs(teacher))


@EVERY
def test_layers_are_those_named(kind: str) -> None:
    teacher = teacher_of(kind)
    student = student_of(teacher, "2x48x6")
    start(student, teacher, "layers", [1, 3])
    # The teacher with the other layers taken out computes the same.
    layers = layers_of(teacher)
    del layers[2], layers[0]
    for index, layer in enumerate(layers):
        layer.get_submodule(family_of(teacher.config).attention).layer_idx = index
    teacher.config.num_hidden_layers = 2
    assert torch.equal(outputs(student), outputs(teacher))


@EVERY
def test_a_sliced_student_runs_and_holds_only_the_teachers_numbers(kind: str) -> None:
    student, teacher = sliced(kind)
    known = torch.cat([parameter.detach().flatten() for parameter in teacher.parameters()])
    for name, parameter in student.named_parameters():
        assert torch.isin(parameter, known).all(), name
    assert outputs(student).shape == (2, 8, 30)
    assert outputs(student).isfinite().all()


PLAIN = [head * 8 + feature for head in range(4) for feature in range(6)]
"""The first 6 of 8 features of the first 4 heads."""
ROTARY = [head * 8 + feature for head in range(4) for feature in (0, 1, 2, 4, 5, 6)]
"""The same where feature i turns with i + 4."""


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_slices_of_an_encoder(kind: str) -> None:
    student, teacher = sliced(kind)
    own, theirs = student.base_model, teacher.base_model
    for layer, source in ((0, 1), (1, 3)):
        a, b = own.encoder.layer[layer], theirs.encoder.layer[source]
        for name in ("query", "key", "value"):
            linear, whole = getattr(a.attention.self, name), getattr(b.attention.self, name)
            assert torch.equal(linear.weight, whole.weight[PLAIN][:, :24])
            assert torch.equal(linear.bias, whole.bias[PLAIN])
        assert torch.equal(a.attention.output.dense.weight, b.attention.output.dense.weight[:24][:, PLAIN])
        assert torch.equal(a.attention.output.LayerNorm.bias, b.attention.output.LayerNorm.bias[:24])
        assert torch.equal(a.intermediate.dense.weight, b.intermediate.dense.weight[:48, :24])
        assert torch.equal(a.intermediate.dense.bias, b.intermediate.dense.bias[:48])
        assert torch.equal(a.output.dense.weight, b.output.dense.weight[:24, :48])
        assert torch.equal(a.output.dense.bias, b.output.dense.bias[:24])
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm"):
        whole = getattr(theirs.embeddings, name).weight
        assert torch.equal(getattr(own.embeddings, name).weight, whole[..., :24])


def test_slices_of_distilbert_s_head() -> None:
    student, teacher = sliced("distilbert")
    assert torch.equal(student.vocab_transform.weight, teacher.vocab_transform.weight[:24, :24])
    assert torch.equal(student.vocab_transform.bias, teacher.vocab_transform.bias[:24])
    assert torch.equal(student.vocab_projector.bias, teacher.vocab_projector.bias)
    own, theirs = student.distilbert.transformer.layer[1], teacher.distilbert.transformer.layer[3]
    assert torch.equal(own.attention.out_lin.weight, theirs.attention.out_lin.weight[:24][:, PLAIN])


def test_slices_of_heads() -> None:
    student, teacher = sliced("bert")
    assert torch.equal(student.bert.pooler.dense.weight, teacher.bert.pooler.dense.weight[:24, :24])
    assert torch.equal(student.cls.seq_relationship.weight, teacher.cls.seq_relationship.weight[:, :24])
    own, theirs = student.cls.predictions, teacher.cls.predictions
    assert torch.equal(own.transform.dense.weight, theirs.transform.dense.weight[:24, :24])
    assert torch.equal(own.bias, theirs.bias)
    student, teacher = sliced("roberta")
    assert torch.equal(student.lm_head.dense.bias, teacher.lm_head.dense.bias[:24])
    assert torch.equal(student.lm_head.layer_norm.weight, teacher.lm_head.layer_norm.weight[:24])
    assert torch.equal(student.lm_head.bias, teacher.lm_head.bias)


def test_slices_of_gpt2() -> None:
    student, teacher = sliced("gpt2")
    fused = [block * 48 + index for block in range(3) for index in PLAIN]
    own, theirs = student.transformer.h[1], teacher.transformer.h[3]
    assert torch.equal(own.attn.c_attn.weight, theirs.attn.c_attn.weight[:24][:, fused])
    assert torch.equal(own.attn.c_attn.bias, theirs.attn.c_attn.bias[fused])
    assert torch.equal(own.attn.c_proj.weight, theirs.attn.c_proj.weight[PLAIN][:, :24])
    assert torch.equal(own.mlp.c_fc.weight, theirs.mlp.c_fc.weight[:24, :48])
    assert torch.equal(own.mlp.c_proj.weight, theirs.mlp.c_proj.weight[:48, :24])
    assert torch.equal(own.mlp.c_proj.bias, theirs.mlp.c_proj.bias[:24])
    assert torch.equal(student.transformer.wpe.weight, teacher.transformer.wpe.weight[:, :24])


def test_slices_of_llama_keep_rotary_pairs_and_groups() -> None:
    student, teacher = sliced("llama")
    own, theirs = student.model.layers[0].self_attn, teacher.model.layers[1].self_attn
    assert torch.equal(own.q_proj.weight, theirs.q_proj.weight[ROTARY][:, :24])
    assert torch.equal(own.q_proj.bias, theirs.q_proj.bias[ROTARY])
    assert torch.equal(own.k_proj.weight, theirs.k_proj.weight[ROTARY[:12]][:, :24])  # two heads of keys for four
    assert torch.equal(own.v_proj.weight, theirs.v_proj.weight[PLAIN[:12]][:, :24])
    assert torch.equal(own.o_proj.weight, theirs.o_proj.weight[:24][:, PLAIN])
    own, theirs = student.model.layers[0].mlp, teacher.model.layers[1].mlp
    assert torch.equal(own.gate_proj.weight, theirs.gate_proj.weight[:48, :24])
    assert torch.equal(own.down_proj.weight, theirs.down_proj.weight[:24, :48])
    assert torch.equal(student.model.norm.weight, teacher.model.norm.weight[:24])


def test_slices_of_head_norms() -> None:
    student, teacher = sliced("qwen3")  # 12 of 16 features
    pairs = [*range(6), *range(8, 14)]
    assert torch.equal(
        student.model.layers[1].self_attn.q_norm.weight, teacher.model.layers[3].self_attn.q_norm.weight[pairs]
    )


def test_tied_stays_tied_and_untied_untied() -> None:
    student, teacher = sliced("llama")
    assert student.lm_head.weight is student.model.embed_tokens.weight
    student, teacher = sliced("mistral")
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight[:, :24])
    assert not torch.equal(student.lm_head.weight, student.model.embed_tokens.weight)


def test_heads_that_one_of_them_lacks_are_left_alone() -> None:
    teacher = teacher_of("roberta")
    torch.manual_seed(1)
    student: Any = RobertaForSequenceClassification(teacher.config)
    fresh = copy.deepcopy(student.classifier.state_dict())
    start(student, teacher, "layers", [0, 1, 2, 3])
    assert all(torch.equal(value, fresh[name]) for name, value in student.classifier.state_dict().items())
    assert torch.equal(
        student.roberta.encoder.layer[0].output.dense.bias, teacher.base_model.encoder.layer[0].output.dense.bias
    )
    classifier = student_of(student, "2x24x4")
    start(classifier, student, "slice", [0, 1])
    assert torch.equal(classifier.classifier.dense.weight, student.classifier.dense.weight[:24, :24])
    assert torch.equal(classifier.classifier.out_proj.weight, student.classifier.out_proj.weight[:, :24])
    # A base model alone, whose pooler a model for masked words does not have.
    bare: Any = AutoModel.from_config(teacher.config)
    start(bare, teacher, "layers", [0, 1, 2, 3])
    assert torch.equal(bare.embeddings.word_embeddings.weight, teacher.base_model.embeddings.word_embeddings.weight)


@pytest.mark.parametrize(
    ("init", "shape", "expected"),
    [
        (
            "layers",
            "2x24x4",
            "student.init layers .* student's width is 24 and the teacher's 48: take init important, slice or random",
        ),
        ("layers", "2x48x6x48", "student's feed-forward width is 48 and the teacher's 96"),
        ("slice", "2x96x6", "student.init slice .* student's width of 96 is more than the teacher's 48"),
        ("slice", "2x48x12", "number of heads of 12 is more"),
        ("slice", "2x48x4", "head width of 12 is more than the teacher's 8"),
    ],
)
def test_sizes_that_a_way_cannot_fill(init: Any, shape: str, expected: str) -> None:
    teacher = teacher_of("bert")
    with pytest.raises(UserError, match=expected):
        start(student_of(teacher, shape), teacher, init, [0, 1])
