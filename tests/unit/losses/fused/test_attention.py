"""The kernels against the blocks of a CPU in fp64, which the tests of the folder above hold against a loop."""

import pytest
import torch
from torch import Tensor

from llmdistill.attention_mask import AttentionMask
from llmdistill.losses.fused.blocks import AttentionInputs, BlockLoss, block_loss
from llmdistill.losses.fused.triton_attention import attention_loss

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that nobody uses

TOKENS = 21  # two blocks of 16, the second not full
RIGHT, LEFT = [[1] * 14 + [0] * 7], [[0] * 18 + [1] * 3]
PACKED = [[1] * 6 + [2] * 9 + [3] * 2 + [0] * 4]


def make(seed, batch, heads, groups, width, dtype=torch.float32) -> AttentionInputs:
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(batch, each, TOKENS, width, generator=generator).to(dtype) for each in (heads, groups))
    return AttentionInputs(query, key, 2 * width**-0.5)


def spoiled(sides: AttentionInputs, segments: Tensor) -> AttentionInputs:
    padding = (segments == 0)[:, None, :, None]
    return AttentionInputs(
        sides.query.masked_fill(padding, torch.nan), sides.key.masked_fill(padding, torch.inf), sides.scaling
    )


def run(device, kind, student, teacher, segments, *seen, gradients=("query", "key"), blocks=(16, 16)) -> BlockLoss:
    student, teacher = (AttentionInputs(x.query.to(device), x.key.to(device), x.scaling) for x in (student, teacher))
    seen_there = [each.to(device) if isinstance(each, Tensor) else each for each in seen]
    mask = AttentionMask(segments.to(device), *seen_there)
    found = attention_loss(kind, student, teacher, mask, gradients, blocks=blocks)
    return BlockLoss(*(None if each is None else each.cpu() for each in found))


def check(device, kind, student, teacher, mask, *seen, tolerance=1e-5, **options) -> None:
    segments = torch.tensor(mask)
    exact = [AttentionInputs(x.query.double(), x.key.double(), x.scaling) for x in (student, teacher)]
    expected = block_loss(kind, *exact, AttentionMask(segments, *seen), {"query", "key"})
    found = run(device, kind, spoiled(student, segments), spoiled(teacher, segments), segments, *seen, **options)
    assert found.sum.item() == pytest.approx(expected.sum.item(), rel=tolerance)
    for result, reference, source in (
        (found.query_grad, expected.query_grad, student.query),
        (found.key_grad, expected.key_grad, student.key),
    ):
        assert result.dtype == source.dtype
        assert (result - reference).norm() < tolerance * reference.norm()
        assert not result[(segments == 0)[:, None].expand(result.shape[:3])].any()


SIDES = make(0, 1, 2, 1, 12), make(1, 1, 2, 2, 20)
HALF = make(0, 1, 2, 1, 16, torch.bfloat16), make(1, 1, 2, 1, 16, torch.bfloat16)
EMPTY = [[0] * 21, [1] * 21]
UNTIL = torch.tensor([[4] * 4 + list(range(5, 15)) + [TOKENS] * 7, [10] * 10 + list(range(11, 22))])
"""The source of 4 or 10 tokens sees itself; a token of the target sees the source and the target up to itself."""
CASES: list[tuple] = [
    ("student_teacher", *SIDES, PACKED, True, 5),
    ("teacher_student", *SIDES, PACKED, False, None),
    ("score_mse", *SIDES, PACKED, False, 18),
    ("teacher_student", make(0, 2, 2, 1, 12), make(1, 2, 2, 2, 20), [*RIGHT, [1] * TOKENS], False, None, UNTIL),
    ("student_teacher", make(0, 1, 1, 1, 8), make(1, 1, 1, 1, 16), LEFT, True, None),
    ("student_teacher", make(0, 2, 1, 1, 8), make(1, 2, 1, 1, 16), EMPTY, True, None),
]
"""No kernel treats a view of one kind (causal or not, and a window) as that of another."""


@pytest.mark.parametrize("case", CASES)
def test_equals_the_blocks_of_a_cpu(device: torch.device, case: tuple) -> None:
    check(device, *case)


@pytest.mark.parametrize("kind", ["student_teacher", "teacher_student", "score_mse"])
def test_half_precision(device, kind):
    check(device, kind, *HALF, RIGHT, True, None, tolerance=1e-2)


@pytest.mark.parametrize("groups", [(4, 1), (2, 4)])
def test_grouped_queries_in_uneven_blocks(device: torch.device, groups: tuple[int, int]) -> None:
    student, teacher = (make(seed, 1, 4, each, 8) for seed, each in enumerate(groups))
    check(device, "teacher_student", student, teacher, RIGHT, True, None, blocks=(16, 32))


def test_heads_cut_anew_are_views(device: torch.device) -> None:
    """Relation heads: features of (B, T, R·d) seen as (B, R, T, d), and the same tensor on both sides."""
    student, teacher = (torch.randn(1, TOKENS, 24, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    views = [flat.unflatten(-1, (2, 12)).transpose(1, 2) for flat in (student, teacher)]
    sides = [AttentionInputs(view, view, 12**-0.5) for view in views]
    check(device, "teacher_student", *sides, RIGHT, False, None)


def test_one_tensor_on_both_sides_gets_both_shares_of_the_gradient(device: torch.device) -> None:
    query, teacher = make(0, 1, 2, 2, 8).query.to(device), make(1, 1, 2, 2, 8)
    one, two = AttentionInputs(query, query, 0.5), AttentionInputs(query, query.clone(), 0.5)
    segments = torch.tensor(PACKED)
    apart = run(device, "teacher_student", two, teacher, segments, False, None)
    together = run(device, "teacher_student", one, teacher, segments, False, None, gradients={"query"})
    assert torch.equal(together.sum, apart.sum)
    assert torch.equal(together.query_grad, apart.query_grad + apart.key_grad)
    assert together.key_grad is None


def test_only_what_is_asked_for_and_no_sequences(device: torch.device) -> None:
    given = device, "student_teacher", make(0, 1, 1, 1, 8), make(1, 1, 1, 1, 8), torch.ones(1, TOKENS), True, None
    whole = run(*given)
    for gradients in ((), ("query",), ("key",)):
        found = run(*given, gradients=gradients)
        assert torch.equal(found.sum, whole.sum)
        assert torch.equal(found.query_grad, whole.query_grad) if "query" in gradients else found.query_grad is None
        assert torch.equal(found.key_grad, whole.key_grad) if "key" in gradients else found.key_grad is None
    none = make(0, 0, 2, 1, 8)
    found = run(device, "student_teacher", none, none, torch.ones(0, TOKENS), True, None)
    assert found.sum.item() == 0
    assert (found.query_grad.shape, found.key_grad.shape) == (none.query.shape, none.key.shape)
