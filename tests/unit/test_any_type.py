"""Models of types without an entry in FAMILIES, each peculiar in a way of its own; `tests/sweep.py` runs all types."""

import os

import pytest
import torch
from shrunk import AS_DECODER, model_types, shrunk_model
from sweep import STEPS, run_type
from torch import nn
from transformers.pytorch_utils import Conv1D

from llmdistill.models.families import layers_name, max_positions
from llmdistill.models.general import is_linear
from llmdistill.students.counting import layer_linears

QUICK = {
    "falcon": "its linears are a subclass of nn.Linear",
    "jamba": "its layers are of two kinds, and its code reads the weight and the bias of a linear",
    "mamba2": "its fused kernel reads the weight and the bias of a linear",
    "recurrent_gemma": "its code initializes the bias of a linear",
    "xlstm": "its code initializes linears by their names",
    "zamba2": "its layers share matrices",
}
PECULIAR = {
    **QUICK,
    "bloom": "fused queries, keys and values, and ALiBi",
    "ctrl": "no attention interface",
    "deepseek_v2": "latent attention, and experts in some layers",
    "esm": "a dropout that is true or false",
    "fnet": "no attention",
    "funnel": "lists of lists of layers",
    "longformer": "linears that no short text reaches",
    "perceiver": "logits of more positions than there are tokens",
    "xlnet": "no limit of positions",
}
"""Type -> what is peculiar."""
TRACED = ["arcee", "mixtral", f"bart{AS_DECODER}"]
"""Types whose inner tensors are found without an entry: linears, experts, and the decoder of another model."""
RIGHT_OR_REFUSED = ("right", "refused: ")


@pytest.mark.parametrize("name", QUICK)
def test_a_student_is_loaded_taught_and_exported(name: str) -> None:
    steps = ("svd", "loss", "export")
    assert run_type(name, steps) | {"seconds": None} == {"type": name, **dict.fromkeys(steps, "right"), "seconds": None}


@pytest.mark.parametrize("name", TRACED)
def test_a_student_of_traced_layers_learns_by_makd(name: str) -> None:
    found = run_type(name, ("svd", "makd"))
    assert (found["svd"], found["makd"]) == ("right", "right")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flaubert", f"roberta{AS_DECODER}"])
def test_a_whole_run(name: str) -> None:
    """Flaubert's class with a head is named as if it had none; an encoder may be a decoder."""
    found = run_type(name, ("svd", "distill"))
    assert (found["svd"], found["distill"]) == ("right", "right")


@pytest.mark.slow
@pytest.mark.parametrize("name", model_types() if os.environ.get("LLMDISTILL_SWEEP") == "all" else PECULIAR)
def test_each_type_is_right_or_refused_in_one_sentence(name: str) -> None:
    """LLMDISTILL_SWEEP=all runs every type of transformers, in most of an hour."""
    found = run_type(name, STEPS)
    if "stock" not in found:  # transformers itself does not run the small model
        assert all(found[step].startswith(RIGHT_OR_REFUSED) for step in STEPS if step in found), found
        assert found["svd"] == "right" or name not in PECULIAR


def test_a_student_is_weighted_although_its_code_lacks_a_gradient() -> None:
    """Queries of MRA choose blocks without a gradient, so that the check on held-out examples cuts them plainly."""
    found = run_type("mra", ("svd", "gradients"))
    assert (found["svd"], found["gradients"]) == ("right", "right")


@pytest.mark.parametrize("name", [
    "bert", "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpt", "roberta",
    "roberta-prelayernorm", "xlm-roberta-xl", "xmod", f"camembert{AS_DECODER}", f"xmod{AS_DECODER}",
])  # fmt: skip
def test_the_longest_text_of_a_type_is_the_longest_that_its_model_runs(name: str) -> None:
    model = shrunk_model(name)
    longest = max_positions(model.config, 1000)
    model(input_ids=torch.full((1, longest), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 5))


def test_linears_are_found_by_what_they_compute() -> None:
    class Plain(nn.Linear):
        def forward(self, x):
            return x @ self.weight.T if self.bias is None else x @ self.weight.T + self.bias

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 0.5

    class Router(nn.Linear):
        def forward(self, x):
            return super().forward(x), None

    class Gated(nn.Linear):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.gate = nn.Parameter(torch.ones(1))

    class Named(nn.Linear):
        """Differs in its name alone."""

    assert all(
        is_linear(each) for each in (nn.Linear(4, 6), Conv1D(6, 4), Plain(4, 6), Plain(4, 6, False), Named(4, 6))
    )
    assert not any(is_linear(each) for each in (Scaled(4, 6), Router(4, 6), Gated(4, 6), nn.Bilinear(4, 4, 6)))
    with torch.device("meta"):
        assert is_linear(Plain(4, 6))
        assert not is_linear(Scaled(4, 6))


def test_layers_of_several_kinds_are_one_list() -> None:
    assert layers_name(shrunk_model("jamba")) == "layers"
    assert layers_name(shrunk_model("funnel")) == "encoder.blocks.0"


def test_what_layers_share_stays_dense() -> None:
    linears = layer_linears(shrunk_model("zamba2"))
    assert not any("shared_transformer" in name for name in linears)
    assert any("mamba" in name for name in linears)
