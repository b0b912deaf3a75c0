import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from llmdistill.losses.fused import triton as kernels


@pytest.mark.parametrize(
    ("capability", "triton", "expected"),
    [((9, 0), "3.9.0", True), ((8, 0), "3.4.0", True), ((7, 5), "3.9.0", False), ((9, 0), "3.2.0", False)],
)
def test_asks_for_an_a100_or_later_and_a_triton_that_can(monkeypatch, capability, triton, expected) -> None:
    kernels._has_triton.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    assert kernels.available("cuda:1") is expected
    assert not kernels.available(torch.device("cpu"))
    kernels._has_triton.cache_clear()


def test_the_package_is_imported_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed, as its metadata say, but cannot be imported."""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not importlib.reload(kernels)._has_triton()
    kernels._has_triton.cache_clear()
