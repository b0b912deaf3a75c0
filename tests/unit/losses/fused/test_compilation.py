"""The interpreter takes all of Python, the compiler does not; and it needs no GPU to say so."""

from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from llmdistill.attention_mask import AttentionMask
from llmdistill.losses.divergence import FORWARD_KL, TOTAL_VARIATION, jsd_with_derivative
from llmdistill.losses.fused.blocks import AttentionInputs
from llmdistill.losses.fused.triton_attention import attention_loss
from llmdistill.losses.fused.triton_features import squared_error
from llmdistill.losses.fused.triton_head import kernel_losses
from llmdistill.losses.terms import BoundTokenTerms, TokenTerm

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


ABSENT_GPU = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 80, 32), get_current_device=lambda: 0, get_current_stream=lambda _: 0
)
"""What a kernel's call asks of the driver before it launches."""


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """What was compiled for an A100, in place of being launched."""
    kernels = []
    run = JITFunction.run

    def compile_only(self, *arguments, warmup, **settings):
        kernels.append(run(self, *arguments, warmup=True, **settings))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    driver = triton.runtime.driver
    # Its name in newer and in older versions; asking for the newer `active` would look for a GPU.
    monkeypatch.setattr(driver, "_active" if "_active" in vars(driver) else "active", ABSENT_GPU)
    return kernels


def test_head(compiled):
    logits, labels = torch.zeros(2, 100, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    divergences = (None, FORWARD_KL, jsd_with_derivative(0.5), TOTAL_VARIATION)
    terms = [TokenTerm("term", divergence, temperature=2.0) for divergence in divergences]
    kernel_losses(logits, logits.clone(), labels, BoundTokenTerms(terms, torch.ones(4)), with_gradient=True)
    assert [kernel.name for kernel in compiled] == ["_rows_kernel"]


def test_attention(compiled):
    query, key = torch.zeros(1, 4, 40, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16)
    student, teacher = AttentionInputs(query, key, 0.125), AttentionInputs(query[..., :32], key[..., :32], 0.25)
    mask = AttentionMask(torch.ones(1, 40), True, 8, torch.ones(1, 40))
    attention_loss("student_teacher", student, teacher, mask, {"query", "key"})
    assert [kernel.name for kernel in compiled] == ["row_values", "query_gradient", "key_gradient"]
    assert max(kernel.metadata.shared for kernel in compiled) <= 160 * 1024  # an A100's share for a block is 163 KB


@pytest.mark.parametrize(("shape", "min_square"), [((2, 40, 14336), None), ((2, 4, 40, 80), 1e-6)])
def test_features(compiled, shape, min_square):
    features = torch.zeros(shape, dtype=torch.bfloat16)
    if len(shape) == 4:
        features = features.transpose(1, 2).contiguous().transpose(1, 2)
    real_BT = torch.ones(2, 40, dtype=torch.bool)
    squared_error(features, features, real_BT, min_square=min_square, with_gradient=True)
    (kernel,) = compiled
    assert kernel.name == "squared_error_shares"
    # Student, teacher and gradient move 16 bytes at a time.
    assert "ld.global.v4.b32" in kernel.asm["ptx"]
    assert "st.global.v4.b32" in kernel.asm["ptx"]
