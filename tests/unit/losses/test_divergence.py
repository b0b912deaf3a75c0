import math

import numpy as np
import pytest
import torch
from torch import Tensor

from llmdistill.errors import UserError
from llmdistill.losses import divergence as module
from llmdistill.methods.kd import KdConfig

NAMES = [name for name in module.DIVERGENCES if name != "log_ratio"]  # compares two classes, not whole rows
SETTINGS = [
    *(KdConfig(divergence=name) for name in NAMES),
    *(KdConfig(divergence="jsd", beta=beta) for beta in (0.1, 0.9)),
    *(KdConfig(divergence=name, alpha=0.4) for name in ("skew_forward_kl", "skew_reverse_kl")),
]
LABELS = torch.tensor([[-100, -100, 3, 1, -100], [-100, 0, 2, 4, 4]])
PREDICTING = [[0, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
"""The positions before each label."""

every_divergence = pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda each: f"{each.divergence}-{each.beta}-{each.alpha}"
)


def make(seed: int) -> Tensor:
    return 3 * torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive(settings: KdConfig, p: np.ndarray, q: np.ndarray) -> float:
    """The definitions, word by word; p is the teacher."""

    def kl(a: np.ndarray, b: np.ndarray) -> float:
        return (a * np.log(a / b)).sum()

    beta, alpha = settings.beta, settings.alpha
    mean = beta * p + (1 - beta) * q
    return {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": beta * kl(p, mean) + (1 - beta) * kl(q, mean),
        "skew_forward_kl": kl(p, alpha * p + (1 - alpha) * q),
        "skew_reverse_kl": kl(q, alpha * q + (1 - alpha) * p),
        "tvd": 0.5 * np.abs(p - q).sum(),
    }[settings.divergence]


def loss_of(settings: KdConfig, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    divergence = module.DIVERGENCES[settings.divergence].build(settings).value
    return module.output_divergence(student, teacher, LABELS, divergence=divergence, temperature=temperature).sum


@every_divergence
@pytest.mark.parametrize(("temperature", "dtype", "tolerance"), [
    (1.0, torch.float64, 1e-9), (2.5, torch.float64, 1e-9), (1.0, torch.bfloat16, 1e-5),
])  # fmt: skip
def test_it_equals_the_naive_loop(settings: KdConfig, temperature: float, dtype: torch.dtype, tolerance: float) -> None:
    """Half precision is compared in fp32, and rows without a label may hold anything."""
    outside = ~torch.tensor(PREDICTING, dtype=torch.bool)
    student, teacher = (make(seed).to(dtype).masked_fill(outside[..., None], math.nan) for seed in (0, 1))
    p, q = (np.exp(side[~outside].double().numpy() / temperature) for side in (teacher, student))
    expected = naive(settings, *(each / each.sum(1, keepdims=True) for each in (p, q)))
    found = loss_of(settings, student.requires_grad_(), teacher, temperature)
    assert found.item() == pytest.approx(temperature**2 * expected, rel=tolerance)
    found.backward()
    assert not student.grad[outside].any()


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


def test_soft_cross_entropy_is_the_divergence_and_the_teachers_entropy() -> None:
    log_p, log_q = make(0).log_softmax(-1), make(1).log_softmax(-1).requires_grad_()
    entropy = -(log_p.exp() * log_p).sum(-1)
    found, divergence = (each.value(log_p, log_q) for each in (module.SOFT_CROSS_ENTROPY, module.FORWARD_KL))
    torch.testing.assert_close(found, divergence + entropy, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), log_q)
    torch.testing.assert_close(module.SOFT_CROSS_ENTROPY.derivative(log_p, log_q), gradient)


def test_without_any_label_the_loss_is_zero_and_has_a_gradient() -> None:
    student, labels = make(0).requires_grad_(), torch.full((2, 5), -100)
    labels[:, 0] = 3  # a label on the first token is predicted by none
    loss = module.output_divergence(student, make(1), labels, divergence=module.FORWARD_KL.value)
    loss.sum.backward()
    assert loss.sum.item() == loss.count.item() == 0
    assert not student.grad.any()


def test_a_divergence_of_ones_own_has_a_number_for_each_row() -> None:
    def mean_distance(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() - log_q.exp()).abs().mean()

    with pytest.raises(UserError, match=r"mean_distance gives \(\) for log-probabilities of \(5, 6\)"):
        module.divergence_by_autograd(mean_distance).value(make(0)[0], make(1)[0])
