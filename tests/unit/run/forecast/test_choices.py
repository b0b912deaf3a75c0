"""Which choice is proposed, what is said of it, and what is said if none fits."""

from __future__ import annotations

from typing import Any

import pytest

from llmdistill.config.machine import MachineConfig
from llmdistill.errors import UserError
from llmdistill.run.forecast.choices import LayoutChoice, best_of_each, propose, reason
from llmdistill.run.forecast.layout import Duration

GB = 10**9


def choice(ds_config: str = "zero1", *, gb: float = 50, seconds: float = 1.0, **changes: Any) -> LayoutChoice:
    given: dict[str, Any] = {
        "ds_config": ds_config,
        "micro_batch_size": 8,
        "accumulation_steps": 1,
        "checkpointing": False,
        "teacher": "replicated",
        "memory": {"student": gb * GB / 4, "activations": gb * GB * 3 / 4},
        "flops": 1e15,
        "zero": None,
        "sizes": None,
        "duration": Duration(compute=seconds, memory=0, wire=0, launch=0, host=0),
        "machine": MachineConfig(gpu_memory="80GB", margin=0.1),
    }
    return LayoutChoice(**(given | changes))


def test_the_fastest_that_fits_and_the_simplest_of_those_that_are_alike():
    slow, fast = choice(seconds=2.0), choice("zero2", seconds=1.0)
    assert propose([slow, fast, choice("zero3", seconds=0.5, gb=81)]) is fast
    simple, sharded = choice(seconds=1.01), choice(teacher="zero3", seconds=1.0)
    assert propose([simple, sharded, choice("zero3", seconds=1.0)]) is simple
    kept, recomputed = choice(gb=87.2), choice(gb=40, checkpointing=True)
    assert propose([kept, recomputed]) is recomputed
    said = reason(recomputed, [kept, recomputed])
    assert said.endswith("without activation checkpointing it would need 87.2 GB")


def test_tight_only_if_nothing_else_fits():
    tight, loose = choice(gb=75, seconds=1.0), choice(gb=71, seconds=3.0)
    assert tight.tight
    assert propose([tight, loose]) is loose
    assert propose([tight, choice(gb=90)]) is tight


def test_own_micro_batch_is_kept_where_it_fits():
    own, faster = choice(seconds=2.0), choice(micro_batch_size=4, seconds=1.0)
    assert propose([own, faster], 8) is own
    assert propose([own, faster]) is faster
    assert propose([choice(gb=99), faster], 8) is faster
    assert "own micro batch size 8" in reason(own, [own, faster], 8)


def test_nothing_fits():
    said = (
        r"nothing fits in 80\.0 GB: zero3, .* needs least, 95\.0 GB .*, 15\.0 GB too much, .* activations are 71\.2 GB"
    )
    with pytest.raises(UserError, match=said):
        propose([choice(gb=120), choice("zero3", gb=95, checkpointing=True)])


def test_best_of_each_kind():
    first, second, third = choice(seconds=2.0), choice(seconds=1.0), choice("zero2", gb=99)
    assert best_of_each([first, second, third, choice("zero2", gb=90)], lambda each: each.ds_config)[0] is second
    assert best_of_each([third, choice("zero2", gb=90)], lambda each: each.ds_config)[0].total == 90 * GB
