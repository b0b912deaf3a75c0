"""The checks of a machine: what is missing is a failure with a remedy."""

import shutil
from pathlib import Path

import pytest
import torch

from llmdistill.runtime import devices, environment


def test_this_machine_has_everything_but_perhaps_a_gpu(tmp_path):
    found = {each.what: each.state for each in environment.check_environment(tmp_path / "runs" / "new", 1)}
    assert found.pop("GPU") == ("ok" if torch.cuda.is_available() else "warning")
    assert set(found.values()) == {"ok"}


def test_missing_libraries_and_programs(monkeypatch):
    version = devices.version
    monkeypatch.setattr(devices, "version", lambda name: version("none" if name == "deepspeed" else name))
    found = environment.libraries()
    assert (found.state, found.said) == ("failure", "deepspeed missing")
    monkeypatch.delenv("CXX", raising=False)
    missing = {"failure": (["deepspeed"], "launcher"), "warning": (["c++", "g++"], "no C++ compiler")}
    for state, (hidden, said) in missing.items():
        monkeypatch.setattr(shutil, "which", lambda name, hidden=hidden: None if name in hidden else f"/bin/{name}")
        found = environment.compiler()
        assert (found.state, said in found.said) == (state, True)


def test_kernels_that_a_gpu_lacks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for there, state in ((True, "ok"), (False, "warning")):
        monkeypatch.setattr(environment, "available", lambda _, there=there: there)
        found = environment.kernels()
        assert found.state == state
    assert "Triton 3.4 cannot be imported" in found.said
    assert "install triton>=3.4" in str(found.remedy)


def test_disk_without_room(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    assert environment.disk(tmp_path, free // 2).state == "ok"
    full = environment.disk(tmp_path / "not" / "there", 2 * free)
    assert full.state == "failure"
    assert "train.keep_checkpoints" in str(full.remedy)
    found = environment.disk(Path("/proc/x"), None)  # root may write there, and no folder can be made
    assert (found.state, "no folder can be made in /proc" in found.said) == ("failure", True)


@pytest.mark.parametrize(("has", "dtype", "device", "warns"), [
    ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, torch.bfloat16, "cpu", True),
    ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, torch.float32, "cpu", False),
    ({"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, torch.bfloat16, "cuda", False),
    ({"architecture": "x86_64", "avx512_bf16": True}, torch.bfloat16, "cpu", False),
    ({"architecture": "x86_64", "amx_bf16": True}, torch.bfloat16, "cpu", False),
    ({"architecture": "aarch64"}, torch.bfloat16, "cpu", False),
])  # fmt: skip
def test_emulated_bf16_is_warned_of(monkeypatch, has, dtype, device, warns):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: has, raising=False)
    warning = devices.emulation_warning(dtype, torch.device(device))
    assert (warning is not None) == warns
    assert warning is None or "has no instructions for bf16" in warning
