import math

import numpy as np
import pytest
from hostile import refuses

from llmdistill.config import DataConfig, RunConfig, TaskConfig
from llmdistill.data.pairs import EncodedPair, PairExample
from llmdistill.tasks.glue import GLUE_TASKS, Glue, GlueData, column_of, task_metrics, write_submission

pytestmark = pytest.mark.filterwarnings("error")


def test_binary_metrics_follow_their_formulas():
    dice = np.random.default_rng(0)
    targets = dice.integers(2, size=200)
    predictions = np.where(dice.random(200) < 0.7, targets, 1)  # leaning to 1, so that the classes are not alike
    cells = ((1, 1), (1, 0), (0, 1), (0, 0))
    tp, fp, fn, tn = (int(((predictions == said) & (targets == right)).sum()) for said, right in cells)
    accuracy, f1 = (tp + tn) / 200, 2 * tp / (2 * tp + fp + fn)
    matthews = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert task_metrics("MRPC", predictions, targets) == pytest.approx({"accuracy": 100 * accuracy, "f1": 100 * f1})
    assert task_metrics("QQP", predictions, targets) == pytest.approx({"accuracy": 100 * accuracy, "f1": 100 * f1})
    assert task_metrics("CoLA", predictions, targets) == pytest.approx({"matthews": 100 * matthews})
    assert task_metrics("RTE", predictions, targets) == pytest.approx({"accuracy": 100 * accuracy})
    assert task_metrics("MNLI", np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2])) == {"accuracy": 75}


def test_correlations_follow_their_formulas():
    dice = np.random.default_rng(0)
    targets = dice.integers(0, 26, size=60) / 5  # with ties, as in STS-B
    predictions = (np.exp(targets) + dice.normal(scale=9, size=60)).round().astype(np.float32)
    found = task_metrics("STS-B", predictions, targets)
    ranks = [(x[:, None] > x).sum(1) + (x[:, None] == x).sum(1) / 2 for x in (predictions, targets)]
    pearson, spearman = (100 * np.corrcoef(*pair)[0, 1] for pair in ((predictions, targets), ranks))
    assert found == pytest.approx({"pearson": pearson, "spearman": spearman})
    assert found["spearman"] > found["pearson"] + 5, "the data tell the two apart"


def test_what_is_undefined_counts_as_nothing():
    targets, scores = np.array([0, 1, 1]), np.array([0.0, 2.5, 5.0])
    for constant in (0, 1):
        assert task_metrics("CoLA", np.full(3, constant), targets) == {"matthews": 0}
        assert task_metrics("CoLA", targets, np.full(3, constant)) == {"matthews": 0}
    assert task_metrics("MRPC", np.zeros(3, dtype=int), np.zeros(3, dtype=int)) == {"f1": 0, "accuracy": 100}
    for broken in (np.full(3, 2.7), np.array([np.nan, 1, 2]), np.array([np.inf, 1, 2])):
        assert task_metrics("STS-B", broken, scores) == {"pearson": 0, "spearman": 0}
    nearly = np.array([1.0, 1.0, 1.0 + 1e-15])
    assert set(task_metrics("STS-B", nearly, scores)) == {"pearson", "spearman"}, "and no warning either"


def test_files_for_the_server(tmp_path):
    examples = [PairExample("a", "b", None, index) for index in (10, 9)]
    for task, split, predictions, name, texts in (
        ("CoLA", "test", [1, 0], "CoLA.tsv", ["0", "1"]),
        ("STS-B", "test", [5.2, -0.1], "STS-B.tsv", ["0.000", "5.000"]),
        ("STS-B", "test", [1.23456, 3], "STS-B.tsv", ["3.000", "1.235"]),
        ("MNLI", "test", [2, 0], "MNLI-m.tsv", ["entailment", "contradiction"]),
        ("MNLI", "test_mismatched", [1, 0], "MNLI-mm.tsv", ["entailment", "neutral"]),
    ):
        path = tmp_path / "new" / f"{column_of(task, split)}.tsv"
        write_submission(path, GLUE_TASKS[task], examples, np.array(predictions))
        assert path == tmp_path / "new" / name
        assert path.read_text() == f"index\tprediction\n9\t{texts[0]}\n10\t{texts[1]}\n"
    path, said = tmp_path / "wrong" / "STS-B.tsv", "STS-B: example 9: the predicted score is nan"
    refuses(said, write_submission, path, GLUE_TASKS["STS-B"], examples, np.array([1, np.nan]))
    assert not path.exists()


def test_the_steps_of_an_epoch_of_glue_learn_each_example():
    rows = [EncodedPair([1], None, 0, number) for number in range(10)]
    task = Glue(RunConfig(ds_config="", data=DataConfig(kind="task", task=TaskConfig(name="rte"))))
    data = GlueData(task=task, tokenizer=None, encoded={"train": rows}, meta={}, text=str, digest="")
    assert data.num_steps(1, 4) == 3
    assert data.num_steps(3, 4) == 9, "each epoch is rounded up"
