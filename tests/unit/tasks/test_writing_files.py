import pytest
from hostile import refuses
from question_files import write_questions

from llmdistill.config import TaskConfig
from llmdistill.data.targets import TargetExample
from llmdistill.tasks.writing import Writing
from llmdistill.tasks.writing_files import read_files

from support import write_rows


@pytest.mark.parametrize("pair", ["source target", "document summary"])
def test_summaries_of_the_usual_rows(tmp_path, pair):
    source, target = pair.split()
    write_rows(tmp_path / "train.jsonl", [{source: "a b c", target: "a", "id": 1}, {source: "d", target: "e"}])
    write_rows(tmp_path / "validation.jsonl", [{source: "f", target: "g"}])
    write_rows(tmp_path / "test.jsonl", [{source: "h", target: "i"}])
    Writing.check_folder(str(tmp_path), "summarization", setting="data.task.dir")
    files = read_files("summarization", TaskConfig(dir=str(tmp_path)))
    assert files.train == [TargetExample("a b c", None, "a"), TargetExample("d", None, "e")]
    assert {name: each.references for name, each in files.sets.items()} == {"dev": [["g"]], "test": [["i"]]}
    assert len(read_files("summarization", TaskConfig(dir=str(tmp_path), limit=1)).train) == 1


def test_examples_of_one_source_are_one_with_several_references(tmp_path):
    rows = [{"context": "x y", "answer": answer, "question": question} for answer, question in ("xa", "yb", "xc")]
    write_rows(tmp_path / "dev.jsonl", [*rows])
    write_rows(tmp_path / "train.jsonl", [*rows])
    found = read_files("questiongeneration", TaskConfig(dir=str(tmp_path)), only_scores=True).sets["dev"]
    assert found.references == [["a", "c"], ["b"]]
    assert [(each.source, each.hint) for each in found.examples] == [("x y", "x"), ("x y", "y")]


def test_questions_of_the_official_files(tmp_path):
    found, missing = ("an apple fell", "what fell", "an apple"), ("a pear", "what", "a plum")
    write_questions(tmp_path / "train-v1.1.json", found, missing)
    write_questions(tmp_path / "dev-v1.1.json", ("one two", "how many", "two"))
    Writing.check_folder(str(tmp_path), "questiongeneration", setting="data.task.dir")
    files = read_files("questiongeneration", TaskConfig(dir=str(tmp_path)))
    assert files.train == [TargetExample("an apple fell", "an apple", "what fell")]
    assert files.skipped == ["train-v1.1-1"]
    assert files.sets["dev"].examples == [TargetExample("one two", "two", "how many")]


def test_questions_whose_answer_is_not_in_their_context_are_skipped(tmp_path):
    asked = [{"context": "one two", "question": "q", "answer": answer} for answer in ("two", "three", "")]
    write_rows(tmp_path / "train.jsonl", [*asked, {"source": "one two [SEP] two", "target": "how many"}])
    write_rows(tmp_path / "dev.jsonl", [{"context": "one two", "question": "which", "answer": "three"}])
    files = read_files("questiongeneration", TaskConfig(dir=str(tmp_path)))
    assert [example.hint for example in files.train] == ["two", None]
    assert files.skipped == [f"{tmp_path / 'train.jsonl'}:{line}" for line in (2, 3)]
    assert len(files.sets["dev"].examples) == 1


def test_missing_files_and_empty_targets_are_named(tmp_path):
    refuses("data.task.dir is missing", Writing.check_folder, None, "summarization", setting="data.task.dir")
    Writing.check_folder(None, "xsum", setting="data.task.dir")
    write_rows(tmp_path / "train.jsonl", [{"source": "a", "target": " "}])
    refuses("has no dev.jsonl or valid.jsonl", Writing.check_folder, str(tmp_path), "xsum", setting="data.task.dir")
    write_rows(tmp_path / "dev.jsonl", [{"source": "a", "target": "b"}])
    refuses("train.jsonl:1: target is ' '", read_files, "summarization", TaskConfig(dir=str(tmp_path)))
