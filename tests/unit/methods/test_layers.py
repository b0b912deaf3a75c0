from __future__ import annotations

import pytest
from transformers import LlamaConfig

from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.methods.layers import named_layer, parse_layers, uniform_map
from llmdistill.methods.makd import MakdConfig
from llmdistill.objective import TOKENS


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        (6, 12, [1, 3, 5, 7, 9, 11]),
        (4, 12, [2, 5, 8, 11]),
        (3, 12, [3, 7, 11]),
        (12, 24, [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23]),
        (12, 12, list(range(12))),
        (1, 7, [6]),
        (2, 5, [2, 4]),  # 2.5 -> 3
        (5, 12, [1, 4, 6, 9, 11]),  # 2.4 4.8 7.2 9.6 12
        (4, 2, [0, 0, 1, 1]),  # 0.5 1 1.5 2
        (5, 2, [0, 0, 0, 1, 1]),  # 0.4 is no layer: the first
    ],
)
def test_uniform_map(student: int, teacher: int, expected: list[int]) -> None:
    assert uniform_map(student, teacher) == expected


def test_uniform_map_ends_with_the_last_and_never_goes_back() -> None:
    for student in range(1, 26):
        for teacher in range(1, 26):
            layers = uniform_map(student, teacher)
            assert len(layers) == student
            assert layers[-1] == teacher - 1
            assert layers == sorted(layers)
            assert layers[0] >= 0
            assert student > teacher or len(set(layers)) == student


def test_named_layers_count_from_one() -> None:
    config = LlamaConfig(num_hidden_layers=4)
    assert [named_layer(spec, config, key="x") for spec in ("last", 4, 1)] == [3, 3, 0]
    for spec in (0, 5, -1):
        with pytest.raises(UserError, match=rf"x is {spec}: the teacher has 4 layers; give one from 1 to 4"):
            named_layer(spec, config, key="x")


@pytest.mark.parametrize(
    ("spec", "num_layers", "expected"),
    [
        ("lower", 4, (0, 1)),
        ("upper", 4, (2, 3)),
        ("lower", 5, (0, 1)),
        ("upper", 5, (2, 3, 4)),
        ("lower", 1, ()),
        ("upper", 1, (0,)),
        ("all", 3, (0, 1, 2)),
        ("none", 3, ()),
        ("1-3,6", 6, (0, 1, 2, 5)),
        ("6, 1 - 2", 6, (0, 1, 5)),
        ("2,2,1-2", 2, (0, 1)),
    ],
)
def test_layers(spec: str, num_layers: int, expected: tuple[int, ...]) -> None:
    assert parse_layers(spec, num_layers, key="k") == expected


@pytest.mark.parametrize("spec", ["", "0", "5", "3-2", "1-", "-2", "1,,2", "middle", "1.5", "²", "1-2-3", "Lower"])
def test_what_is_no_list_of_layers(spec: str) -> None:
    with pytest.raises(UserError, match=r"makd\.matrix_layers is .* 4 layers"):
        parse_layers(spec, 4, key="makd.matrix_layers")


def test_makds_attention_of_a_target_is_that_of_the_source_and_itself_so_far(models) -> None:
    config = models.bert(2, 16, 4, 4)
    pair = models.Pair(config, config, batch=models.targets())
    method = METHODS["makd"].build(MakdConfig(layer_layers="2"), config, config, TOKENS)
    student, teacher = pair.seen()

    def attention(b: int, i: int) -> float:
        keys = student.keys_of(pair.batch, b, i)
        return sum(
            models.kl(student.attentions[1][b, h, i, keys], teacher.attentions[1][b, h, i, keys]) / 4 for h in range(4)
        )

    assert pair.means(method)["attention"] == pytest.approx(pair.mean_over_tokens(attention), rel=1e-4)
