"""The forecast of memory beside what a real DeepSpeed engine and the trainer allocate on gloo ranks.

The file is also the program of a rank: it measures every setting and forecasts it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS / "bench"), str(SCRIPTS / "gpu_check")]  # of a rank

from gpu_check_engine import Setting, forecast, measure  # noqa: E402

from llmdistill.runtime.distributed import init_distributed, shut_down  # noqa: E402
from llmdistill.runtime.terminal import quiet_libraries  # noqa: E402

pytestmark = pytest.mark.slow

SETTINGS = [
    Setting(),
    Setting(stage=1, accumulation_steps=2),
    Setting(stage=3, dtype="bf16", accumulation_steps=2),
    Setting(micro_batch_size=1, length=16, dtype="bf16"),  # most is needed in the optimizer's step
    Setting(stage=3, length=256, checkpointing=True),
    Setting(family="gpt2", factorized=False, method="kd", length=256, cached="hidden_states"),
    Setting(stage=3, method="kd", cached="top_k"),
    Setting(family="bert"),
    Setting(family="bert", factorized=False, method="minilm", micro_batch_size=8, checkpointing=True),
]


def main() -> None:
    world = init_distributed()
    quiet_libraries()
    torch.set_num_threads(1)  # the buffers of the blocks grow with the threads
    rows = []
    for setting in SETTINGS:
        measured = measure(setting, world)
        if world.is_main:
            rows.append({"setting": repr(setting), "stage": setting.stage, **measured, "parts": forecast(setting, 2)})
    if world.is_main:
        Path(sys.argv[-1]).write_text(json.dumps(rows), encoding="utf-8")
    shut_down()


@pytest.fixture(scope="module")
def rows(rank_server, tmp_path_factory):
    file = tmp_path_factory.mktemp("forecast") / "rows.json"
    done = rank_server.run([str(file)], ranks=2, program=__file__)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    assert len(found) == len(SETTINGS)
    return found


def test_resident_tensors_are_those_of_the_engine(rows):
    for row in rows:
        # Under ZeRO-3 the gradients' memory and the bucket stay between steps.
        kept = ("teacher", "student", "optimizer", *(("gradients", "buckets") if row["stage"] == 3 else ()))
        assert sum(row["parts"][part] for part in kept) == pytest.approx(row["resident"], rel=0.03), row["setting"]


def test_peak_is_within_15_percent_of_what_the_allocator_gives(rows):
    for row in rows:
        above = sum(row["parts"].values()) - row["resident"]
        assert 0.85 < above / row["peak"] < 1.15, (row["setting"], above, row["peak"])


if __name__ == "__main__":
    main()
