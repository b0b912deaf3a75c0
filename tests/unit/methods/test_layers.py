import pytest
from transformers import LlamaConfig

from llmdistill.errors import UserError
from llmdistill.methods.layers import last_or_mapped, parse_layers


@pytest.mark.parametrize(("spec", "teacher"), [("last", 3), (4, 3), (1, 0)])
def test_named_layers_count_from_one(spec: int | str, teacher: int) -> None:
    config = LlamaConfig(num_hidden_layers=4)
    [pair] = last_or_mapped(spec, None, config, config, method="x")
    assert (pair.student, pair.teacher) == (3, teacher)


@pytest.mark.parametrize(("spec", "num_layers", "expected"), [
    ("lower", 5, (0, 1)), ("upper", 5, (2, 3, 4)), ("lower", 1, ()), ("upper", 1, (0,)),
    ("all", 3, (0, 1, 2)), ("none", 3, ()), ("6, 1 - 2", 6, (0, 1, 5)), ("2,2,1-2", 2, (0, 1)),
])  # fmt: skip
def test_layers(spec: str, num_layers: int, expected: tuple[int, ...]) -> None:
    assert parse_layers(spec, num_layers, key="k") == expected


@pytest.mark.parametrize("spec", ["0", "5", "3-2", "1,,2", "middle"])
def test_what_is_no_list_of_layers(spec: str) -> None:
    with pytest.raises(UserError, match=r"makd\.matrix_layers is .* 4 layers"):
        parse_layers(spec, 4, key="makd.matrix_layers")
