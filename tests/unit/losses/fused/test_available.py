import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from llmdistill.losses.fused import triton as kernels


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Pretend to have a GPU of a compute capability."""

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    kernels.available.cache_clear()
    yield pretend
    kernels.available.cache_clear()


@pytest.mark.parametrize(
    ("capability", "triton", "expected"),
    [((9, 0), "3.9.0", True), ((8, 0), "3.4.0", True), ((7, 5), "3.9.0", False), ((9, 0), "3.2.0", False)],
)
def test_asks_for_an_a100_or_later_and_a_triton_that_can(monkeypatch, gpu, capability, triton, expected) -> None:
    gpu(capability)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    assert kernels.available("cuda:1") is expected
    assert not kernels.available(torch.device("cpu"))


def test_the_package_is_imported_without_triton(monkeypatch: pytest.MonkeyPatch, gpu) -> None:
    """It is installed, as its metadata say, but cannot be imported."""
    gpu((9, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not importlib.reload(kernels).available("cuda")
