"""The main job, which prints where a training step asks for the value of a tensor: a GPU would be waited for there."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmdistill import train
from llmdistill.run.trainer import Trainer

ASKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.places: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKS:
            self.places.add(tuple(f"{frame.filename}:{frame.name}" for frame in traceback.extract_stack()))
        return func(*args, **(kwargs or {}))


def main() -> int:
    waits, step, engines = Waits(), Trainer.train_step, []

    def watched(self: Trainer, *given: Any) -> Any:
        engines.append(self.engine)
        if len(engines) < 3:  # ZeRO-3 compares the ranks' order of layers in the first steps
            return step(self, *given)
        with waits:
            return step(self, *given)

    Trainer.train_step = watched  # type: ignore[method-assign]
    code = train.main(sys.argv[1:])
    print(json.dumps({"timer": engines[-1].tput_timer.config.enabled, "places": sorted(waits.places)}))
    return code


if __name__ == "__main__":
    sys.exit(main())
