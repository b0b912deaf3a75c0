import json

import pytest
from datasets import Dataset
from hostile import refuses
from question_files import rows, write_file, write_tasks

from llmdistill.config import DataConfig, RunConfig, TaskConfig
from llmdistill.data.questions import Answer
from llmdistill.tasks import make_task
from llmdistill.tasks.squad import read_questions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("questions"), train=12, dev=6)


def settings(folder, **more) -> TaskConfig:
    return TaskConfig(name="squad2", dir=str(folder), **more)


@pytest.mark.parametrize("key", ["squad1", "squad2"])
def test_the_official_files_are_read(folder, key):
    files = read_questions(key, settings(folder))
    raw = rows(12, seed=0, unanswerable=key == "squad2")
    assert [question.id for question in files.train] == [row["id"] for row in raw]
    assert [question.context for question in files.train] == [row["context"] for row in raw]
    right = [tuple(Answer(each["text"], each["answer_start"]) for each in row["answers"]) for row in raw]
    assert [question.answers for question in files.train] == right
    assert len(files.sets["dev"].questions) == 6
    assert not files.skipped
    assert read_questions(key, settings(folder / key)) == files, "the folder of the task itself"
    limited = read_questions(key, settings(folder, limit=3))
    assert [question.id for question in limited.train] == ["q0", "q1", "q2"]
    assert limited.digest != files.digest


def test_the_real_files(real_data):
    files = read_questions("squad2", settings(real_data))
    dev = files.sets["dev"].questions
    assert (len(files.train) + len(files.skipped), len(dev)) == (4205, 1200)
    assert sum(not question.answers for question in dev) == 595


def test_mlqa_learns_english_and_is_scored_by_language(folder):
    files = read_questions("mlqa", settings(folder))
    assert list(files.sets) == ["dev", "MLQA-en", "MLQA-de", "MLQA-zh"]
    assert [each.language for each in files.sets.values()] == ["en", "en", "de", "zh"]
    assert [each.is_averaged for each in files.sets.values()] == [False, True, True, True]
    assert files.train == read_questions("squad1", settings(folder)).train
    chosen = read_questions("mlqa", settings(folder, languages=["zh", "en"]), only_scores=True)
    assert list(chosen.sets) == ["dev", "MLQA-zh", "MLQA-en"]


def official(*questions):
    return {"data": [{"paragraphs": [{"context": "w1 w2", "qas": list(questions)}]}]}


RIGHT = {"id": "a", "question": "w0", "answers": [{"text": "w1", "answer_start": 0}]}


def test_a_dev_file_that_cannot_be_read(tmp_path):
    write_file(tmp_path / "train-v1.1.json", rows(4, seed=0, unanswerable=False))
    path = tmp_path / "dev-v1.1.json"
    for file, said in (
        ({"data": [{"title": "x"}]}, "item 1: not in the official format (KeyError: 'paragraphs')"),
        (official({**RIGHT, "question": 7}), "item 1, question a: expected id, question and context as text"),
        (official(RIGHT, RIGHT), "two questions have the id a"),
        (official({**RIGHT, "answers": []}), "question a has no answer, but every question of SQuAD1 has one"),
    ):
        path.write_text(json.dumps(file))
        refuses(f"{path}: {said}", read_questions, "squad1", settings(tmp_path))


def as_rows(path, kind, given):
    """Write rows as the datasets library or pandas does."""
    table = Dataset.from_list(
        [
            {**row, "answers": {key: [each[key] for each in row["answers"]] for key in RIGHT["answers"][0]}}
            for row in given
        ]
    )
    if kind == "saved":
        table.save_to_disk(path)
    elif kind == "json":
        path.with_suffix(".json").write_text(json.dumps(given))
    elif kind == "csv":
        table.to_pandas().to_csv(path.with_suffix(".csv"))
    else:
        getattr(table, f"to_{kind}")(path.with_suffix(f".{kind}"))


@pytest.mark.parametrize("kind", ["saved", "parquet", "csv", "json"])
def test_a_row_for_each_question_is_what_the_official_file_says(tmp_path, folder, kind):
    for name, count in (("train", 12), ("validation", 6)):
        as_rows(
            tmp_path / (name if kind != "json" else name[:5].replace("valid", "dev")),
            kind,
            rows(count, seed=0, unanswerable=True),
        )
    files, official_files = (read_questions("squad2", settings(each)) for each in (tmp_path, folder))
    assert files.train == official_files.train
    assert len(files.sets["dev"].questions) == 6


def test_all_ways_to_say_that_there_is_no_answer(tmp_path):
    ways = [{"answers": []}, {"is_impossible": True}, {"answers": [{"text": "", "answer_start": 0}]}]
    asked = [
        {"id": number, "question": "w0", **way} for number, way in enumerate([{"answers": RIGHT["answers"]}, *ways])
    ]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.json").write_text(json.dumps(official(*asked)))
    files = read_questions("squad2", settings(tmp_path))
    assert [len(question.answers) for question in files.train] == [1, 0, 0, 0]
    assert files.skipped == []
    assert [question.id for question in files.train] == ["0", "1", "2", "3"]


def test_files_and_languages_that_are_not_there(folder, tmp_path):
    def task(name: str, where, **more):
        data = DataConfig(kind="task", max_length=14, task=TaskConfig(name=name, dir=str(where), **more))
        return make_task(RunConfig(ds_config="", data=data))

    refuses("nowhere: no such folder", task, "squad2", tmp_path / "nowhere")
    write_tasks(tmp_path, train=4, dev=4)
    write_file(tmp_path / "squad2/train-old.json", rows(4, seed=0, unanswerable=True))
    refuses("found train-old.json, train-v2.0.json; leave one there", task, "squad2", tmp_path)
    refuses("json), only for en, de, zh", read_questions, "mlqa", settings(tmp_path, languages=["en", "hi"]))
    refuses("SQuAD1 is English: leave it out", read_questions, "squad1", settings(folder, languages=["en"]))


def test_a_training_set_without_a_located_answer(tmp_path):
    broken, right = rows(3, seed=0, unanswerable=False), rows(1, seed=3, unanswerable=False)
    for row in broken:
        row["answers"][0]["text"] = "elsewhere"
    for name in ("train", "dev"):
        write_file(tmp_path / f"{name}.json", broken)
    refuses("no training question has its answer in its context", read_questions, "squad1", settings(tmp_path))
    write_file(tmp_path / "train.json", [*broken, {**right[0], "id": "right"}])
    files = read_questions("squad1", settings(tmp_path))
    assert files.skipped == ["q0", "q1", "q2"]
    assert [question.id for question in files.train] == ["right"]
    assert len(files.sets["dev"].questions) == 3, "the official script scores them all the same"
