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
        # Match the rows by prompt and references, not by index: models with different tokenizers drop different
        # prompts for their length.
        answers = {
            model: {(_join_prompt(row), *row["references"]): row for row in json_lines(file)}
            for model, file in files.items()
            if file.is_file()
        }
        rows = list(next(iter(answers.values()), {}).items())
        wanted = SAMPLES // len(sets) + (number < SAMPLES % len(sets))
        # Spread over the set, because neighboring examples are often alike.
        for index in dict.fromkeys(len(rows) * k // wanted for k in range(min(wanted, len(rows)))):
            key, row = rows[index]
            predictions = {
                model: by_prompt[key]["predictions"] for model, by_prompt in answers.items() if key in by_prompt
            }
            first_pass = {model: _shorten(next(iter(passes.values()))) for model, passes in predictions.items()}
            prompt, reference = _shorten(_join_prompt(row)), _shorten(row["references"][0])
            samples.append(Sample(set=name, prompt=prompt, reference=reference, answers=first_pass))
    return samples


def _join_prompt(row: Mapping[str, Any]) -> str:
    messages = [f"{turn['role']}: {turn['content']}" for turn in row.get("messages", [])]
    parts = [row.get("instruction"), row.get("input"), row.get("prompt"), *messages]
    return "\n\n".join(part for part in parts if part)


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rstrip()} …"
