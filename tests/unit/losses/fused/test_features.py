"""The kernel against the operations of torch in fp64, which the tests of the folder above hold against a loop."""

import pytest
import torch
from torch import Tensor

from llmdistill.losses.features import MIN_SQUARE, squared_error
from llmdistill.losses.fused import triton_features

RAGGED = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1, 1]])
ONE_EMPTY = torch.tensor([[0] * 7, [1] * 7, [1, 0, 0, 0, 0, 0, 0]])
SHAPES = {
    "flat": (3, 7, 36),
    "one feature": (3, 7, 1),
    "wider than a block": (3, 7, 1100),
    "heads": (3, 4, 7, 128),
    "one head": (3, 1, 7, 80),
    "no power of two": (3, 5, 7, 12),
}


def by_tokens(tensor: Tensor) -> Tensor:
    """A view of (B, T, H, D), as projections leave their heads; a flat tensor as a view of (T, B, F)."""
    first, second = (1, 2) if tensor.dim() == 4 else (0, 1)
    return tensor.transpose(first, second).contiguous().transpose(first, second)


def part_of_wider(tensor: Tensor) -> Tensor:
    """A part of the features of a fused projection, with the tokens before the heads."""
    wider = torch.cat([torch.full_like(tensor, torch.nan), tensor, torch.full_like(tensor, torch.nan)], -1)
    return by_tokens(wider)[..., tensor.shape[-1] : 2 * tensor.shape[-1]]


def features_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


LAYOUTS = (Tensor.contiguous, by_tokens, part_of_wider, features_first)


def make(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    # Neither mean nor deviation is that of the other model.
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return ((1 + seed) * numbers + seed).to(dtype)


def spoiled(tensor: Tensor, mask: Tensor) -> Tensor:
    real = mask.bool()[:, None, :, None] if tensor.dim() == 4 else mask.bool()[..., None]
    return torch.where(real, tensor, torch.nan)


def run(device, student, teacher, mask, *, normalize, with_gradient=True) -> tuple[Tensor, Tensor | None]:
    """The layouts of the tensors are kept on the way to the device."""
    return triton_features.squared_error(
        *(each.to(device) for each in (student, teacher, mask != 0)),
        min_square=MIN_SQUARE if normalize else None,
        with_gradient=with_gradient,
    )


def check(device, student, teacher, mask, *, normalize, layouts=(by_tokens, by_tokens), tolerance=1e-5) -> None:
    min_square = MIN_SQUARE if normalize else None
    exact = (student.double(), teacher.double(), mask != 0)
    loss, gradient = squared_error(*exact, min_square=min_square, with_gradient=True)
    sides = [layout(spoiled(side, mask)) for layout, side in zip(layouts, (student, teacher), strict=True)]
    found, of_student = run(device, *sides, mask, normalize=normalize)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    assert of_student.dtype == student.dtype
    assert (of_student.cpu() - gradient).norm() <= tolerance * gradient.norm()
    padding = (mask == 0)[:, None].expand(student.shape[:-1]) if student.dim() == 4 else mask == 0
    assert not of_student.cpu()[padding].any()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_operations_of_torch(device: torch.device, shape: tuple[int, ...], normalize: bool) -> None:
    check(device, make(shape, 0), make(shape, 1), RAGGED, normalize=normalize)


@pytest.mark.parametrize("normalize", [False, True])
def test_several_programs_share_the_work(device, monkeypatch, normalize) -> None:
    """The last block of tokens is not full, nor is that of features where tokens are cut."""
    monkeypatch.setattr(triton_features, "TILE", 64)
    monkeypatch.setattr(triton_features, "WIDEST_CUT", 16)
    check(device, make((3, 5, 7, 12), 0), make((3, 5, 7, 12), 1), ONE_EMPTY, normalize=normalize)


@pytest.mark.parametrize("shape", [(3, 7, 36), (3, 2, 7, 20)], ids=["flat", "heads"])
@pytest.mark.parametrize(("of_student", "of_teacher"), zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True))
def test_any_strides(device, of_student, of_teacher, shape) -> None:
    check(device, make(shape, 0), make(shape, 1), RAGGED, normalize=True, layouts=(of_student, of_teacher))


@pytest.mark.parametrize(
    ("normalize", "dtypes"), [(False, (torch.bfloat16, torch.bfloat16)), (True, (torch.bfloat16, torch.float32))]
)
def test_half_precision(device: torch.device, dtypes: tuple[torch.dtype, torch.dtype], normalize: bool) -> None:
    """The sum is as exact as in fp32, the gradient but for its rounding to 8 bits."""
    sides = [make((3, 4, 7, 64), seed, dtype) for seed, dtype in enumerate(dtypes)]
    check(device, *sides, RAGGED, normalize=normalize, tolerance=2**-7)


@pytest.mark.parametrize("shape", [(0, 2, 7, 20), (3, 0, 20)])
def test_no_tokens(device: torch.device, shape: tuple[int, ...]) -> None:
    side = torch.zeros(shape)
    found, gradient = run(device, side, side, torch.ones(shape[0], shape[-2]), normalize=False)
    assert found.item() == 0
    assert gradient.shape == shape
