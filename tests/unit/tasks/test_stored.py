"""The examples of benchmarks are read and tokenized once, and are those of a reader that keeps them as lists."""

import numpy as np
import pytest
from question_files import encode_windows, write_tasks
from transformers import BertConfig
from word_models import save_tokenizer

from llmdistill.config import DataConfig, RunConfig, TaskConfig, WritingConfig
from llmdistill.data import store
from llmdistill.data.pairs import encode_pairs
from llmdistill.data.targets import encode_targets
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Objective
from llmdistill.tasks import make_task
from llmdistill.tasks.base import Models
from llmdistill.tasks.squad import from_json

from support import write_rows

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "yes", "no", "maybe", *(f"w{n}" for n in range(12))]
LENGTH = 20


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMDISTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "AT_ONCE", 4)
    return tmp_path / "cache" / "tasks"


@pytest.fixture
def data(tmp_path):
    """RTE with a test split, SQuAD, and rows to write; a set of another data set."""
    folder = write_tasks(tmp_path / "data", train=9, dev=5)
    rows = [f"w{n}\tw{n % 3} no\t{('entailment', 'not_entailment')[n % 2]}" for n in range(9)]
    for split in ("train", "dev"):
        table(folder / "RTE" / f"{split}.tsv", "sentence1\tsentence2\tlabel", rows)
    table(folder / "RTE" / "test.tsv", "index\tsentence1\tsentence2", [f"{20 - n}\tw{n}\tyes" for n in range(5)])
    table(folder / "hans.txt", "premise\thypothesis\tlabel", ["w1 w2\tw3\tentailment", "w4\tw5\tnon-entailment"])
    pairs = [{"source": "w1 w2 " * n, "target": "yes no maybe"} for n in range(1, 9)]
    for split in ("train", "dev", "test"):
        write_rows(folder / "summarization" / f"{split}.jsonl", pairs)
    return folder


def table(path, header: str, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")


@pytest.fixture
def run(tmp_path, data):
    """Return the benchmark of a run, and what `read` needs."""
    save_tokenizer(tmp_path / "model", WORDS)

    def make(task: str, **settings):
        asked = {"writing": WritingConfig(max_length=8), "max_question_length": 4, "stride": 6, **settings}
        config = DataConfig(kind="task", max_length=LENGTH, task=TaskConfig(name=task, dir=str(data), **asked))
        model = BertConfig(max_position_embeddings=32)
        paths = {"teacher_path": tmp_path / "model", "tokenizer_path": tmp_path / "model"}
        given = Models(teacher=model, student=model, causal=False, objective=Objective(), **paths)
        return make_task(RunConfig(ds_config="", data=config)), given

    return make


def test_pairs_are_those_of_the_files(run, data):
    task, given = run("rte", out_of_domain={"HANS": {"data": str(data / "hans.txt")}})
    found, files, tokenizer = task.read(given), task.read_files(), load_tokenizer(given.tokenizer_path)
    expected = {"train": files.train, **{column: each.examples for column, each in files.sets.items()}}
    assert found.encoded.keys() == expected.keys()
    for split, examples in expected.items():
        assert list(found.encoded[split]) == encode_pairs(examples, tokenizer, LENGTH)
        assert [each.index for each in found.encoded[split]] == [each.index for each in examples]
    assert found.sizes == {split: len(expected[split]) for split in expected if split != "test"}
    assert set(found.submissions) == files.sets.keys() & {"test"}
    assert found.sets["dev"]["examples"] == found.digest
    labels = {column: each.labels for column, each in files.sets.items() if each.labels}
    assert {column: tuple(each) for column, each in found.labels.items()} == labels


def test_questions_are_those_of_the_files(run):
    task, given = run("squad2")
    found, files, tokenizer = task.read(given), task.read_files(), load_tokenizer(given.tokenizer_path)
    expected = {"train": (files.train, True), **{key: (each.questions, False) for key, each in files.sets.items()}}
    windows = found.encoded
    assert windows.keys() == expected.keys()
    for key, (questions, learned) in expected.items():
        ours = encode_windows(questions, tokenizer, task.limits, learned=learned)
        assert len(ours) == len(windows[key]) >= len(questions)
        for mine, its in zip(windows[key], ours, strict=True):
            assert (mine.target, mine.question, mine.sample_id) == (its.target, its.question, its.sample_id)
            for name in ("input_ids", "token_type_ids", "characters"):
                one, other = getattr(mine, name), getattr(its, name)
                np.testing.assert_array_equal(one, other)
                assert one is other is None or (one.dtype == other.dtype and one.flags.writeable)
    for key, each in files.sets.items():
        assert from_json(found.text(key)) == each.questions
    without = [not question.answers for question in files.sets["dev"].questions]
    assert found.chance == 100 * sum(without) / len(without)
    assert found.sizes["train"] == len(files.train)


def test_texts_to_write_are_those_of_the_files(run):
    task, given = run("summarization")
    found, files = task.read(given), task.read_files()
    expected = encode_targets(files.train, load_tokenizer(given.tokenizer_path), max_source=LENGTH - 8, max_target=8)
    assert list(found.encoded["train"]) == expected.items


@pytest.mark.parametrize("name", ["rte", "squad2", "summarization"])
def test_other_files_and_settings_are_tokenized_anew(run, data, cache, monkeypatch, name):
    task, given = run(name)
    task.read(given)
    limited, _ = run(name, limit=3)
    assert limited.read(given).sizes["train"] == 3
    path = next(path for path in task.paths() if "train" in path.name)
    path.write_text(path.read_text(encoding="utf-8").replace("w1", "w2"), encoding="utf-8")
    task.read(given)
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr(type(task), "read_files", lambda *_: pytest.fail("they are read again"))
    assert task.read(given).num_steps(1, 2) > 0
