"""The main job with a fault or a signal on one rank: `faulty_run.py STAGE KIND RANK ARGUMENTS`, for the launcher."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from llmdistill import train
from llmdistill.teachers import live
from llmdistill.training import assemble, checkpoints, job, trainer

PLACES = {
    "loading": (live, "load_model"),
    "making": (assemble, "compress_folder"),  # by rank 0 alone
    "training": (trainer, "global_counts"),
    "rate": (trainer, "learning_rate"),  # of every step; the kind is the number
    "saving": (checkpoints, "save_file"),
    "scoring": (job, "load_model"),
}
"""Where each stage fails: in the second call, if a step of the run comes before it."""


def fail(kind: str) -> None:
    if kind in ("SIGTERM", "SIGINT"):
        return os.kill(os.getpid(), signal.Signals[kind])
    if kind == "launcher":
        return os.kill(os.getppid(), signal.SIGKILL)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    raise ZeroDivisionError("broken on purpose")


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    (stage, kind, rank), arguments = words[:3], words[3:]
    if os.environ["RANK"] == rank:
        module, name = PLACES[stage]
        works, calls = getattr(module, name), []

        def faulty(*given: object, **named: object) -> object:
            calls.append(name)
            if stage == "rate":
                return float(kind)
            if stage not in ("training", "saving") or len(calls) == 2:
                fail(kind)
            return works(*given, **named)

        setattr(module, name, faulty)
    return train.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
