from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from question_files import write_file

from llmdistill.config import TaskConfig
from llmdistill.data.targets import TargetExample
from llmdistill.errors import UserError
from llmdistill.tasks.writing import Writing
from llmdistill.tasks.writing_files import read_files


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def squad(path: Path, *questions: tuple[str, str, str]) -> None:
    """A file in SQuAD's official format, of (context, question, answer)."""
    rows = []
    for number, (context, question, answer) in enumerate(questions):
        answers = [{"text": answer, "answer_start": max(context.find(answer), 0)}]
        rows.append({"id": f"{number}", "question": question, "context": context, "answers": answers})
    write_file(path, rows)


@pytest.mark.parametrize("pair", ["source target", "document summary"])
def test_summaries_of_the_usual_rows(tmp_path, pair):
    source, target = pair.split()
    write(tmp_path / "train.jsonl", {source: "a b c", target: "a", "id": 1}, {source: "d", target: "e"})
    write(tmp_path / "validation.jsonl", {source: "f", target: "g"})
    write(tmp_path / "test.jsonl", {source: "h", target: "i"})
    Writing.check_folder(str(tmp_path), "summarization", setting="data.task.dir")
    files = read_files("summarization", TaskConfig(dir=str(tmp_path)))
    assert files.train == [TargetExample("a b c", None, "a"), TargetExample("d", None, "e")]
    assert {name: each.references for name, each in files.sets.items()} == {"dev": [["g"]], "test": [["i"]]}
    assert len(read_files("summarization", TaskConfig(dir=str(tmp_path), limit=1)).train) == 1


def test_examples_of_one_source_are_one_with_several_references(tmp_path):
    rows = [{"context": "x y", "answer": answer, "question": question} for answer, question in ("xa", "yb", "xc")]
    write(tmp_path / "dev.jsonl", *rows)
    write(tmp_path / "train.jsonl", *rows)
    found = read_files("questiongeneration", TaskConfig(dir=str(tmp_path)), only_scores=True).sets["dev"]
    assert found.references == [["a", "c"], ["b"]]
    assert [(each.source, each.hint) for each in found.examples] == [("x y", "x"), ("x y", "y")]


def test_questions_of_the_official_files(tmp_path):
    squad(tmp_path / "train-v1.1.json", ("an apple fell", "what fell", "an apple"), ("a pear", "what", "a plum"))
    squad(tmp_path / "dev-v1.1.json", ("one two", "how many", "two"))
    Writing.check_folder(str(tmp_path), "questiongeneration", setting="data.task.dir")
    files = read_files("questiongeneration", TaskConfig(dir=str(tmp_path)))
    assert files.train == [TargetExample("an apple fell", "an apple", "what fell")]
    assert files.skipped == ["1"]
    assert files.sets["dev"].examples == [TargetExample("one two", "two", "how many")]


def test_questions_whose_answer_is_not_in_their_context_are_skipped(tmp_path):
    write(
        tmp_path / "train.jsonl",
        {"context": "one two", "question": "how many", "answer": "two"},
        {"context": "one two", "question": "which", "answer": "three"},
        {"context": "one two", "question": "why", "answer": ""},
        {"source": "one two [SEP] two", "target": "how many"},
    )
    write(tmp_path / "dev.jsonl", {"context": "one two", "question": "which", "answer": "three"})
    files = read_files("questiongeneration", TaskConfig(dir=str(tmp_path)))
    assert [example.hint for example in files.train] == ["two", None]
    assert files.skipped == [f"{tmp_path / 'train.jsonl'}:{line}" for line in (2, 3)]
    assert len(files.sets["dev"].examples) == 1


def test_an_empty_target_is_named(tmp_path):
    write(tmp_path / "train.jsonl", {"source": "a", "target": " "})
    write(tmp_path / "dev.jsonl", {"source": "a", "target": "b"})
    with pytest.raises(UserError, match=r"train\.jsonl:1: target is ' '"):
        read_files("summarization", TaskConfig(dir=str(tmp_path)))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"data\.task\.dir is missing"):
        Writing.check_folder(None, "summarization", setting="data.task.dir")
    write(tmp_path / "train.jsonl", {"source": "a", "target": "b"})
    with pytest.raises(UserError, match=r"has no dev\.jsonl or valid\.jsonl"):
        Writing.check_folder(str(tmp_path), "xsum", setting="data.task.dir")
    Writing.check_folder(None, "xsum", setting="data.task.dir")
