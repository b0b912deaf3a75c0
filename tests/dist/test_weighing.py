"""Matrices measured and decomposed on two ranks, of a whole teacher and of one that ZeRO-3 shards.

The file is also the program of a rank.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from llmdistill.batch import Batch
from llmdistill.config import CalibrationConfig, FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.models.configs import load_config
from llmdistill.runtime.distributed import World, init_distributed, on_every
from llmdistill.students.counting import build_reference, layer_linears
from llmdistill.students.kronecker import KroneckerShape
from llmdistill.students.start.measure import GIB, Measurement
from llmdistill.students.start.weigh import CalibrationParts, weigh
from llmdistill.students.start.weighted_embedding import weighted_table
from llmdistill.teachers.live import load_teacher


def batch(rows):
    ids = torch.randint(5, 200, (12, 9), generator=torch.Generator().manual_seed(1))[rows]
    names = tuple((row,) for row in range(12))[rows]
    return Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, sample_ids=names)


def keep_in(found):
    return lambda name, each, _seconds: found.update({name: each})


AUTO = {"target_params": "60%", "embedding_rank": "auto", "weighting": "gradients", "allocation": "loss"}


def measure(teacher, batches, sharding, memory, *, together=True):
    loaded, found, said, tables = load_teacher(teacher, dtype=torch.float32, sharding=sharding), {}, [], []
    model = loaded.model
    shapes = layer_linears(build_reference(load_config(teacher)))
    shapes = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    settings = CalibrationConfig(memory=memory)
    measurement = Measurement(model=model, batches=batches, settings=settings, gradients=True)
    full = {name: min(shape) for name, shape in shapes.items()}
    measurement.factors(shapes, full, keep_in(found), said.append, keep_table=tables.append)
    table, products = measurement.table(partial(weighted_table, moments=tables[0], rank=3)), {}
    wanted = {"layers.1.mlp.down_proj": KroneckerShape(4, 8, 2)}
    replace(measurement, method="kronecker").factors(shapes, wanted, keep_in(products), lambda _: None)
    costs = {name: float(each[3]) for name, each in measurement.predict_losses(found, shapes).items()}
    held_out = [batch(slice(0, 6))]
    parts = CalibrationParts(config=model.config, teacher=lambda: loaded, batches=lambda: (batches, held_out))
    # All ranks choose together, also where one of them has measured alone.
    auto = weigh(parts, FactorizeConfig(**AUTO, calibration=settings)).held_out if together else {}
    return found, said, table, products.get("layers.1.mlp.down_proj"), dict(auto), costs


def main():
    folder, teacher = Path(sys.argv[-2]), sys.argv[-1]
    world = init_distributed()

    def fails():
        if world.rank == 1:
            raise UserError("rank 1 cannot")

    if world.size == 1:
        results = [measure(teacher, [batch(slice(0, 12))], "replicated", 1.0)]
    else:
        # Rank 1 has one batch less: it repeats its own, but the repetition does not count.
        own = [batch(slice(0, 4)), batch(slice(8, 12))] if world.is_main else [batch(slice(4, 8))]
        results = [measure(teacher, own, sharding, 50_000 / GIB) for sharding in ("replicated", "zero3")]
        if world.is_main:  # alone, while the other rank does something else
            with World.alone().entered():
                results.append(measure(teacher, [batch(slice(0, 12))], "replicated", 1.0, together=False))
        try:
            on_every(fails)
        except UserError as error:
            (folder / f"error-{world.rank}").write_text(str(error))
    torch.save(results, folder / f"{world.size}-{world.rank}.pt")


def test_two_ranks_find_the_factors_of_one(launch, tiny_teacher, tmp_path):
    for ranks in (1, 2):
        launch(str(tmp_path), str(tiny_teacher), ranks=ranks, program=__file__)
    [(alone, _, table, product, auto, costs)] = torch.load(tmp_path / "1-0.pt", weights_only=False)
    assert [(tmp_path / f"error-{rank}").read_text() for rank in (0, 1)] == ["rank 1 cannot"] * 2
    for result in torch.load(tmp_path / "2-1.pt", weights_only=False):
        assert (result[0], *result[2:5]) == ({}, None, None, {})
    *shared, own = torch.load(tmp_path / "2-0.pt", weights_only=False)
    assert own[-1] == pytest.approx(costs, rel=1e-5)
    assert "embedding" in auto
    for found, said, other_table, other_product, other_auto, other_costs in shared:
        assert other_auto == {name: pytest.approx(divergence, rel=1e-2) for name, divergence in auto.items()}
        assert said == ["3 passes of at most 4.2e-05 GiB of statistics"]
        assert set(found) == set(alone)
        assert other_costs == {name: pytest.approx(cost, rel=1e-3) for name, cost in costs.items()}
        for name, factors in alone.items():
            other = found[name]
            assert (other.energy, other.scale, other.tokens) == pytest.approx((factors.energy, factors.scale, 108))
            torch.testing.assert_close(other.values, factors.values, rtol=1e-4, atol=1e-6)
            cuts = [each.leading(3) for each in (other, factors)]
            products = [each.left * each.values @ each.right for each in cuts]
            torch.testing.assert_close(*products, rtol=1e-3, atol=1e-4)
        assert (other_table.cost, other_table.tokens) == pytest.approx((table.cost, 108), rel=1e-4)
        products = [each.left @ each.right for each in (other_table, table)]
        torch.testing.assert_close(*products, rtol=1e-3, atol=1e-3 * float(table.left.norm()))
        assert (other_product.cost, other_product.tokens) == pytest.approx((product.cost, 108), rel=1e-2)
        assert other_product.a.shape == (2, 4, 8)


if __name__ == "__main__":
    main()
