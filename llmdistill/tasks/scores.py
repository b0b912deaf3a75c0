"""The scores of a run's models, saved in the run folder so that a resumed run does not score the models again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.artifacts import differences, read_record
from llmdistill.files import write_json
from llmdistill.runtime.distributed import World, broadcast_object, on_main
from llmdistill.tasks.base import ScoredModel, TaskData


@dataclass(frozen=True)
class ScoreBook:
    """Scores each model once on the sets of a task."""

    folder: Path
    data: TaskData
    world: World

    def score(
        self,
        name: str,
        load: Callable[[], PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        *,
        params: int,
        sharded: bool = False,
    ) -> dict[str, Any]:
        """Return `params`, the model's number of parameters, and the task's `summary` of its scores on every set.

        Every rank must call this method. `name` is the model's name in the run, such as teacher; `load` is called only
        if scores are missing; see `ScoredModel` for the other arguments.
        """
        file = self.folder / "scores" / f"{name}.json"
        kept = on_main(lambda: _read(file), self.world)
        model = cache(load)
        sets = on_main(lambda: dict(self.data.sets), self.world)  # rank 0 alone reads the files for their fingerprints
        for set_name, asked in sets.items():
            if set_name in kept and not differences(kept[set_name]["asked"], asked):
                continue
            scored = ScoredModel(
                model=model(),
                tokenizer=tokenizer,
                predictions=self.folder / "predictions" / name,
                world=self.world,
                sharded=sharded,
            )
            kept[set_name] = {"asked": asked, "score": self.data.score_set(set_name, scored)}
            if self.world.is_main:
                write_json(file, kept)
        kept = broadcast_object(kept)
        summary = self.data.summary({set_name: kept[set_name]["score"] for set_name in sets})
        if self.world.is_main:
            print(self.data.sentence(name, summary), flush=True)
        return {"params": params, **summary}


def _read(file: Path) -> dict[str, Any]:
    return read_record(file, remedy="remove the file, and the model is scored again") or {}
