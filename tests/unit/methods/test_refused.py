"""Settings and pairs of models that a method cannot use: each is one sentence that names what to change."""

import pytest
from tiny import tiny_config

from llmdistill.config import command_line
from llmdistill.errors import UserError
from llmdistill.methods import METHODS

TEACHER, STUDENT = ("bert", 5, 32, 4, 4), ("bert", 2, 16, 4, 4)
"""Architecture, layers, width, heads and heads of keys."""
LLAMA, SMALL_LLAMA = ("llama", 5, 32, 4, 2), ("llama", 2, 16, 4, 2)
MISTRAL = ("mistral", 5, 32, 4, 2)


@pytest.mark.parametrize(("method", "settings", "teacher", "student", "said"), [
    ("minilm", {}, TEACHER, ("bert", 2, 24, 6, 6), "has 4 attention heads and the student 6: .*minilmv2"),
    ("minilm", {"teacher_layer": 6}, TEACHER, STUDENT, r"minilm\.teacher_layer is 6: the teacher has 5 layers"),
    ("minilm", {"teacher_layers": "1,2,3"}, TEACHER, STUDENT, r"teacher_layers 1,2,3 does not fit: give 2 numbers"),
    ("minilm", {}, TEACHER, SMALL_LLAMA, r"\(bert\) is an encoder and the student \(llama\) a decoder"),
    ("minilm", {}, MISTRAL, SMALL_LLAMA, "window is None in the student's layer 2 and 3 in the teacher's layer 5"),
    ("minilmv2", {"relation_heads": 7}, ("bert", 2, 96, 4, 4), ("bert", 2, 36, 4, 4),
     r"relation_heads is 7.* 96 in the teacher and 36 in the student; give one of 1, 2, 3, 4, 6, 12$"),
    ("minilmv2", {"relation_heads": 32}, LLAMA, ("llama", 2, 16, 4, 4),
     r"16, 32 in the teacher and 16 in the student; give one of 1, 2, 4, 8, 16$"),
    # Of one side alone queries are as wide as all heads, and keys as those that queries share.
    ("minilmv2", {"relation_heads": 32, "relations": ["kk"]}, LLAMA, ("llama", 2, 32, 2, 1),
     r"16 in the teacher and 16 in the student; give one of 1, 2, 4, 8, 16$"),
    ("minilmv2", {"relation_heads": 64, "relations": ["qq"]}, LLAMA, ("llama", 2, 32, 2, 1),
     r"32 in the teacher and 32 in the student; give one of 1, 2, 4, 8, 16, 32$"),
    ("minilmv2", {"relation_heads": 2}, LLAMA, STUDENT, "is a decoder and the student"),
    ("minilmv2", {"teacher_layer": "auto"}, TEACHER, TEACHER, "search"),
    ("tinybert", {}, TEACHER, ("bert", 2, 16, 2, 2), r"tinybert\.attention .* 4 attention heads and the student 2"),
    ("tinybert", {}, LLAMA, STUDENT, "tinybert compares models of one kind"),
    ("tinybert", {}, MISTRAL, SMALL_LLAMA, "is None in the student's layer 1 and 3 in the teacher's layer 3"),
    ("distilbert", {}, TEACHER, STUDENT, r"32 wide in .* 16 in the student: set distilbert\.cosine to 0"),
    ("distilbert", {}, LLAMA, STUDENT, "distilbert compares models of one kind"),
    ("kroneckerbert", {}, LLAMA, TEACHER, "kroneckerbert compares like with like"),
    ("makd", {}, TEACHER, STUDENT, r"num_layers is 5 in .* and 2 in .* or map the layers by makd\.teacher_layers"),
    ("makd", {"teacher_layers": "uniform"}, TEACHER, STUDENT, "hidden_size is 32 in the teacher and 16"),
    ("makd", {"matrix_layers": "none", "layer_layers": "none", "logits": 0.0}, TEACHER, TEACHER, "no term is left"),
])  # fmt: skip
def test_models_that_cannot_be_compared(models, method, settings, teacher, student, said) -> None:
    configs = [models.families[name](*sizes) for name, *sizes in (teacher, student)]
    with pytest.raises(UserError, match=said):
        METHODS[method].build(METHODS[method].settings(**settings), *configs)


@pytest.mark.parametrize(("method", "settings", "teacher", "student"), [
    ("tinybert", {"attention": 0.0}, TEACHER, ("bert", 2, 16, 2, 2)),  # hidden states have no heads
    ("distilbert", {"cosine": 0.0}, TEACHER, STUDENT),
    # Keys alone are narrower than queries; a relation of both is as wide as the queries.
    ("minilmv2", {"relation_heads": 32, "relations": ["qk"]}, LLAMA, ("llama", 2, 32, 2, 1)),
    ("minilmv2", {"relation_heads": 32, "relations": ["qq"]}, LLAMA, ("llama", 2, 32, 2, 1)),
])  # fmt: skip
def test_a_term_without_weight_asks_nothing_of_the_models(models, method, settings, teacher, student) -> None:
    configs = [models.families[name](*sizes) for name, *sizes in (teacher, student)]
    assert METHODS[method].build(METHODS[method].settings(**settings), *configs).weights


@pytest.mark.parametrize(("teacher", "student"), [("gemma2", "llama"), ("llama", "gemma2")])
def test_attention_that_is_more_than_a_product_is_compared_by_neither_model(teacher: str, student: str) -> None:
    """Gemma 2 caps its scores."""
    tinybert, configs = METHODS["tinybert"], [tiny_config(teacher), tiny_config(student)]
    with pytest.raises(UserError, match=r"to which a gemma2 adds distances or a cap: set tinybert\.attention to 0"):
        tinybert.build(tinybert.settings(), *configs)
    assert tinybert.build(tinybert.settings(attention=0.0), *configs).weights == {"hidden": 1.0, "embedding": 1.0}


def test_hidden_states_are_cut_into_as_many_parts_as_heads() -> None:
    configs = [tiny_config("qwen3", hidden_size=width) for width in (16, 18)]
    with pytest.raises(UserError, match=r"hidden_relation .* the 4 heads, which do not divide a width of 18"):
        METHODS["minilm"].build(METHODS["minilm"].settings(hidden_relation=1.0), *configs)
    assert METHODS["minilm"].build(METHODS["minilm"].settings(), *configs).weights


@pytest.mark.parametrize(("method", "settings", "said"), [
    ("kd", {"beta": 0.0}, "kd.beta is 0.0"),
    ("kd", {"ratio": 0.0}, "kd.ratio is 0.0"),
    ("makd", {"hidden": -1.0}, "makd.hidden is -1"),
    ("makd", {"temperature": 0.0}, "makd.temperature is 0"),
    ("embedding", {"cosine": 0.0, "mse": 0.0}, "embedding: no term is left to train with"),
])  # fmt: skip
def test_numbers_out_of_range(method: str, settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        command_line.with_values(METHODS[method].settings(), settings, key=method)
