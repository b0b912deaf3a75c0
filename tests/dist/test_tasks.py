"""Fine-tuning as an ordinary run: labels, spans and written questions, with a sharded teacher and on two ranks."""

import itertools
import json
from pathlib import Path

import pytest
from glue_tasks import write_task
from question_files import write_questions, write_tasks
from transformers import AutoModelForQuestionAnswering, AutoTokenizer
from word_models import save_bert, save_tokenizer

from llmdistill.embedded import locate
from llmdistill.tasks.text_metrics import text_metrics

from support import largest_difference, logged

NAMES = ["anna", "boris", "carla", "dmitri", "elena"]
PLACES = ["rome", "oslo", "lima", "cairo"]
TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "lives", "in", "who", "where", "does", "live", *NAMES, *PLACES]


@pytest.fixture(scope="module")
def finetune(launch, tmp_path_factory):
    """Fine-tunes an encoder on its task; returns the run's folder."""

    def run(settings: tuple[str, ...], *arguments: str, ranks: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("run") / "run"
        given = ("--recipe", "finetune", "--train.dtype", "fp32", "--train.global_batch_size", "8", *settings)
        launch(*given, "--output_dir", str(folder), *arguments, ranks=ranks)
        return folder

    return run


def metrics(run: Path) -> dict:
    return json.loads((run / "metrics.json").read_text())


def test_adapters_learn_labels_from_a_sharded_teacher_on_two_ranks_as_on_one(finetune, tiny_teacher, tmp_path):
    write_task(tmp_path, "RTE", {"train": 40, "dev": 13})
    settings = ("--student.model", str(tiny_teacher), "--data.task.dir", str(tmp_path), "--data.max_length", "32")
    settings += ("--train.epochs", "2", "--train.learning_rate", "3e-3")
    teacher = finetune(settings, "--train.epochs", "6")
    found = metrics(teacher)["student"]
    assert list(found["dev"]) == ["RTE"]
    rows = [line.split("\t") for line in (teacher / "predictions/student/dev.tsv").read_text().splitlines()[1:]]
    assert found["score"] == pytest.approx(100 * sum(row[1] == row[2] for row in rows) / len(rows))
    assert found["score"] > found["chance"]
    assert logged(teacher, "step") == [8, 16, 24, 30], "four lines: six epochs of five steps"

    learns = ("--method", "kd", "--teacher.model", str(teacher / "student"), "--student.lora.rank", "2")
    one, two = finetune(settings, *learns), finetune(settings, *learns, "--teacher.sharding", "zero3", ranks=2)
    assert largest_difference(one, two) < 1e-4
    assert metrics(one)["teacher"]["dev"] == metrics(two)["teacher"]["dev"]


def test_two_ranks_learn_spans_as_one(finetune, tmp_path):
    encoder, cache = tmp_path / "encoder", tmp_path / "cache"
    tokenizer = AutoTokenizer.from_pretrained(locate("embedded:teacher"))
    save_bert(encoder, tokenizer.get_vocab(), initializer_range=0.3)
    tokenizer.save_pretrained(encoder)
    data = write_tasks(tmp_path / "questions", train=40, dev=13)
    settings = ("--student.model", str(encoder), "--data.task.dir", str(data), "--data.task.name", "squad2")
    settings += ("--data.max_length", "30", "--data.task.stride", "8", "--data.task.max_question_length", "8")
    settings += ("--train.epochs", "1", "--train.learning_rate", "3e-3", "--data.cache_dir", str(cache))
    learns = ("--method", "kd", "--teacher.model", str(finetune(settings) / "student"))
    one, two = finetune(settings, *learns), finetune(settings, *learns, "--teacher.sharding", "zero3", ranks=2)
    assert len(list((cache / "tasks").iterdir())) == 1, "the questions are tokenized once"
    # Some parameters shift all tokens alike, which changes no distribution over tokens: their gradient is rounding
    # alone, and Adam makes whole steps of it.
    shifts = r".*(key|layer\.1\.output\.LayerNorm|qa_outputs)\.bias"
    assert largest_difference(one, two, without=shifts) < 1e-5
    spans, odds = (
        [json.loads((run / f"predictions/teacher/dev/{name}.json").read_text()) for run in (one, two)]
        for name in ("spans", "null_odds")
    )
    assert spans[0] == spans[1]
    assert odds[0] == pytest.approx(odds[1], abs=1e-4)
    assert metrics(one)["teacher"]["dev"] == metrics(two)["teacher"]["dev"]
    assert metrics(one)["student"]["dev"].keys() == {"SQuAD2"}
    model = AutoModelForQuestionAnswering.from_pretrained(one / "student")
    assert type(model).__name__ == "BertForQuestionAnswering"


def written(run: Path, model: str) -> list[dict[str, object]]:
    lines = (run / f"predictions/{model}/dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_two_ranks_distil_and_write_questions_as_one_does(finetune, tmp_path):
    """The masked tokens' logits, and the attention of the last layer, which sees the source and the text so far."""
    save_bert(tmp_path / "encoder", TOKENS, hidden_size=32, intermediate_size=48, initializer_range=0.2)
    save_tokenizer(tmp_path / "encoder", TOKENS, marked=False)
    asked = []
    for name, place in itertools.product(NAMES, PLACES):  # a question asks for a name or a place, as the answer says
        context = f"{name} lives in {place}"
        asked.append(((context, f"who lives in {place}", name), (context, f"where does {name} live", place)))
    unanswered = ("anna lives in rome", "who lives in rome", "nobody")
    write_questions(tmp_path / "train-v1.1.json", unanswered, *itertools.chain(*asked))
    write_questions(tmp_path / "dev-v1.1.json", *itertools.chain(*asked[::3]))
    settings = ("--student.model", str(tmp_path / "encoder"), "--data.task.dir", str(tmp_path), "--data.max_length")
    settings += ("24", "--data.task.name", "question_generation", "--data.task.writing.max_length", "8")
    settings += ("--scoring.batch_size", "3", "--train.learning_rate", "1e-2")

    teacher = finetune(settings, "--train.epochs", "40")
    rows, found = written(teacher, "student"), metrics(teacher)["student"]
    assert len(rows) == 14
    assert sum(row["prediction"] in row["references"] for row in rows) >= 12, rows
    texts, references = [str(row["prediction"]) for row in rows], [row["references"] for row in rows]
    expected = text_metrics(["bleu4", "meteor", "rougeL"], texts, references)
    assert found["dev"]["QuestionGeneration"] == pytest.approx(expected)
    assert found["score"] == pytest.approx(expected["bleu4"])
    report = (teacher / "report.md").read_text()
    assert "1 training questions are skipped" in report
    assert "train-v1.1-0" in report, "the question whose answer is not in its context"
    assert "| QuestionGeneration BLEU-4 | QuestionGeneration METEOR | QuestionGeneration ROUGE-L |" in report

    learns = ("--method", "kd", "--also", "[minilm]", "--train.epochs", "2", "--teacher.model", f"{teacher}/student")
    one, two = finetune(settings, *learns), finetune(settings, *learns, "--teacher.sharding", "zero3", ranks=2)
    # No attention depends on the biases of the keys: their gradient is rounding, of which Adam makes whole steps.
    assert largest_difference(one, two, without=r".*key\.bias") < 1e-4
    for model in ("teacher", "student"):
        assert written(one, model) == written(two, model)
    assert written(one, "teacher") == written(teacher, "student")
