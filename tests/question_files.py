"""A handful of questions in the official format, of the words that the tiny encoder knows."""

import json
from pathlib import Path
from typing import Any

import torch

from llmdistill.data.questions import EncodedWindow, encode_in_pieces


def encode_windows(*given: Any, learned: bool) -> list[EncodedWindow]:
    return [window for piece in encode_in_pieces(*given, learned=learned) for window in piece]


def question(generator: torch.Generator, number: int, *, has_answer: bool) -> dict[str, Any]:
    """The answer is "yes" or "maybe", of which a context has one, or neither if it has no answer."""
    words = [f"w{int(n)}" for n in torch.randint(12, (6 + number % 7,), generator=generator)]
    place = int(torch.randint(len(words), (), generator=generator))
    if has_answer:
        words[place] = ("yes", "maybe")[number % 2]
    start = len(" ".join(words[:place])) + (place > 0)
    answers = [{"text": words[place], "answer_start": start}] if has_answer else []
    return {"id": f"q{number}", "question": "no", "context": " ".join(words), "answers": answers}


def content(rows: list[dict[str, Any]]) -> str:
    """Two articles, a paragraph for each question."""
    paragraphs = [
        {"context": row["context"], "qas": [{key: row[key] for key in ("id", "question", "answers")}]} for row in rows
    ]
    half = len(paragraphs) // 2
    articles = [{"title": "one", "paragraphs": paragraphs[:half]}, {"title": "two", "paragraphs": paragraphs[half:]}]
    return json.dumps({"version": "v2.0", "data": articles})


def write_file(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content(rows), encoding="utf-8")


def write_questions(path: Path, *questions: tuple[str, str, str]) -> None:
    """Write questions of (context, question, answer); an answer that is not in its context is said to begin there."""
    written = []
    for number, (context, asked, answer) in enumerate(questions):
        answers = [{"text": answer, "answer_start": max(context.find(answer), 0)}]
        written.append({"id": f"{path.stem}-{number}", "question": asked, "context": context, "answers": answers})
    write_file(path, written)


def rows(count: int, *, seed: int, unanswerable: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [question(generator, n, has_answer=not unanswerable or n % 3 > 0) for n in range(count)]


def write_tasks(folder: Path, *, train: int = 96, dev: int = 30) -> Path:
    """The folders squad1, squad2 and MLQA_V1 with three languages, as in the official downloads."""
    for task, version in (("squad1", "v1.1"), ("squad2", "v2.0")):
        is_second = task == "squad2"
        write_file(folder / task / f"train-{version}.json", rows(train, seed=0, unanswerable=is_second))
        write_file(folder / task / f"dev-{version}.json", rows(dev, seed=1, unanswerable=is_second))
    write_file(folder / "MLQA" / "dev" / "dev-context-en-question-en.json", rows(dev, seed=2, unanswerable=False))
    for one in ("en", "de", "zh"):
        for other in ("en", "de", "zh"):
            name = f"test-context-{one}-question-{other}.json"
            write_file(folder / "MLQA" / "test" / name, rows(dev // 2, seed=ord(one[0]), unanswerable=False))
    return folder
