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
from pathlib import Path

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
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [{key: row[key] for key in ("instruction", "input", "output")} for row in rows]


def passages(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each context with its first question that has an answer, and the answer."""
    for article in json.loads(file.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for each in paragraph["qas"]:
                if each["answers"]:
                    yield paragraph["context"], each["question"], each["answers"][0]["text"]
                    break


def write(file: Path, rows: Iterable[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="Folder with instruct/ and squad2/.")
    parser.add_argument("output", type=Path, help="Folder for the sets.")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    instruct = asked.data / "instruct"
    dolly, seeds = rows_of(instruct / "dolly_sample.jsonl"), rows_of(instruct / "seed_tasks.jsonl")
    tests = {"dolly": dolly[1::2], "self_inst": rows_of(instruct / "self_inst.jsonl")}
    tests["vicuna"] = rows_of(instruct / "vicuna.jsonl")
    tested = {row["instruction"] for rows in tests.values() for row in rows}
    dolly, seeds = ([row for row in rows if row["instruction"] not in tested] for rows in (dolly[::2], seeds))
    read = list(passages(asked.data / "squad2/train.json"))
    questions = [{"instruction": question, "input": text, "output": answer} for text, question, answer in read]
    prompts = [
        {"instruction": ABOUT_A_PASSAGE[index % len(ABOUT_A_PASSAGE)], "input": text, "output": ""}
        for index, (text, _, _) in enumerate(read)
    ]
    write(asked.output / "valid.jsonl", [*dolly[: VALID // 2], *seeds[: VALID // 2]])
    write(asked.output / "gold.jsonl", [*dolly[VALID // 2 :], *seeds[VALID // 2 :], *questions])
    write(asked.output / "prompts.jsonl", prompts)
    for name, rows in tests.items():
        write(asked.output / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
