"""An encoder learns to write questions: two ranks write what one does."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import pytest
from question_files import write_questions
from word_models import save_bert, save_tokenizer

from llmdistill.tasks.text_metrics import text_metrics

from support import largest_difference

NAMES = ["anna", "boris", "carla", "dmitri", "elena"]
PLACES = ["rome", "oslo", "lima", "cairo"]
TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "lives", "in", "who", "where", "does", "live", *NAMES, *PLACES]
SETTINGS = """--data.task.name question_generation --data.max_length 24 --data.task.writing.max_length 8
--scoring.batch_size 3 --train.learning_rate 1e-2"""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    save_bert(folder, TOKENS, hidden_size=32, intermediate_size=48, initializer_range=0.2)
    save_tokenizer(folder, TOKENS, marked=False)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """SQuAD's official format: the question asks for a name or a place, as the answer says."""
    folder, asked = tmp_path_factory.mktemp("squad"), []
    for name, place in itertools.product(NAMES, PLACES):
        context = f"{name} lives in {place}"
        asked.append(((context, f"who lives in {place}", name), (context, f"where does {name} live", place)))
    unanswered = ("anna lives in rome", "who lives in rome", "nobody")
    write_questions(folder / "train-v1.1.json", unanswered, *itertools.chain(*asked))
    write_questions(folder / "dev-v1.1.json", *itertools.chain(*asked[::3]))
    return folder


@pytest.fixture(scope="module")
def teacher(finetune, tmp_path_factory):
    """A run of the labels alone."""
    return finetune(tmp_path_factory.mktemp("run") / "teacher", "--train.epochs", "40")


def written(run: Path, model: str) -> list[dict[str, object]]:
    lines = (run / f"predictions/{model}/dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_questions_are_learned_and_scored(teacher):
    rows = written(teacher, "student")
    assert len(rows) == 14
    right = sum(row["prediction"] in row["references"] for row in rows)
    assert right >= 12, rows
    metrics = json.loads((teacher / "metrics.json").read_text())["student"]
    texts, references = [str(row["prediction"]) for row in rows], [row["references"] for row in rows]
    expected = text_metrics(["bleu4", "meteor", "rougeL"], texts, references)
    assert metrics["dev"]["QuestionGeneration"] == pytest.approx(expected)
    assert metrics["score"] == pytest.approx(expected["bleu4"])
    said, report = (teacher / "said.txt").read_text(), (teacher / "report.md").read_text()
    assert "1 training questions are skipped" in report
    assert "train-v1.1-0" in report, "the question whose answer is not in its context"
    assert "QuestionGeneration BLEU-4" in said
    assert "| QuestionGeneration BLEU-4 | QuestionGeneration METEOR | QuestionGeneration ROUGE-L |" in report


def test_two_ranks_distil_and_write_as_one_does(finetune, teacher, tmp_path):
    """The masked tokens' logits, and the attention of the last layer, which sees the source and the text so far."""
    learns = shlex.split(f"--method kd --also [minilm] --train.epochs 2 --teacher.model {teacher}/student")
    one = finetune(tmp_path / "one", *learns)
    two = finetune(tmp_path / "two", *learns, "--teacher.sharding", "zero3", ranks=2)
    # No attention depends on the biases of the keys: their gradient is rounding, of which Adam makes whole steps.
    assert largest_difference(one, two, without=r".*key\.bias") < 1e-4
    for model in ("teacher", "student"):
        assert written(one, model) == written(two, model)
    assert written(one, "teacher") == written(teacher, "student")
