import pytest

from llmdistill.data.pairs import PairExample
from llmdistill.papers.fine_tuning.averages import CONVENTIONS
from llmdistill.papers.fine_tuning.results import compute_averages, results_table
from llmdistill.tasks.glue import GLUE, GLUE_TASKS, chance_score


def task(name, score, *, teacher=None):
    """Each metric is `score` plus its place in the task's list, each column after the first one 1 more."""
    named = GLUE_TASKS[name]
    columns = [f"{name}-m", f"{name}-mm"] if named.has_mismatched else [name]

    def dev(base, value):
        return {
            column: {metric: value(base + place + more) for place, metric in enumerate(named.metrics)}
            for more, column in enumerate(columns)
        }

    scores = dev(score, lambda mean: {"mean": mean, "std": 0.5})
    about = {"metric": named.metrics[0], "shown": list(named.metrics[:1]), "main_column": columns[0], "seeds": [0, 1]}
    taught = None if teacher is None else {"path": "t", "dev": dev(teacher, float), "score": teacher, "chance": 1.0}
    return {**about, "dev": scores, "teacher": taught}


SIZES = {"total": 22_713_216, "embedding": 11_720_448, "transformer": 10_646_784, "other": 345_984}


def results(tasks, *roles):
    speed = {role: {"speedup": 2.0} for role in [*roles, "model"]}
    params = dict.fromkeys([*roles, "model"], SIZES)
    shown = {"protocol": "custom", "limit": 200, "params": params, "speed": speed}
    return {**shown, "tasks": tasks, "averages": compute_averages(tasks)}


def every_task(**settings):
    return {name: task(name, 60 + place, **settings) for place, name in enumerate(GLUE)}


def test_averages_are_those_of_the_papers() -> None:
    tasks = every_task(teacher=90.0)
    found = compute_averages(tasks)
    values = {column: each for name in tasks for column, each in tasks[name]["dev"].items()}
    by_hand = [values[column][metric]["mean"] for column, metric in CONVENTIONS["makd"].items()]
    assert found["model"]["makd"]["glue"] == pytest.approx(sum(by_hand) / 9)
    assert found["model"]["makd"]["missing"] == []
    assert found["model"]["plain"] == pytest.approx(sum(range(60, 69)) / 9), "main metrics, MNLI's matched one"
    assert found["teacher"]["plain"] == 90.0
    assert "minilmv2_test" not in found["model"]
    assert "teacher" not in compute_averages({"RTE": task("RTE", 1.0)})


def test_the_average_is_called_by_what_it_is() -> None:
    without = "average (MiniLMv2's, without SQuAD 2.0)"
    for left_out, shown, convention in (("WNLI", "average (MaKD's)", "makd"), ("STS-B", without, "minilmv2")):
        found = results({name: each for name, each in every_task().items() if name != left_out})
        _, header, rows = results_table(found)
        assert rows[0][header.index(shown)] == f"{found['averages']['model'][convention]['glue']:.1f}"


def test_rows_of_baseline_teacher_and_model() -> None:
    tasks = {"RTE": task("RTE", 60.0, teacher=70.0), "MRPC": task("MRPC", 80.0, teacher=90.0)}
    _, header, rows = results_table(results(tasks, "baseline", "teacher"))
    sizes = ["params", "embedding", "transformer"]
    assert header == ["", *sizes, "RTE accuracy", "MRPC f1", "average of these 2", "speed-up"]
    counts = ["22,713,216", "11,720,448", "10,646,784"]
    assert rows == [
        ["baseline", *counts, "", "", "", "2.00x"],
        ["teacher", *counts, "70.0", "90.0", "80.0", "2.00x"],
        ["model", *counts, "60.0 ± 0.5", "80.0 ± 0.5", "70.0", "2.00x"],
    ]


def test_chance_is_the_best_single_answer() -> None:
    examples = [PairExample("a", "b", target, number) for number, target in enumerate((0, 1, 1, 1))]
    cases = (("RTE", "accuracy", 75), ("MRPC", "f1", 100 * 2 * 0.75 / 1.75), ("CoLA", "matthews", 0))
    for task, metric, chance in cases:
        assert chance_score(task, examples, metric) == pytest.approx(chance), task
