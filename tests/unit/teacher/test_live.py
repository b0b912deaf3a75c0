"""What a sharded teacher is refused for, before it is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmdistill.config import TeacherConfig
from llmdistill.errors import UserError
from llmdistill.runtime.distributed import World
from llmdistill.teacher.live import load_teacher


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prefetch_buckets": 1}, r"teacher.zero: prefetch_buckets: DeepSpeed has no such setting"),
        ({"offload_param": {"device": "disk"}}, r"teacher.zero: offload_param\.device is 'disk': DeepSpeed refuses it"),
    ],
)
def test_settings_that_deepspeed_does_not_know_are_named(settings: dict[str, Any], said: str) -> None:
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    with pytest.raises(UserError, match=said):
        load_teacher("nowhere", dtype=torch.float32, sharding="zero3", zero=settings, world=alone)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"zero": {"stage3_prefetch_bucket_size": 1}}, r"set teacher\.sharding to node or zero3"),
        ({"zero": {"stage": 2}, "sharding": "zero3"}, "sets the stage"),
    ],
)
def test_settings_that_do_not_fit_the_sharding_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TeacherConfig(**given)
