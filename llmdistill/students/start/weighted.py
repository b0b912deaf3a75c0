"""Truncated SVD weighted by second moments, and the ranks that increase the loss least.

With C = L Lᵀ and G = R Rᵀ the cost of replacing W (m, n) by Ŵ is ½ ‖Rᵀ (W − Ŵ) L‖², so the best Ŵ of a rank follows
from the SVD of Rᵀ W L = U Σ Vᵀ: Ŵ = (R⁻ᵀ U_r Σ_r)(V_rᵀ L⁻¹). Without G this is SVD-LLM (arXiv 2403.07378), and with
both the singular values of all matrices are in the unit of the loss.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
from torch import Tensor

from llmdistill.config.student import FactorForm, RankMultiple
from llmdistill.errors import UserError
from llmdistill.students.kinds import Sigma, low_rank_values
from llmdistill.students.start.moments import Moments
from llmdistill.students.svd import determine_vectors, factor_params, truncated_svds, useful_ranks

# Not sensitive: 1e-6 to 1e-2 for inputs and 1e-5 to 1e-1 for gradients move an untrained student's loss by 1 %.
INPUT_DAMPING, GRADIENT_DAMPING = 1e-5, 1e-3
"""Added to the diagonals of C and G, as a share of their mean, so that directions without data keep a small weight."""


@dataclass(frozen=True, kw_only=True)
class WeightedSVD:
    """The factors of a matrix, the most valuable first."""

    left: Tensor
    """(m, k), R⁻ᵀ U."""
    values: Tensor
    """(k), singular values of Rᵀ W L, descending."""
    right: Tensor
    """(k, n), Vᵀ L⁻¹."""
    energy: float
    """‖Rᵀ W L‖², the sum of all squared singular values."""
    scale: float
    """Converts the energy that a lower rank loses into its cost per token."""
    tokens: int = 0
    """The number of tokens of the calibration data, over all ranks."""
    seconds: float = 0.0
    """The time for this matrix: its share of a pass over the data, and its decomposition."""

    def to(self, device: torch.device) -> WeightedSVD:
        return replace(self, **{key: getattr(self, key).to(device) for key in ("left", "values", "right")})

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs m and inputs n of the matrix."""
        return self.left.shape[0], self.right.shape[1]

    def leading(self, rank: int) -> WeightedSVD:
        return replace(self, left=self.left[:, :rank], values=self.values[:rank], right=self.right[:rank])

    @property
    def widest(self) -> int:
        return max(self.shape)

    def parameters(self, rank: int, sigma: Sigma) -> dict[str, Tensor]:
        """Return the parameters of a LowRankLinear with this product, whose own SVD scales both sides."""
        # The weighted factors are not orthogonal. After QR on both sides the SVD is that of a (rank, rank) matrix.
        inputs, inner = torch.linalg.qr(self.right[:rank].T.double())
        outputs, outer = torch.linalg.qr((self.left[:, :rank] * self.values[:rank]).double())
        u, s, vh = torch.linalg.svd(inner @ outer.T)
        u, s, vh = determine_vectors(inputs @ u, s, vh @ outputs.T, rank)
        return low_rank_values(u.float(), s.float(), vh.float(), sigma)

    def costs(self) -> list[float]:
        """Return, for each rank from 0 to k, the cost per token of lowering this matrix alone to the rank.

        With gradients the cost is the predicted increase of the loss in nats, without them half the squared error of
        the outputs.
        """
        # Rank 0 keeps nothing.
        energies = torch.nn.functional.pad(self.values.double().square().cumsum(0), (1, 0))
        # At the full rank rounding may leave a little less than nothing.
        costs: list[float] = ((self.energy - energies).clamp(min=0.0) * self.scale).tolist()
        return costs


def weighted_svd(weight: Tensor, moments: Moments, rank: int) -> WeightedSVD:
    """Return the leading `rank` factors of a weight (m, n), in fp32 on the device of the weight.

    Raises:
        UserError: the moments are not positive after damping.
    """
    return weighted_svds([weight], [moments], [rank])[0]


def weighted_svds(weights: Sequence[Tensor], moments: Sequence[Moments], ranks: Sequence[int]) -> list[WeightedSVD]:
    """Return what `weighted_svd` does for several weights (m, n) of one shape and device, all in the same calls.

    A GPU is idle between the small calls of a single matrix.
    """
    device, weighted = weights[0].device, moments[0].gradients is not None
    # Legend: P matrices of a shape.
    inner_Pnn = damp(torch.stack([moment.inputs.to(device) for moment in moments]), INPUT_DAMPING)[1]
    whitened_Pmn = torch.stack([weight.double() for weight in weights]) @ inner_Pnn
    outer_Pmm = None
    if weighted:
        gradients = [cast(Tensor, moment.gradients).to(device) for moment in moments]
        outer_Pmm = damp(torch.stack(gradients), GRADIENT_DAMPING)[1]
        whitened_Pmn = outer_Pmm.mT @ whitened_Pmn  # Rᵀ W L
    u_Pmk, s_Pk, vh_Pkn = truncated_svds(whitened_Pmn, max(ranks))
    # R⁻ᵀ U, by substitution: no inverse is formed.
    left_Pmk = u_Pmk if outer_Pmm is None else torch.linalg.solve_triangular(outer_Pmm.mT, u_Pmk, upper=True)
    # Vᵀ L⁻¹ = X is the solution of X L = Vᵀ.
    right_Pkn = torch.linalg.solve_triangular(inner_Pnn, vh_Pkn, upper=False, left=False)
    energies = whitened_Pmn.square().sum((1, 2)).tolist()
    return [
        WeightedSVD(
            left=left_Pmk[place, :, :rank].float(),
            values=s_Pk[place, :rank].float(),
            right=right_Pkn[place, :rank].float(),
            energy=energies[place],
            # The Fisher matrix of the tokens' sum is C ⊗ G / tokens.
            scale=0.5 / moment.tokens ** (2 if weighted else 1),
            tokens=moment.tokens,
        )
        for place, (moment, rank) in enumerate(zip(moments, ranks, strict=True))
    ]


def damp(moment: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return moments (..., n, n) plus a share of their mean diagonal, in fp64 and positive definite, and their Cholesky
    factors.

    Raises:
        UserError: a moment has no entry over 0.
    """
    exact = moment.double()
    means = exact.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    if not (means > 0).all():
        raise UserError(
            "the calibration data give a matrix no input or no gradient at all: name other data, or leave weighting out"
        )
    shares = torch.full_like(means, damping)
    while True:
        positive = exact.clone()
        positive.diagonal(dim1=-2, dim2=-1).add_(shares * means)
        root, info = torch.linalg.cholesky_ex(positive)
        if not info.any():
            return positive, root
        # The rounding of fp32 sums follows the strongest direction, which may be far above the mean.
        shares = torch.where((info > 0)[..., None], 10 * shares, shares)


def add_ridge(matrix: Tensor, share: float) -> Tensor:
    """Return a symmetric matrix plus a share of its mean diagonal."""
    return matrix + share * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def check_calibration_data(weighting: str | None, data: object) -> None:
    """Raise a UserError for a weighting without calibration data, and for data without a weighting."""
    if weighting != "none" and data is None:
        raise UserError(
            f"weighting {weighting} needs calibration data: name them (calibration.data), or set it to none"
        )
    if weighting == "none" and data is not None:
        raise UserError("nothing is measured on the calibration data: give weighting, or leave calibration out")


Options: TypeAlias = list[tuple[int, float, int | None]]
"""(parameters, predicted loss, rank or None for dense) of a matrix, by rising parameters."""


def allocate(
    factors: Mapping[str, WeightedSVD],
    budget: int,
    *,
    multiple: RankMultiple = 1,
    form: FactorForm = "plain",
    others: Mapping[str, Options] = {},
) -> dict[str, int | None]:
    """Return ranks with which the predicted loss is nearly the lowest, and None for a matrix that stays dense.

    It is a greedy solution of a knapsack, which is not always the best one where few steps fill the budget: of 300
    random cases of three small matrices it was in 257. Each matrix starts with the smallest of its `useful_ranks`. The
    budget is then spent on the matrix whose next step saves most of the loss per parameter; a step is to the next
    useful rank or to the dense matrix. What is left at the end goes to the best steps that still fit.

    Args:
        factors: the factors of each matrix, up to its largest useful rank.
        budget: the number of parameters of all matrices together, enough for the first ranks (`sizes.rank_budget`).
        multiple: ranks are multiples of this number, which auto chooses for each matrix.
        form: the form of the factors.
        others: the options of what else shares the budget.
    """
    options = dict(others)
    for name, svd in factors.items():
        (m, n), costs = svd.shape, svd.costs()
        ranks = [rank for rank in useful_ranks(m, n, multiple, form) if rank <= len(svd.values)]
        factored = ((factor_params(m, n, rank, form), costs[rank], rank) for rank in ranks)
        options[name] = [*factored, (m * n, 0.0, None)]  # a larger rank has no fewer parameters than the dense matrix
    chosen = dict.fromkeys(options, 0)
    spent = sum(steps[0][0] for steps in options.values())
    heap = [step for name in options for step in _list_steps(options[name], 0, name)]
    heapq.heapify(heap)
    while heap:
        _, name, start, number = heapq.heappop(heap)  # the most negative first: what saves most per parameter
        price = options[name][number][0] - options[name][start][0]
        # An entry from before an earlier step of its matrix is outdated; one that exceeds the budget now never fits
        # later.
        if start != chosen[name] or spent + price > budget:
            continue
        spent, chosen[name] = spent + price, number
        for step in _list_steps(options[name], number, name):
            heapq.heappush(heap, step)
    return {name: options[name][number][2] for name, number in chosen.items()}


def _list_steps(options: Options, chosen: int, name: str) -> list[tuple[float, str, int, int]]:
    """List the steps from a choice as (negative saving per parameter, name, choice, next choice).

    The savings of plain ranks fall from step to step, so only the next rank and the dense matrix can be the best step.
    Those of pivoted ranks fall a little less near the full rank, where a rank costs fewer parameters.
    """
    params, loss, _ = options[chosen]
    numbers = {number for number in (chosen + 1, len(options) - 1) if chosen < number < len(options)}
    return [((options[n][1] - loss) / (options[n][0] - params), name, chosen, n) for n in sorted(numbers)]
