"""Liger's kernels in a model; without a GPU they run in Triton's interpreter, which needs a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import shaken, tiny_config, tiny_model
from torch import nn
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.config.command_line import parse_run
from llmdistill.errors import UserError
from llmdistill.losses.fused.triton import available
from llmdistill.methods import METHODS, build_method
from llmdistill.methods.makd import MakdConfig
from llmdistill.step import liger
from llmdistill.step.tap_models import tap_student, tap_teacher
from llmdistill.students.install import install
from llmdistill.students.sizes import plan_factors
from llmdistill.training import checks
from llmdistill.training.plan import make_plan

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if available("cuda") else "cpu"
is_installed = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="without the extra liger")
RUNS_HERE = INTERPRETED or available("cuda")


@is_installed
@pytest.mark.slow  # a minute in the interpreter
@pytest.mark.skipif(RUNS_HERE, reason="the kernels run here")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture(autouse=True)
def interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's kernels call methods of floats, which the interpreter leaves as Python's, and a function of libdevice."""
    if not INTERPRETED:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return convert(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr("liger_kernel.ops.rms_norm.rsqrt", lambda value: tl.math.rsqrt(value))
    monkeypatch.setattr(liger, "available", lambda _: True)


def outcome(student: PreTrainedModel, teacher: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The losses of MaKD in all layers, and the gradients of the student."""
    method = build_method(
        ["makd"],
        {"makd": MakdConfig(matrix_layers="all", layer_layers="all", label=1.0)},
        teacher.config,
        student.config,
    )
    ids = torch.randint(3, 40, (2, 4), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    batch = Batch(ids, mask, ids.masked_fill(mask == 0, -100)).with_positions(shift=True).to(DEVICE)
    of_teacher, of_student = tap_teacher(method, teacher), tap_student(method, student)
    with torch.no_grad():
        targets = of_teacher.compute_targets(batch, lm_head=method.teacher_positions)
    losses = of_student.compute_losses(batch, method.bind_terms(targets, batch))
    losses.total.backward()
    gradients = {name: weight.grad.clone() for name, weight in student.named_parameters() if weight.grad is not None}
    student.zero_grad()
    of_teacher.remove()
    of_student.remove()
    return torch.stack([loss.sum for loss in losses.terms.values()]), gradients


@is_installed
@pytest.mark.skipif(not RUNS_HERE, reason="neither a GPU nor the interpreter")
@pytest.mark.parametrize("model_type", liger.MODEL_TYPES)
def test_losses_and_gradients_are_those_of_transformers(model_type: str) -> None:
    teacher, student = (
        shaken(tiny_model(model_type, seed=seed, num_hidden_layers=1), 0.2).to(DEVICE) for seed in (0, 1)
    )
    install(student, plan_factors(student, FactorizeConfig(rank=5)))
    student.to(DEVICE).train()
    expected, gradients = outcome(student, teacher)
    code = vars(sys.modules[type(student).__module__])
    classes = {name: value for name, value in code.items() if isinstance(value, type) and issubclass(value, nn.Module)}
    rotary = code["apply_rotary_pos_emb"]
    try:
        for model in (teacher, student):
            liger.apply_liger(model)
        assert "LigerSwiGLUMLP" in str(student)
        assert "LigerRMSNorm" in str(student)
        assert code["apply_rotary_pos_emb"] is not rotary
        assert all(code[name] is value for name, value in classes.items()), "models made later are transformers' own"
        found, fused = outcome(student, teacher)
    finally:
        code["apply_rotary_pos_emb"] = rotary
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == fused.keys() == dict(student.named_parameters()).keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_an_architecture_with_another_activation_does_not_fit() -> None:
    assert liger.fits(tiny_config("llama"))
    assert not liger.fits(tiny_config("llama", hidden_act="gelu"))
    assert not liger.fits(tiny_config("gpt2"))


@pytest.mark.parametrize(("words", "has_gpu", "has_library", "runs"), [
    (["--train.liger", "auto"], True, True, True),
    (["--train.liger", "auto"], False, True, False),
    (["--train.liger", "auto"], True, False, False),
    ([], True, True, False),
    (["--train.liger", "auto", "--train.compile", "true"], True, True, False),
])  # fmt: skip
def test_a_run_takes_it_by_itself_where_it_can(
    words: list[str], has_gpu: bool, has_library: bool, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "available", lambda _: has_gpu)
    monkeypatch.setattr(liger, "is_installed", lambda: has_library)
    plan = make_plan(parse_run(["--ds_config", "zero2", *words], METHODS)[0])
    assert checks.runs_liger(plan, torch.device("cuda")) == runs


def test_what_it_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(parse_run(["--ds_config", "zero2", "--train.liger", "true"], METHODS)[0])
    with pytest.raises(UserError, match="need a GPU"):
        checks.check_liger(plan, torch.device("cpu"))
    monkeypatch.setattr(checks, "available", lambda _: True)
    monkeypatch.setattr(liger, "is_installed", lambda: False)
    with pytest.raises(UserError, match=r"Liger is missing: pip install .*\[liger\]"):
        checks.check_liger(plan, torch.device("cuda"))
    monkeypatch.setattr(liger, "is_installed", lambda: True)
    checks.check_liger(plan, torch.device("cuda"))
    monkeypatch.setattr(liger, "fits", lambda _: False)
    with pytest.raises(UserError, match="the student is llama"):
        checks.check_liger(plan, torch.device("cuda"))
