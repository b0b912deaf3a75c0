"""Question answering as an ordinary run: two ranks and a sharded teacher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from question_files import write_tasks
from transformers import AutoModelForQuestionAnswering, AutoTokenizer
from word_models import save_bert

from llmdistill.embedded import locate

from support import largest_difference

SETTINGS = """--data.task.name squad2 --data.max_length 30 --data.task.stride 8 --data.task.max_question_length 8
--train.epochs 1 --train.learning_rate 3e-3"""

SHIFTS = r".*(key|layer\.1\.output\.LayerNorm|qa_outputs)\.bias"
"""Parameters that shift all tokens alike, which changes no distribution over tokens: their gradient is rounding alone,
and Adam makes whole steps of it."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A random BERT with the embedded tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("encoder"), AutoTokenizer.from_pretrained(locate("embedded:teacher"))
    save_bert(folder, tokenizer.get_vocab(), initializer_range=0.3)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("questions"), train=40, dev=13)


@pytest.fixture(scope="module")
def teacher(finetune, tmp_path_factory):
    """A run of the labels alone."""
    return finetune(tmp_path_factory.mktemp("run") / "teacher")


def metrics(run: Path) -> dict:
    return json.loads((run / "metrics.json").read_text())


def test_two_ranks_learn_and_answer_as_one(finetune, teacher, tmp_path):
    learns = ("--method", "kd", "--teacher.model", str(teacher / "student"))
    one = finetune(tmp_path / "one", *learns)
    cache = tmp_path / "cache"
    own = ("--data.cache_dir", str(cache))
    two = finetune(tmp_path / "two", *learns, *own, "--teacher.sharding", "zero3", ranks=2)
    assert len(list((cache / "tasks").iterdir())) == 1, "the questions are tokenized once"
    assert largest_difference(one, two, without=SHIFTS) < 1e-5
    names = ("spans", "null_odds", "predictions")
    files = [
        [json.loads((run / f"predictions/teacher/dev/{name}.json").read_text()) for name in names] for run in (one, two)
    ]
    assert files[0][0] == files[1][0]
    assert files[0][1] == pytest.approx(files[1][1], abs=1e-4)
    assert metrics(one)["teacher"]["dev"] == metrics(two)["teacher"]["dev"]
    assert metrics(one)["student"]["dev"].keys() == {"SQuAD2"}
    assert "| SQuAD2 best_f1 |" in (one / "report.md").read_text()
    model = AutoModelForQuestionAnswering.from_pretrained(one / "student")
    assert type(model).__name__ == "BertForQuestionAnswering"
