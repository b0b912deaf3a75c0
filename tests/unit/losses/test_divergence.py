from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llmdistill.errors import UserError
from llmdistill.losses import divergence as module
from llmdistill.methods.kd import KdConfig, divergence_of

NAMES = ["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd"]
SETTINGS = [
    *(KdConfig(divergence=name) for name in NAMES),
    *(KdConfig(divergence="jsd", beta=beta) for beta in (0.1, 0.9)),
    *(KdConfig(divergence=name, alpha=0.4) for name in ("skew_forward_kl", "skew_reverse_kl")),
]
LABELS = torch.tensor([[-100, -100, 3, 1, -100], [-100, 0, 2, 4, 4]])
PREDICTING = [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
"""(sequence, position) before each label."""


every_divergence = pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda each: f"{each.divergence}-{each.beta}-{each.alpha}"
)


def make(seed: int) -> Tensor:
    return 3 * torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def probabilities(row: Tensor, temperature: float) -> list[float]:
    weights = [math.exp(float(x) / temperature) for x in row]
    return [weight / sum(weights) for weight in weights]


def naive(settings: KdConfig, p: list[float], q: list[float]) -> float:
    """The definitions, word by word; p is the teacher."""

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    def mix(share: float, a: list[float], b: list[float]) -> list[float]:
        return [share * x + (1 - share) * y for x, y in zip(a, b, strict=True)]

    beta, alpha = settings.beta, settings.alpha
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: beta * kl(p, mix(beta, p, q)) + (1 - beta) * kl(q, mix(beta, p, q)),
        "skew_forward_kl": lambda: kl(p, mix(alpha, p, q)),
        "skew_reverse_kl": lambda: kl(q, mix(alpha, q, p)),
        "tvd": lambda: 0.5 * sum(abs(x - y) for x, y in zip(p, q, strict=True)),
    }[settings.divergence]()


def loss_of(settings: KdConfig, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    divergence = divergence_of(settings).value
    return module.output_divergence(student, teacher, LABELS, divergence=divergence, temperature=temperature).sum


@every_divergence
@pytest.mark.parametrize(("temperature", "dtype", "tolerance"), [
    (1.0, torch.float64, 1e-9), (2.5, torch.float64, 1e-9), (1.0, torch.bfloat16, 1e-5),
])  # fmt: skip
def test_it_equals_the_naive_loop(settings: KdConfig, temperature: float, dtype: torch.dtype, tolerance: float) -> None:
    """Half precision is compared in fp32."""
    student, teacher = make(0).to(dtype), make(1).to(dtype)
    p, q = ([probabilities(side[b, i], temperature) for b, i in PREDICTING] for side in (teacher, student))
    expected = sum(naive(settings, *row) for row in zip(p, q, strict=True))
    found = loss_of(settings, student, teacher, temperature).item()
    assert found == pytest.approx(temperature**2 * expected, rel=tolerance)


@every_divergence
def test_equal_models_give_zero_and_no_gradient(settings: KdConfig) -> None:
    student = make(0).float().requires_grad_()
    loss = loss_of(settings, student, student.detach().clone())
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert student.grad.abs().max() < 1e-6


CERTAIN = [[0.0, -2e4, -2e4, -2e4, -2e4, -2e4], [-2e4, 0.0, -2e4, -2e4, -2e4, -2e4]]
FORBIDDEN = [[0.0, 1.0, -math.inf, 2.0, -math.inf, 0.0], [1.0, 0.0, -math.inf, -math.inf, 2.0, 0.0]]


@every_divergence
@pytest.mark.parametrize("rows", [CERTAIN, FORBIDDEN], ids=["probability 0 and 1", "forbidden words"])
def test_loss_and_gradient_are_finite_at_probability_0_and_1(settings: KdConfig, rows: list[list[float]]) -> None:
    for of_student, of_teacher in ((0, 1), (1, 0), (0, 0)):
        student = torch.tensor(rows[of_student]).expand(2, 5, 6).clone().requires_grad_()
        teacher = torch.tensor(rows[of_teacher]).expand(2, 5, 6)
        loss = loss_of(settings, student, teacher)
        loss.backward()
        assert loss.isfinite()
        assert student.grad.isfinite().all()
        assert loss >= -1e-5


@every_divergence
def test_rows_without_a_label_do_not_matter(settings: KdConfig) -> None:
    outside = torch.ones(2, 5, dtype=torch.bool)
    for b, i in PREDICTING:
        outside[b, i] = False
    results = []
    for filling in (0.0, math.nan):
        student, teacher = (make(seed).masked_fill(outside[..., None], filling) for seed in (0, 1))
        loss = loss_of(settings, student.requires_grad_(), teacher)
        loss.backward()
        results.append((loss.detach(), student.grad))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert not results[1][1][outside].any()


def test_without_any_label_the_loss_is_zero_and_has_a_gradient() -> None:
    student, labels = make(0).requires_grad_(), torch.full((2, 5), -100)
    labels[:, 0] = 3  # a label on the first token is predicted by none
    loss = module.output_divergence(student, make(1), labels, divergence=module.FORWARD_KL.value)
    loss.sum.backward()
    assert loss.sum.item() == loss.count.item() == 0
    assert not student.grad.any()


def draw_log_probabilities(seed: int) -> Tensor:
    return make(seed).flatten(0, 1).log_softmax(-1)


SLOPES = {
    "forward_kl": module.FORWARD_KL,
    "soft_cross_entropy": module.SOFT_CROSS_ENTROPY,
    "reverse_kl": module.REVERSE_KL,
    "tvd": module.TOTAL_VARIATION,
    "jsd": module.jsd_with_derivative(0.3),
    "jsd at 0.9": module.jsd_with_derivative(0.9),
    "skew_forward_kl": module.skew_forward_kl_with_derivative(0.1),
    "skew_reverse_kl": module.skew_reverse_kl_with_derivative(0.4),
}


@pytest.mark.parametrize("name", SLOPES)
def test_the_derivative_is_the_values_derivative(name: str) -> None:
    """In all directions, also those that leave the distributions: log q are free variables."""
    divergence = SLOPES[name]
    log_p, log_q = draw_log_probabilities(0), draw_log_probabilities(1).requires_grad_()
    value = divergence.value(log_p, log_q)
    assert value.shape == (10,)
    (expected,) = torch.autograd.grad(value.sum(), log_q)
    log_q = log_q.detach()
    torch.testing.assert_close(divergence.derivative(log_p, log_q), expected, rtol=1e-10, atol=1e-14)
    own = module.divergence_by_autograd(divergence.value)
    with torch.no_grad():  # as the head's losses call it
        torch.testing.assert_close(own.derivative(log_p, log_q), expected, rtol=1e-10, atol=1e-14)
        assert torch.equal(own.value(log_p, log_q), value)
    assert not log_q.requires_grad


def test_a_divergence_of_ones_own_has_a_number_for_each_row() -> None:
    def mean_distance(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() - log_q.exp()).abs().mean()

    with pytest.raises(UserError, match=r"mean_distance gives \(\) for log-probabilities of \(10, \d+\)"):
        module.divergence_by_autograd(mean_distance).value(draw_log_probabilities(0), draw_log_probabilities(1))
