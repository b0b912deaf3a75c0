from __future__ import annotations

import pytest
from transformers import LlamaConfig

from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.methods.layers import last_or_mapped, parse_layers
from llmdistill.methods.makd import MakdConfig
from llmdistill.objective import TOKENS


def test_named_layers_count_from_one() -> None:
    config = LlamaConfig(num_hidden_layers=4)
    pairs = [last_or_mapped(spec, None, config, config, method="x") for spec in ("last", 4, 1)]
    assert [(pair.student, pair.teacher) for (pair,) in pairs] == [(3, 3), (3, 3), (3, 0)]
    for spec in (0, 5, -1):
        with pytest.raises(
            UserError, match=rf"teacher_layer is {spec}: the teacher has 4 layers; give one from 1 to 4"
        ):
            last_or_mapped(spec, None, config, config, method="x")


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


def test_makds_layers_are_the_students_and_the_map_says_which_teach_them(models) -> None:
    pair = models.Pair(models.bert(5, 16, 4, 4), models.bert(3, 16, 4, 4))
    settings = MakdConfig(teacher_layers="5,0,2", matrix_layers="all", layer_layers="2-3")
    means = pair.means(METHODS["makd"].build(settings, pair.teacher_config, pair.student_config, TOKENS))
    student, teacher = pair.seen()

    def error(name: str, layers: list[tuple[int, int]]) -> float:
        def of_token(b: int, i: int) -> float:
            return sum(
                (student.flat[name, mine][b, i] - teacher.flat[name, theirs][b, i]).square().mean()
                / teacher.flat[name, theirs][b, i].square().mean()
                for mine, theirs in layers
            )

        return pair.mean_over_tokens(of_token)

    def attention(b: int, i: int) -> float:
        keys = student.keys_of(pair.batch, b, i)
        return sum(
            models.kl(student.attentions[2][b, h, i, keys], teacher.attentions[1][b, h, i, keys]) / 4 for h in range(4)
        )

    for name in ("query", "key", "value"):
        assert means[name] == pytest.approx(error(name, [(0, 4), (2, 1)]), rel=1e-4)
    assert means["hidden"] == pytest.approx(error("hidden", [(2, 1)]), rel=1e-4)
    assert means["attention"] == pytest.approx(pair.mean_over_tokens(attention), rel=1e-4)
