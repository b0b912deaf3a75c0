"""Lists the options for each group of matrices, with their parameters, FLOPs and squared error on the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from llmdistill.models.families import base_name, family_of, has_family, layers_name
from llmdistill.students.install import matrix, token_embedding
from llmdistill.students.kronecker import (
    KroneckerShape,
    dense_flops,
    divisors,
    kronecker_flops,
    kronecker_params,
    most_sums,
    rearrange,
    suits_matrix_units,
)

SAMPLED_LAYERS = 3
"""Number of layers whose weights are used, evenly spread."""
EXACT_SIDE = 64
"""A rearranged matrix with a side of at most this uses its Gram matrix, any other a randomized SVD."""
OVERSAMPLING, POWER_ITERATIONS = 6, 2
"""Parameters of the randomized SVD: accurate enough to rank shapes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The choices of a group and what each costs."""

    choices: list[Any]
    """KroneckerShape, or None for dense; for the embedding the columns."""
    costs: NDArray[np.float64]
    """(3, choices): parameters, FLOPs for one token, and the squared error as a share of the group's Σ ‖W‖², times the
    number of its entries; before any weights are read the error is the number of parameters."""

    def only(self, numbers: Any) -> Options:
        """Return some of the choices, in the given order."""
        return Options(choices=[self.choices[number] for number in numbers], costs=self.costs[:, numbers])

    def with_errors(self, entries: int, captured: NDArray[np.float64], energy: float) -> Options:
        """Return the same choices, each of which captures a part of the energy Σ ‖W‖² of some of the weights."""
        missing = (1 - captured / energy).clip(min=0.0) if energy > 0 else np.zeros_like(captured)
        return replace(self, costs=np.stack([*self.costs[:2], entries * missing]))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Matrices of the same size up to transposition; they all get the same shape."""

    label: str
    m: int
    """The matrices have the size (m, n) with m >= n in the orientation used here: outputs by inputs, or transposed."""
    n: int
    sums: int
    members: dict[str, bool]
    """Name in the reference model -> whether the matrix is transposed into this orientation."""

    def costs(self) -> Options:
        """Return the choices dense, and every shape that makes the matrices smaller; computed without weights."""
        m, n, sums, count = self.m, self.n, self.sums, len(self.members)
        shapes = [KroneckerShape(m1, n1, sums) for m1 in divisors(m) for n1 in divisors(n)]
        shapes = [s for s in shapes if sums <= most_sums(m, n, s) and kronecker_params(m, n, s) < m * n]
        shapes = [s for s in shapes if suits_matrix_units(m, n, s)] or shapes
        params = count * np.array([m * n, *(kronecker_params(m, n, shape) for shape in shapes)], dtype=float)
        swapped = sum(self.members.values())
        one = [dense_flops(m, n), *(kronecker_flops(m, n, shape) for shape in shapes)]
        other = [dense_flops(n, m), *(kronecker_flops(n, m, shape.transposed) for shape in shapes)]
        flops = (count - swapped) * np.array(one, dtype=float) + swapped * np.array(other, dtype=float)
        return Options(choices=[None, *shapes], costs=np.stack([params, flops, params]))

    def errors(self, costs: Options, model: PreTrainedModel, device: torch.device | None) -> Options:
        """Return the same choices with the errors on the weights of a few layers, which represent all layers."""
        energies, energy = np.zeros(len(costs.choices)), 0.0
        gpus = [device] if device is not None and device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):  # the randomized SVD draws from the generator of its device
            torch.default_generator.manual_seed(0)
            if gpus:
                torch.cuda.manual_seed(0)
            layers = f"{layers_name(model)}."
            layer_of = {name: base_name(model, name).removeprefix(layers).partition(".")[0] for name in self.members}
            numbers = sorted(set(layer_of.values()), key=int)
            count = min(SAMPLED_LAYERS, len(numbers))
            # The layers in the middle of `count` equal parts of the depth.
            sampled = {numbers[(2 * i + 1) * len(numbers) // (2 * count)] for i in range(count)}
            for name in (name for name in self.members if layer_of[name] in sampled):
                weight = matrix(model.base_model.get_submodule(base_name(model, name)))
                weight = (weight.T if self.members[name] else weight).to(device or weight.device).float().contiguous()
                whole = float(weight.double().square().sum())
                energy += whole
                for choice, shape in enumerate(costs.choices):
                    if shape is None:
                        energies[choice] += whole
                        continue
                    rearranged = rearrange(weight, shape)
                    short = min(rearranged.shape)
                    if short <= EXACT_SIDE:
                        wide = rearranged if rearranged.shape[0] == short else rearranged.T
                        # Squares of the singular values of R, which the best sum of products captures.
                        squares = torch.linalg.eigvalsh((wide @ wide.T).double())[-shape.sums :]
                    else:
                        q = min(short, shape.sums + OVERSAMPLING)
                        _, values, _ = torch.svd_lowrank(rearranged, q=q, niter=POWER_ITERATIONS)
                        squares = values[: shape.sums].double().square()
                    energies[choice] += float(squares.sum())
        return costs.with_errors(self.m * self.n * len(self.members), energies, energy)


@dataclass(frozen=True, kw_only=True)
class Table:
    """The token embedding; its choices are numbers of columns, of which 1 keeps the table as it is."""

    vocabulary: int
    width: int
    columns: int | None
    """The only choice; None allows all divisors of the width."""

    def costs(self) -> Options:
        """Return the choices; computed without weights."""
        choices = divisors(self.width) if self.columns is None else [self.columns]
        params = np.array([self.vocabulary * (self.width // c) + (c if c > 1 else 0) for c in choices], dtype=float)
        return Options(choices=choices, costs=np.stack([params, np.zeros_like(params), params]))

    def errors(self, costs: Options, model: PreTrainedModel, device: torch.device | None) -> Options:
        """Return the same choices with the exact errors, all computed from one product of the table with itself.

        The product for the table in rows of n is the sum of the blocks of n × n on the diagonal of this product.
        """
        weight = token_embedding(model)[1].weight
        table = weight.to(device or weight.device)
        # The table in rows of this width has whole blocks of every choice on the diagonal of its product.
        width = math.lcm(*costs.choices)
        gram = torch.zeros(width, width, dtype=torch.float64, device=table.device)
        for chunk in table.reshape(-1, width).split(max(1, 2**22 // width)):  # 32 MiB of fp64 at a time
            gram.addmm_(chunk.double().T, chunk.double())
        captured = []
        for columns in costs.choices:
            blocks = gram.unfold(0, columns, columns).unfold(1, columns, columns)  # (d / n, d / n, n, n)
            # A single product is kept, so only the largest eigenvalue counts.
            captured.append(float(torch.linalg.eigvalsh(blocks.diagonal().sum(-1))[-1]))
        return costs.with_errors(table.numel(), np.array(captured), float(gram.trace()))


def make_groups(model: PreTrainedModel, linears: Mapping[str, tuple[int, int]], sums: int) -> list[Group]:
    """Return the groups of a model's linears, given as (m, n) by name: by size, attention and feed-forward separate."""
    layers, feed_forward = layers_name(model), list[str]()
    if has_family(model.config):
        family = family_of(model.config)
        names = (family.ffn_up, family.ffn_gate, family.ffn_down)
        feed_forward = [f".{name}" for name in names if name is not None]
    members: dict[tuple[str, int, int], dict[str, bool]] = {}
    for name, (m, n) in linears.items():
        # The name begins at the layer: BERT's attention.output.dense is not its output.dense.
        inner = "." + base_name(model, name).removeprefix(f"{layers}.").partition(".")[2]
        is_known = inner in feed_forward or (not feed_forward and "attn" not in inner and "attention" not in inner)
        part = "ffn" if is_known else "attention"
        members.setdefault((part, max(m, n), min(m, n)), {})[name] = m < n
    return [
        Group(label=f"{part} {m}x{n}", m=m, n=n, sums=sums, members=names) for (part, m, n), names in members.items()
    ]


def drop_dominated(options: Options, *, with_flops: bool) -> Options:
    """Drop each choice for which another choice is no larger in any cost: the best combination never needs it.

    FLOPs are a cost only if they are limited.
    """
    # Parameters, error, and FLOPs where they count.
    cost = options.costs[[0, 2, 1] if with_flops else [0, 2]].T
    best: list[int] = []
    # lexsort sorts by its last key first.
    for number in np.lexsort(cost.T[::-1]):  # a choice comes after all choices that dominate it
        if not (best and (cost[best] <= cost[number]).all(axis=1).any()):
            best.append(int(number))
    return options.only(best)
