"""Compiled layers give the losses, taps and gradients of the layers as they were."""

from functools import partial

import pytest
import torch
from hostile import refuses
from tiny import shaken, tiny_model
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.config.command_line import parse_run
from llmdistill.errors import UserError
from llmdistill.methods import METHODS, build_method
from llmdistill.methods.kd import KdConfig
from llmdistill.methods.makd import MakdConfig
from llmdistill.methods.minilm import MinilmConfig
from llmdistill.models.families import layers_of
from llmdistill.step import compile as compiling
from llmdistill.step import tap_models
from llmdistill.step.compile import check_compilers, compile_layers
from llmdistill.step.forward import TappedModel
from llmdistill.step.tap_models import tap_student, tap_teacher
from llmdistill.step.taps import Recorder
from llmdistill.training.checks import compiles
from llmdistill.training.plan import make_plan

SETTINGS = {
    "makd": MakdConfig(matrix_layers="all", layer_layers="all", label=0.5),
    "minilm": MinilmConfig(value_mse=1.0),
    "kd": KdConfig(ratio=0.7),
}
CPU = torch.device("cpu")


def make(family: str, seed: int, num_layers: int = 1):
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if family == "bert" else {}
    # Larger than at birth, so that every term has weight.
    return shaken(tiny_model(family, seed=seed, num_hidden_layers=num_layers, **dropout), 0.2)


def make_batch(sequences: int, tokens: int) -> Batch:
    ids = torch.randint(3, 40, (sequences, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    mask[0, tokens - 2 :] = 0
    return Batch(ids, mask, ids.masked_fill(mask == 0, IGNORE_INDEX))


def train(
    family: str,
    method_name: str,
    *,
    backend: str | None,
    checkpointing: bool = False,
    batches: int = 2,
    layers: int = 1,
):
    """Terms and gradients of batches of different sizes."""
    teacher, student = make(family, 0, layers).eval(), make(family, 1, layers).train()
    if checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in student.base_model.encoder.layer:
            layer._gradient_checkpointing_func = partial(_checkpoint, use_reentrant=False)
    method = build_method([method_name], SETTINGS, teacher.config, student.config)
    recorders = Recorder(teacher, method.teacher_taps), Recorder(student, method.student_taps)
    for recorder in recorders if backend is not None else ():
        compile_layers(recorder, backend=str(backend))
    of_teacher, of_student = (TappedModel(each.model, each) for each in recorders)
    seen = []
    for batch in (make_batch(3, 9), make_batch(2, 7))[:batches]:
        with torch.no_grad():
            targets = of_teacher.compute_targets(batch, lm_head=method.teacher_positions)
        losses = of_student.compute_losses(batch, method.bind_terms(targets, batch))
        student.zero_grad()
        losses.total.backward()
        gradients = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
        seen.append({**{name: loss.sum.detach() for name, loss in losses.terms.items()}, **gradients})
    return seen


def _checkpoint(function, *args, use_reentrant: bool):
    counters["checkpoints"]["all"] += 1
    return checkpoint(function, *args, use_reentrant=use_reentrant)


def compare(compiled, plain) -> None:
    for ours, theirs in zip(compiled, plain, strict=True):
        for name, tensor in theirs.items():  # a parameter without gradient may have one of zeros in a graph
            assert (ours[name] - tensor).abs().max() <= 1e-5 * max(1.0, tensor.abs().max()), name
        assert not any(ours[name].any() for name in ours.keys() - theirs.keys())


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize(("family", "method", "checkpointing", "layers", "graphs"), [
    ("llama", "makd", False, 3, 2),
    ("bert", "minilm", True, 3, 4),  # the taps of the last layer make it another kind
    ("qwen3_moe", "kd", False, 2, 2),
])  # fmt: skip
def test_terms_and_gradients_are_those_of_plain_layers(family, method, checkpointing, layers, graphs):
    plain = train(family, method, backend=None, checkpointing=checkpointing, layers=layers)
    counters.clear()
    compare(train(family, method, backend="aot_eager", checkpointing=checkpointing, layers=layers), plain)
    # Once for each layer in each of the two batches.
    assert counters["checkpoints"]["all"] == (2 * layers if checkpointing else 0)
    # One graph a kind of layer, in teacher and student, whatever the size of the batch; no tap breaks it.
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize(("family", "changes", "kinds"), [
    ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20}, 2),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}, 2),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, 4),
])  # fmt: skip
def test_layers_that_differ_have_graphs_of_their_own(family, changes, kinds):
    depth = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    model = tiny_model(family, scale=3.0, **depth, **changes).eval()
    tapped = TappedModel(model, recorder := Recorder(model, {"query": frozenset(range(4))}))
    batches = make_batch(3, 9), make_batch(2, 6)
    with torch.no_grad():
        plain = [tapped(batch) for batch in batches]
        compile_layers(recorder, backend="eager")
        compiled = [tapped(batch) for batch in batches]
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits)
        for layer in range(4):
            torch.testing.assert_close(ours.taps.query[layer], theirs.taps.query[layer])
    assert counters["stats"]["unique_graphs"] == kinds


@pytest.mark.slow  # compiles C++
def test_generated_kernels_give_the_same():
    try:
        check_compilers(CPU)
    except UserError as error:
        pytest.skip(str(error))
    compiled, plain = (train("llama", "minilm", backend=each, batches=1) for each in ("inductor", None))
    compare(compiled, plain)


def test_generation_and_packed_rows_of_a_call_each_run_the_layers_as_they_were():
    model = make("llama", 0).eval()
    compile_layers(recorder := Recorder(model, {"query": frozenset({0})}), backend="aot_eager")
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    ids, numbers = torch.arange(3, 11)[None], torch.tensor([[1] * 5 + [2] * 3])
    positions = torch.cat([torch.arange(5), torch.arange(3)])[None]
    outputs = TappedModel(model, recorder)(Batch(ids, numbers, ids, position_ids=positions))
    assert outputs.taps.query.keys() == {0}
    assert not counters["stats"]


@pytest.mark.parametrize(("words", "device", "compiled"), [
    ([], "cuda", True),
    ([], "cpu", False),
    (["--train.compile", "false"], "cuda", False),
    (["--train.compile", "true"], "cpu", True),
    (["--train.steps", "499"], "cuda", False),
    (["--ds_config", "zero3"], "cuda", False),
    (["--teacher.sharding", "zero3"], "cuda", False),
])  # fmt: skip
def test_a_run_compiles_by_itself_where_it_can(words, device, compiled, monkeypatch):
    monkeypatch.setattr("llmdistill.training.checks.check_compilers", lambda device: None)
    config = ["--ds_config", "zero2", "--train.steps", "500", "--train.compile", "auto", *words]
    plan = make_plan(parse_run(config, METHODS)[0])
    assert compiles(plan, torch.device(device)) == compiled

    def missing(device):
        raise UserError("no compiler")

    monkeypatch.setattr("llmdistill.training.checks.check_compilers", missing)
    assert compiles(plan, torch.device(device)) == ("true" in words)


@pytest.mark.parametrize(("words", "family", "runs"), [
    ([], "llama", "transformers"),
    (["--train.compile", "true"], "llama", "compiled"),
    (["--train.liger", "true"], "llama", "liger"),
    (["--train.liger", "true"], "gpt2", "transformers"),
])  # fmt: skip
def test_both_models_run_the_kernels_of_the_run(words, family, runs, monkeypatch):
    used = []
    monkeypatch.setattr(tap_models, "apply_liger", used.append)
    plan = make_plan(parse_run(["--ds_config", "zero2", *words], METHODS)[0])
    for tap in (tap_teacher, tap_student):
        model = make(family, 0)
        method = build_method(["kd"], {"kd": SETTINGS["kd"]}, model.config, model.config)
        tapped = tap(method, model, layer_kernels=plan.layer_kernels)
        assert ("forward" in vars(layers_of(model)[0])) == (runs == "compiled")
        assert (used.pop() is model) if runs == "liger" else not used
        tapped.remove()


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    for ds_config, sharding, said in (
        ("zero3", "replicated", r"zero_optimization\.stage 3"),
        ("zero2", "zero3", "teacher.sharding"),
    ):
        words = ["--train.compile", "true", "--ds_config", ds_config, "--teacher.sharding", sharding]
        with pytest.raises(UserError, match=f"train.compile is true, but .*{said}"):
            make_plan(parse_run(words, METHODS)[0])
    monkeypatch.setattr("shutil.which", lambda name: None)
    refuses("no C++ compiler was found", check_compilers, CPU)
    monkeypatch.setattr(compiling, "has_triton", lambda: False)
    refuses("Triton is missing", check_compilers, torch.device("cuda"))
