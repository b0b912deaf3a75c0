"""The scores of a run's models, saved in the run folder so that a resumed run does not score the models again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.artifacts import differences, entries_damage, entries_of, find_record
from llmdistill.files import write_json
from llmdistill.messages import say
from llmdistill.progress import progress
from llmdistill.runtime.distributed import World, broadcast_object, on_main
from llmdistill.runtime.terminal import warn_main
from llmdistill.tasks.base import ScoredModel, TaskData


@dataclass(frozen=True)
class ScoreBook:
    """Scores each model once on the sets of a task."""

    folder: Path
    data: TaskData

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
        predictions = self.folder / "predictions" / name

        def read_records() -> dict[str, Any]:
            """Return the record of each scored set; none, with a warning, if one of their files was changed."""
            records, damage = find_record(file)
            for record in (records or {}).values():
                damage = damage or entries_damage(predictions, record["files"])
            if damage is not None:
                warn_main(f"{damage}: the model is scored again")
            return {} if damage is not None or records is None else dict(records)

        records = on_main(read_records)
        # Loaded at the first set without a score, and once: a run whose sets are all scored loads no model.
        model = cache(load)
        sets = on_main(lambda: dict(self.data.sets))  # rank 0 alone reads the files for their fingerprints
        for set_name, settings in progress(sets.items(), f"Scoring the {name}", "sets"):
            if set_name in records and not differences(records[set_name]["asked"], settings):
                continue
            scored = ScoredModel(
                model=model(),
                tokenizer=tokenizer,
                predictions=predictions,
                sharded=sharded,
            )
            records.pop(set_name, None)
            score = self.data.score_set(set_name, scored)
            if World.current().is_main:
                # The folder holds the files of all sets; those that no other record lists are new.
                others = {path for record in records.values() for path in record["files"]}
                files = (path.relative_to(predictions).as_posix() for path in predictions.rglob("*") if path.is_file())
                own = entries_of(predictions, [path for path in files if path not in others])
                records[set_name] = {"asked": settings, "score": score, "files": own}
                # After each set, because scoring a set may take hours: a run that is killed goes on with the next one.
                write_json(file, records)
        records = broadcast_object(records)
        summary = self.data.summary({set_name: records[set_name]["score"] for set_name in sets})
        if sets and World.current().is_main:
            say(self.data.sentence(name, summary))
        return {"params": params, **summary}
