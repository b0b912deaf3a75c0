"""What a sharded teacher is refused for, before it is loaded."""

import pytest
import torch

from llmdistill.config import TeacherConfig
from llmdistill.errors import UserError
from llmdistill.runtime.distributed import World
from llmdistill.teacher.live import load_teacher


def test_settings_that_deepspeed_does_not_know_are_named():
    zero = {"offload_param": {"device": "disk"}}
    said = r"teacher.zero: offload_param\.device is 'disk': DeepSpeed refuses it \(input should be"
    with pytest.raises(UserError, match=said):
        load_teacher("nowhere", dtype=torch.float32, sharding="zero3", zero=zero, world=World.alone())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"zero": {"stage3_prefetch_bucket_size": 1}}, r"set sharding to node or zero3"),
        ({"zero": {"stage": 2}, "sharding": "zero3"}, "sets the stage"),
    ],
)
def test_settings_that_do_not_fit_the_sharding_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        TeacherConfig(**given)
