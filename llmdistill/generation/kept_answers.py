"""Answers that outlive a scoring that is stopped, so that the same command goes on from them.

The folder has request.json, which determines the answers, and rank-R.jsonl with one line per answer:
{"seed": of its pass, "index": of its prompt, "ids": tokens, "seconds": since the passes that run together began}.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from llmdistill.artifacts import differences, find_record
from llmdistill.files import append_json, cut_half_line, write_json
from llmdistill.runtime.distributed import World, on_main


class Finished(NamedTuple):
    """The answers that are there when some passes begin."""

    answers: dict[tuple[int, int], list[int]]
    """The tokens of an answer by the seed of its pass and the index of its prompt."""
    seconds: float
    """How long these passes had taken, together, when the last answer ended."""


class KeptAnswers:
    """The answers to one set of prompts; every rank has one, and appends to a file of its own."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        """`request` is what determines the answers, as plain JSON values."""
        self._folder, self._request = folder, request

    def read(self, seeds: Sequence[int]) -> Finished:
        """Return the finished answers of the passes with these seeds; every rank must call this.

        Answers to another request are removed. Raises UserError if the folder cannot be written.
        """
        return on_main(lambda: self._read(seeds))

    def _read(self, seeds: Sequence[int]) -> Finished:
        earlier, _ = find_record(self._folder / "request.json")
        if earlier is None or differences(earlier, self._request):
            shutil.rmtree(self._folder, ignore_errors=True)
            write_json(self._folder / "request.json", dict(self._request))
        answers: dict[tuple[int, int], list[int]] = {}
        seconds = 0.0
        for path in self._folder.glob("rank-*.jsonl"):
            cut_half_line(path)
            for line in path.read_bytes().splitlines():
                with suppress(ValueError, KeyError, TypeError):  # a damaged line: that prompt is answered again
                    row = json.loads(line)
                    if row["seed"] in seeds:
                        answers[row["seed"], row["index"]] = row["ids"]
                        seconds = max(seconds, row["seconds"])
        return Finished(answers, seconds)

    def add(self, seed: int, index: int, ids: list[int], seconds: float) -> None:
        """Keep an answer of this rank. Raises UserError if it cannot be written."""
        row = {"seed": seed, "index": index, "ids": ids, "seconds": seconds}
        append_json(self._folder / f"rank-{World.current().rank}.jsonl", row)

    def remove(self) -> None:
        """Remove the answers: the scores are written."""
        shutil.rmtree(self._folder, ignore_errors=True)
