"""Instructions for a small chat model, made of public files: what a student learns from, and what it is asked.

python scripts/make/make_instructions.py DATA instructions
llmdistill generate --model MODEL --data instructions/prompts.jsonl --output instructions/answers.jsonl
cat instructions/gold.jsonl instructions/answers.jsonl > instructions/train.jsonl

DATA has instruct/{dolly_sample,seed_tasks,self_inst,vicuna}.jsonl (rows of instruction, input, output) and
squad2/train.json (SQuAD's official format). Self-Instruct's and Vicuna's questions and every second row of Dolly are
test sets, which no other file repeats.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from itertools import cycle
from pathlib import Path

from llmdistill.files import json_lines, write_text

VALID = 48
"""Rows of the validation set, half of Dolly's and half of the seed tasks."""

ABOUT_A_PASSAGE = (
    "Summarize the passage in two sentences.",
    "List the most important facts of the passage.",
    "Explain the passage to a child in simple words.",
    "Write three questions that the passage answers, and their answers.",
)
"""What the teacher is asked to do with a passage; the answers are its own."""


def rows_of(file: Path) -> list[dict[str, str]]:
    return [{key: row[key] for key in ("instruction", "input", "output")} for row in json_lines(file)]


def passages(file: Path) -> Iterator[dict[str, str]]:
    """Yield each context as the input of its first question that has an answer."""
    for article in json.loads(file.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for each in paragraph["qas"]:
                if each["answers"]:
                    answer = each["answers"][0]["text"]
                    yield {"instruction": each["question"], "input": paragraph["context"], "output": answer}
                    break


def write(file: Path, rows: Iterable[dict[str, str]]) -> None:
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="Folder with instruct/ and squad2/.")
    parser.add_argument("output", type=Path, help="Folder for the sets.")
    asked = parser.parse_args()
    files = ("dolly_sample", "seed_tasks", "self_inst", "vicuna")
    dolly, seeds, self_inst, vicuna = (rows_of(asked.data / "instruct" / f"{name}.jsonl") for name in files)
    tests = {"dolly": dolly[1::2], "self_inst": self_inst, "vicuna": vicuna}
    tested = {row["instruction"] for rows in tests.values() for row in rows}
    dolly, seeds = ([row for row in rows if row["instruction"] not in tested] for rows in (dolly[::2], seeds))
    questions = list(passages(asked.data / "squad2/train.json"))
    prompts = [
        {"instruction": task, "input": each["input"], "output": ""}
        for task, each in zip(cycle(ABOUT_A_PASSAGE), questions, strict=False)
    ]
    write(asked.output / "valid.jsonl", [*dolly[: VALID // 2], *seeds[: VALID // 2]])
    write(asked.output / "gold.jsonl", [*dolly[VALID // 2 :], *seeds[VALID // 2 :], *questions])
    write(asked.output / "prompts.jsonl", prompts)
    for name, rows in tests.items():
        write(asked.output / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
