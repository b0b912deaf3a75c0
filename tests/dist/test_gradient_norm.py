"""ZeRO-1 and 2 judge a gradient by its norm as they do with their own search for values that are not finite.

The file is also the program of a rank.
"""

import json
import math
import os
import sys
from pathlib import Path

import deepspeed
import pytest
import torch
from torch import nn

from llmdistill.internals.deepspeed_names import judge_by_norm
from llmdistill.runtime.distributed import init_distributed

WAYS = {"deepspeed": None, "in fp64": False, "in fp32": True}
FACTORS = (1.0, 1e25, 1e-3, math.inf, math.nan)
"""Of the loss at each step. The squares of gradients near 1e25 overflow fp32, which leaves out the step too."""


def make_engine(stage: int, dtype: torch.dtype, in_fp32: bool | None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=config)
    own_search = engine.optimizer.check_overflow
    if in_fp32 is not None:
        judge_by_norm(engine, in_fp32=in_fp32)
        assert engine.optimizer.check_overflow != own_search
    return engine


def main():
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[-1])
    init_distributed()
    found = {}
    for stage in (1, 2):
        for dtype in (torch.bfloat16, torch.float32):
            for way, in_fp32 in WAYS.items():
                engine = make_engine(stage, dtype, in_fp32)
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)).to(dtype)
                norms, weights = [], []
                for factor in FACTORS:
                    # The gradient of one rank alone is not finite, and both must leave the step out.
                    own = factor if rank == 1 or math.isfinite(factor) else 1.0
                    engine.backward(engine(x).float().square().mean() * own)
                    engine.step()
                    norms.append(float(engine.get_global_grad_norm()))
                    weights.append([each.detach().float().flatten().tolist() for each in engine.module.parameters()])
                found[f"{stage} {dtype} {way}"] = {"norms": norms, "weights": weights}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def test_norms_steps_and_skips_are_those_of_deepspeed(launch, tmp_path):
    launch(str(tmp_path), ranks=2, program=__file__)
    found = json.loads((tmp_path / "found.json").read_text())
    for name, ours in found.items():
        stage_and_type, way = name.split(" in ") if " in " in name else (name, None)
        if way is None:
            continue
        theirs = found[f"{stage_and_type} deepspeed"]
        exact = way == "fp64"
        assert ours["norms"] == (theirs["norms"] if exact else pytest.approx(theirs["norms"], rel=1e-5)), name
        steps = [torch.cat([torch.tensor(each) for each in of_step]) for of_step in ours["weights"]]
        for step, of_step in zip(steps, theirs["weights"], strict=True):
            expected = torch.cat([torch.tensor(each) for each in of_step])
            assert torch.equal(step, expected) if exact else torch.allclose(step, expected, rtol=1e-5), name
        assert not torch.equal(steps[0], steps[2])
        assert torch.equal(steps[2], steps[4]), "inf and NaN change nothing"


if __name__ == "__main__":
    main()
