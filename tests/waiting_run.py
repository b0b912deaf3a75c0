"""The main job, which prints where a training step asks for the value of a tensor: a GPU would be waited for there."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "gpu_check"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_check_waits import AskedValues

from llmdistill import train
from llmdistill.run.trainer import Trainer


def main() -> int:
    waits, step, engines = AskedValues(), Trainer.train_step, []

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
