"""An encoder learns to write questions: two ranks write what one does, and a stopped run goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from llmdistill.tasks.text_metrics import text_metrics

from support import interrupted_copy, weights

pytestmark = pytest.mark.dist

NAMES = ["anna", "boris", "carla", "dmitri", "elena"]
PLACES = ["rome", "oslo", "lima", "cairo"]
TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "lives", "in", "who", "where", "does", "live", *NAMES, *PLACES]
SETTINGS = (
    *(
        "--recipe",
        "finetune",
        "--ds_config",
        "ds_configs/zero2.json",
        "--train.dtype",
        "fp32",
        "--data.max_length",
        "24",
    ),
    *("--data.task.name", "question_generation", "--data.task.writing.max_length", "8", "--scoring.batch_size", "3"),
    *("--train.global_batch_size", "8", "--train.learning_rate", "1e-2", "--train.save_every", "5"),
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """A random BERT without dropout: its masks differ between ranks."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        initializer_range=0.2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(TOKENS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """SQuAD's official format: the question asks for a name or a place, as the answer says."""
    folder = tmp_path_factory.mktemp("squad")
    pairs = [(name, place) for name in NAMES for place in PLACES]
    for split, some in (("train", pairs), ("dev", pairs[::3])):
        paragraphs = []
        for name, place in some:
            context = f"{name} lives in {place}"
            asked = [(f"who lives in {place}", name), (f"where does {name} live", place)]
            qas = [
                {
                    "id": f"{split} {name} {place} {answer}",
                    "question": question,
                    "answers": [{"text": answer, "answer_start": context.index(answer)}],
                }
                for question, answer in asked
            ]
            paragraphs.append({"context": context, "qas": qas})
        if split == "train":
            paragraphs[0]["qas"][0]["answers"] = [{"text": "nobody", "answer_start": 0}]
        file = {"version": "1.1", "data": [{"title": "people", "paragraphs": paragraphs}]}
        (folder / f"{split}-v1.1.json").write_text(json.dumps(file), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def finetune(launch, encoder, data):
    def run(folder: Path, *arguments: str, ranks: int = 1) -> Path:
        given = ("--student.model", str(encoder), "--data.task.dir", str(data), "--output_dir", str(folder))
        done = launch(*SETTINGS, *given, *arguments, ranks=ranks)
        (folder / "said.txt").write_text(done.stdout, encoding="utf-8")
        return folder

    return run


@pytest.fixture(scope="module")
def teacher(finetune, tmp_path_factory) -> Path:
    """A run of the labels alone."""
    return finetune(tmp_path_factory.mktemp("run") / "teacher", "--train.epochs", "40")


def largest_difference(one: Path, other: Path) -> float:
    """Of all weights but the biases of the keys: no attention depends on them, so their gradient is rounding alone,
    which Adam scales up to steps of the learning rate."""
    first, second = weights(one), weights(other)
    return max(float((first[key] - second[key]).abs().max()) for key in first if not key.endswith("key.bias"))


def written(run: Path, model: str) -> list[dict[str, object]]:
    lines = (run / f"predictions/{model}/dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_questions_are_learned_and_scored(teacher) -> None:
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
    assert "train anna rome anna" in report, "the question whose answer is not in its context"
    assert "QuestionGeneration BLEU-4" in said
    assert "| QuestionGeneration BLEU-4 | QuestionGeneration METEOR | QuestionGeneration ROUGE-L |" in report


def test_two_ranks_distil_and_write_as_one_does(finetune, teacher, tmp_path) -> None:
    """The masked tokens' logits, and the attention of the last layer, which sees the source and the text so far."""
    learns = (
        "--method",
        "kd",
        "--also",
        "[minilm]",
        "--teacher.model",
        str(teacher / "student"),
        "--train.epochs",
        "2",
    )
    one = finetune(tmp_path / "one", *learns)
    two = finetune(tmp_path / "two", *learns, "--teacher.sharding", "zero3", ranks=2)
    assert largest_difference(one, two) < 1e-4
    for model in ("teacher", "student"):
        assert written(one, model) == written(two, model)
    assert written(one, "teacher") == written(teacher, "student")


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(finetune, tmp_path) -> None:
    epochs = ("--train.epochs", "2")
    whole = finetune(tmp_path / "whole", *epochs)
    stopped = interrupted_copy(whole, tmp_path / "stopped")
    finetune(stopped, *epochs)
    first, second = weights(whole), weights(stopped)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert written(whole, "student") == written(stopped, "student")
