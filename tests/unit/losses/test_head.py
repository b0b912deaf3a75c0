import math

import pytest
import torch
from plain_losses import token_losses_plain
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import HeadInputs, LogitScale
from llmdistill.losses import divergence
from llmdistill.losses.fused import head_chunk
from llmdistill.losses.head import token_losses
from llmdistill.losses.terms import TokenTerm

from support import shapes_of_results

LABEL = TokenTerm("label", None)
SMOOTHED = TokenTerm("smoothed label", None, smoothing=0.1)
KL = TokenTerm("kl", divergence.FORWARD_KL)
KL_2 = TokenTerm("kl at 2", divergence.FORWARD_KL, 2.0, 4.0)
SOFT = TokenTerm("soft", divergence.SOFT_CROSS_ENTROPY)
SOFT_2 = TokenTerm("soft at 2", divergence.SOFT_CROSS_ENTROPY, 2.0)
OTHERS = [
    TokenTerm("reverse", divergence.REVERSE_KL, 1.5, 2.25),
    TokenTerm("jsd", divergence.jsd_with_derivative(0.3), 1.5),
    TokenTerm("skew forward", divergence.skew_forward_kl_with_derivative(0.1), 0.7),
    TokenTerm("skew reverse", divergence.skew_reverse_kl_with_derivative(0.4)),
    TokenTerm("tvd", divergence.TOTAL_VARIATION, 2.0),
    TokenTerm("own", divergence.divergence_by_autograd(divergence.reverse_kl), 0.7),
]
TERMS = [
    *([term] for term in (LABEL, SMOOTHED, KL, KL_2, SOFT, SOFT_2, *OTHERS)),
    [LABEL, KL],
    [SOFT_2, LABEL, KL_2],
    [KL, SOFT_2],
    [KL_2, SMOOTHED],
    [LABEL, KL_2, *OTHERS],
]
every_choice, some_choices = (
    pytest.mark.parametrize("terms", choices, ids=lambda terms: ", ".join(term.name for term in terms))
    for choices in (TERMS, TERMS[-5:])
)

N, V, K, K_TEACHER = 11, 13, 5, 7


def head(seed, *, width=K, rows=N, words=V, bias=True, dtype=torch.float64) -> HeadInputs:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, width), (words, width), (words,)]
    made = [torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    return HeadInputs(made[0], made[1], made[2] if bias else None)


def learned(inputs: HeadInputs, *frozen: str) -> HeadInputs:
    for name, each in zip(("rows", "weight", "bias"), inputs.tensors, strict=True):
        if each is not None and name not in frozen:
            each.requires_grad_()
    return inputs


def labels(rows: int = N, words: int = V) -> Tensor:
    return torch.randint(words, (rows,), generator=torch.Generator().manual_seed(9))


def factors_of(terms):
    return torch.tensor([0.5 + 0.25 * i for i in range(len(terms))])


def outcome(function, student, teacher, terms, *, times=1.0, **options) -> list[Tensor]:
    """The sums, and the gradients of whatever is learned."""
    factors = factors_of(terms)
    labels_N = labels(len(student.rows), options.get("vocabulary", V))
    losses = function(student, teacher, labels_N, terms, factors, **options)
    assert not losses.sums.requires_grad
    torch.testing.assert_close(losses.total.detach(), (losses.sums * factors).sum(), equal_nan=True)
    leaves = [each for each in student.tensors if each is not None and each.requires_grad]
    return [losses.sums, *torch.autograd.grad(losses.total * times, leaves)]


def assert_near(found, expected, relative=1e-10):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        difference = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-30)
        assert difference < relative


@every_choice
def test_it_equals_full_logits(terms: list[TokenTerm], monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks and blocks that leave a rest, and a factor that only shows in the backward pass."""
    monkeypatch.setattr(head_chunk, "_BLOCK_BYTES", 2 * V * 8)
    student, teacher = learned(head(0)), head(1, width=K_TEACHER)
    found = outcome(token_losses, student, teacher, terms, times=3.0, chunk=6)
    assert_near(found, outcome(token_losses_plain, student, teacher, terms, times=3.0))
    assert len(found) == 4


@pytest.mark.parametrize("scales", [((0.25, None), (3.0, None)), ((1.5, 2.0), (1.0, 5.0)), ((1.0, None), (2.0, 1.0))])
@some_choices
def test_logits_with_a_factor_and_a_cap(terms: list[TokenTerm], scales, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the formulas by autograd, in fp64 and from rounded outputs."""
    monkeypatch.setattr(head_chunk, "_BLOCK_BYTES", 2 * V * 8)
    for dtype, relative in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        sides = head(0, dtype=dtype), head(1, width=K_TEACHER, dtype=dtype)
        student, teacher = (side._replace(scale=LogitScale(*scale)) for side, scale in zip(sides, scales, strict=True))
        found = outcome(token_losses, learned(student), teacher, terms, times=3.0, chunk=6)
        exact = [
            HeadInputs(*(each.detach().double() for each in side.tensors), side.scale) for side in (student, teacher)
        ]
        assert_near(found, outcome(token_losses_plain, learned(exact[0]), exact[1], terms, times=3.0), relative)


def test_the_log_ratio_is_the_policy_gradient_at_the_labels() -> None:
    student, teacher, labels_N = learned(head(0)), head(1, width=K_TEACHER), labels()
    terms = [TokenTerm("sampled", divergence.LOG_RATIO), LABEL, OTHERS[3]]
    sums, *gradients = outcome(token_losses, student, teacher, terms, chunk=4)
    one, other = (
        functional.linear(*each.tensors).log_softmax(-1).gather(1, labels_N[:, None])[:, 0]
        for each in (student, teacher)
    )
    torch.testing.assert_close(sums[0], (one - other).sum().detach())
    plain = 0.5 * ((one - other).detach() * one).sum()
    rest = token_losses_plain(student, teacher, labels_N, terms[1:], factors_of(terms)[1:])
    torch.testing.assert_close(sums[1:], rest.sums)
    assert_near(gradients, torch.autograd.grad(plain + rest.total, list(student.tensors)))


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@some_choices
def test_precision(terms: list[TokenTerm], dtype: torch.dtype, relative: float) -> None:
    """Against full logits in fp64 from the very same numbers."""
    sizes = {"rows": 64, "words": 97}
    student, teacher = head(0, dtype=dtype, **sizes), head(1, width=K_TEACHER, dtype=dtype, **sizes)
    exact = (
        HeadInputs(*(each.double() for each in student.tensors)),
        HeadInputs(*(each.double() for each in teacher.tensors)),
    )
    found = outcome(token_losses, learned(student), teacher, terms, chunk=24)
    assert found[0].dtype == torch.float32
    assert all(each.dtype == dtype for each in found[1:])
    assert_near(found, outcome(token_losses_plain, learned(exact[0]), exact[1], terms), relative)


def test_half_precision_keeps_gradients_far_below_its_least_number() -> None:
    """As 1 / count is for a batch of many tokens; loss scaling multiplies only in the backward pass."""
    student, teacher = learned(head(0, dtype=torch.float16)), head(1, width=K_TEACHER, dtype=torch.float16)
    factors = torch.tensor([1e-7])
    (token_losses(student, teacher, labels(), [KL], factors).total * 1e7).backward()
    expected = outcome(token_losses_plain, student, teacher, [KL], times=2.0)
    assert_near([student.weight.grad], [expected[2]], 5e-3)


def test_the_weights_gradient_is_summed_in_fp32() -> None:
    """A thousand chunks that give 1 / 512 each: in bf16 the sum would not grow past 1 / 2."""
    rows, words = 1000, 2
    student = HeadInputs(torch.ones(rows, 1).bfloat16(), torch.zeros(words, 1).bfloat16(), None)
    student.weight.requires_grad_()
    labels_N, factors = torch.zeros(rows, dtype=torch.int64), torch.full((1,), 1 / 256)
    token_losses(student, None, labels_N, [LABEL], factors, chunk=1).total.backward()
    assert student.weight.grad.tolist() == [[pytest.approx(-1000 / 512, rel=5e-3)], [pytest.approx(1.953, rel=5e-3)]]


def test_rows_of_another_type_than_the_weight() -> None:
    student, teacher = head(0), head(1, width=K_TEACHER)
    mixed = learned(HeadInputs(student.rows.float(), student.weight, student.bias))
    found = outcome(token_losses, mixed, HeadInputs(teacher.rows.float(), teacher.weight, teacher.bias), [KL])
    assert [each.dtype for each in found[1:]] == [torch.float32, torch.float64, torch.float64]
    assert_near(found, outcome(token_losses_plain, learned(student), teacher, [KL]), 1e-5)


@pytest.mark.parametrize("terms", [[LABEL, KL], [OTHERS[1]]], ids=["few exponentials", "any terms"])
def test_the_first_words_of_padded_vocabularies(terms: list[TokenTerm]) -> None:
    student, teacher = learned(head(0)), head(1, width=K_TEACHER, words=V + 3)
    found = outcome(token_losses, student, teacher, terms, vocabulary=V - 2, chunk=4)
    assert_near(found, outcome(token_losses_plain, student, teacher, terms, vocabulary=V - 2))


def test_no_rows() -> None:
    sizes = {"rows": 0, "dtype": torch.bfloat16}
    student, teacher = learned(head(0, **sizes)), head(1, width=K_TEACHER, **sizes)
    sums, *gradients = outcome(token_losses, student, teacher, [LABEL, KL])
    assert sums.tolist() == [0.0, 0.0]
    assert [each.shape for each in gradients] == [(0, K), (V, K), (V,)]
    assert not any(each.any() for each in gradients)


def test_labels_alone_need_no_bias_and_do_not_run_the_teachers_head() -> None:
    student, broken = learned(head(0, bias=False)), HeadInputs(torch.zeros(0), torch.zeros(0), None)
    assert_near(outcome(token_losses, student, broken, [LABEL]), outcome(token_losses_plain, student, None, [LABEL]))


def test_what_is_frozen_gets_no_gradient_and_costs_no_product() -> None:
    for frozen in (("weight", "bias"), ("rows",), ("weight",)):
        student, teacher = learned(head(0), *frozen), head(1, width=K_TEACHER)
        found = outcome(token_losses, student, teacher, [LABEL, KL])
        assert len(found) == 4 - len(frozen)
        assert_near(found, outcome(token_losses_plain, student, teacher, [LABEL, KL]))


@pytest.mark.parametrize("is_learned", [True, False])
def test_without_gradients_only_the_logits_are_computed(is_learned: bool) -> None:
    student = learned(head(0)) if is_learned else head(0)
    given = student, head(1), labels(), [LABEL, KL, OTHERS[0]], torch.ones(3)
    with torch.set_grad_enabled(not is_learned):
        sums = token_losses(*given, chunk=100).sums
        ran = shapes_of_results(lambda: token_losses(*given, chunk=100))
    products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
    assert [shape for operation, shape in ran if operation in products] == [(N, V), (6, V), (5, V)]
    assert_near([sums], [token_losses_plain(*given).sums])


@every_choice
@pytest.mark.parametrize("of_student", [True, False])
def test_forbidden_words(terms: list[TokenTerm], of_student: bool) -> None:
    """Logits of -inf, of which LOG_FLOOR has the say: finite, and as with full logits."""
    sides = [head(0), head(1, width=K_TEACHER)]
    for side in sides[:1] if of_student else sides:
        side.bias[[4, 7]] = -math.inf
    student = learned(sides[0])
    allowed = torch.tensor([j not in (4, 7) for j in range(V)])
    chosen = torch.where(allowed[labels()], labels(), 0)
    results = []
    for function in (token_losses, token_losses_plain):
        losses = function(student, sides[1], chosen, terms, factors_of(terms))
        results.append([losses.sums, *torch.autograd.grad(losses.total, student.tensors)])
    assert all(each.isfinite().all() for each in results[0])
    assert_near(*results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_factor_of_zero_and_a_total_that_nobody_asks_about(dtype: torch.dtype) -> None:
    student, teacher = learned(head(0, dtype=dtype)), head(1, width=K_TEACHER, dtype=dtype)
    for factors, times in (([0.0, 2.0], 0.5), ([0.0, 0.0], 1.0), ([1.0, 2.0], 0.0)):
        given = student, teacher, labels(), [LABEL, KL], torch.tensor(factors)
        totals = [times * function(*given).total for function in (token_losses, token_losses_plain)]
        found, expected = (torch.autograd.grad(total, student.tensors) for total in totals)
        assert_near(found, expected, 1e-10 if dtype == torch.float64 else 5e-3)


def test_a_second_backward_pass_and_a_second_derivative_are_refused() -> None:
    student, teacher = learned(head(0)), head(1, width=K_TEACHER)
    first, second = (token_losses(student, teacher, labels(), [KL], torch.ones(1)).total for _ in range(2))
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        first.backward()
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(second, student.rows, create_graph=True)


@pytest.mark.parametrize("options", [{}, {"vocabulary": V - 4}], ids=["all", "first words"])
@some_choices
def test_logits_in_place_of_a_head(terms, options):
    """Rows without a weight are the logits, which are not overwritten."""
    logits = [functional.linear(*each.tensors) for each in (head(1), head(2, width=K_TEACHER))]
    student, teacher = (HeadInputs(each, None, None) for each in logits)
    kept = student.rows.clone()
    found = outcome(token_losses, learned(student), teacher, terms, chunk=4, **options)
    assert torch.equal(student.rows, kept)
    assert_near(found, outcome(token_losses_plain, student, teacher, terms, **options))
