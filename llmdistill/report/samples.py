"""The answers of several models to some prompts of the test sets, side by side, from the predictions that runs left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmdistill.files import json_lines

SAMPLES = 8
_LONGEST = 600
"""Characters of a prompt or an answer that a report shows."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    set: str
    prompt: str
    reference: str
    answers: Mapping[str, str]


def read_samples(folders: Mapping[str, Path], sets: Sequence[str]) -> list[Sample]:
    """Return up to SAMPLES prompts spread evenly over the sets, with each model's answer in the first pass.

    NAME.jsonl in the folder of a model's predictions holds its answers to a set, and a text has none. The first model
    with a set decides on its prompts.
    """
    sets = [name for name in sets if any((folder / f"{name}.jsonl").is_file() for folder in folders.values())]
    samples = []
    for number, name in enumerate(sets):
        files = {model: folder / f"{name}.jsonl" for model, folder in folders.items()}
        # By the prompt: models with different tokenizers drop different ones for their length.
        answers = {
            model: {(_prompt(row), *row["references"]): row for row in json_lines(file)}
            for model, file in files.items()
            if file.is_file()
        }
        rows = list(next(iter(answers.values()), {}).items())
        wanted = SAMPLES // len(sets) + (number < SAMPLES % len(sets))
        for index in dict.fromkeys(len(rows) * k // wanted for k in range(min(wanted, len(rows)))):
            key, row = rows[index]
            told = {model: each[key]["predictions"] for model, each in answers.items() if key in each}
            said = {model: _shortened(next(iter(each.values()))) for model, each in told.items()}
            prompt, reference = _shortened(_prompt(row)), _shortened(row["references"][0])
            samples.append(Sample(set=name, prompt=prompt, reference=reference, answers=said))
    return samples


def _prompt(row: Mapping[str, Any]) -> str:
    messages = [f"{turn['role']}: {turn['content']}" for turn in row.get("messages", [])]
    parts = [row.get("instruction"), row.get("input"), row.get("prompt"), *messages]
    return "\n\n".join(part for part in parts if part)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rstrip()} …"
