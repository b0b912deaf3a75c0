"""The table at the end of a run."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from llmdistill.report.pages import render
from llmdistill.report.samples import Sample
from llmdistill.report.table import fill_scores, finish_report, training_cost
from llmdistill.report.tables import TitledTable, print_table
from llmdistill.tasks.base import ScoreTable

MODELS = ("teacher", "untrained", "student")
RECORD = {"command": "c", "hardware": "h", "versions": {}, "finished": "f"}
PAGE = {"title": "t", "verdict": "", "bars": {}, "table": TitledTable("t", ["model"], []), "legend": "", "drawings": []}
PAGE |= {"labels": {}, "has_answers": False, "warnings": [], "kept": None, "record": RECORD, "distance": None}


def rouge_table(metrics):
    scored = {name: metrics[name] for name in MODELS if name in metrics}
    rows = {name: [f"{score:.1f}" for score in model["rougeL"].values()] for name, model in scored.items()}
    return ScoreTable(title="ROUGE-L", columns=["seen", "unseen", "skills"], rows=rows, legend="F1 of answers.")


@pytest.fixture
def metrics():
    def model(params, score):
        scores = {"seen": score, "unseen": score / 2, "skills": score / 3}
        return {"params": params, "rougeL": scores, "generation_tokens_per_second": 1234.5}

    training = {"tokens": 100, "tokens_per_second": 3585.2, "peak_memory_bytes": 5}
    facts = {"hardware": "1 rank", "versions": {"torch": "2.13.0"}, "decoding": "greedy"}
    facts |= {"command": "deepspeed llmdistill/train.py", "finished": "2026-11-21T00:00:00+00:00"}
    return {
        "teacher": model(1_220_224, 98.4),
        "untrained": model(521_152, 35.3),
        "student": model(521_152, 97.3),
        "warnings": [],
        "run": {"teacher_params": 1_220_224, "training": training, **facts},
    }


def test_report_is_markdown_and_json_with_what_the_weighting_measured(tmp_path, metrics):
    spectra = {f"layers.{layer}.q": {"shape": [8, 8], "costs": [[0, 2.0], [1, 1.0], [2, 0.5]]} for layer in (0, 1)}
    weighting = {"weighting": "gradients", "ranks": {"layers.0.q": 1, "layers.1.q": 2}, "spectra": spectra}
    (tmp_path / "weighting.json").write_text(json.dumps(weighting), encoding="utf-8")
    finish_report(tmp_path, metrics, rouge_table(metrics))
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    report = (tmp_path / "report.md").read_text()
    assert "\n|---|---:|---:|---:|---:|---:|---:|---:|\n" in report
    assert "| trained | 521,152 | 43% | 97.3 | 48.6 | 32.4 | 3,585 | 1,234 |" in report
    assert "`deepspeed llmdistill/train.py`" in report
    assert "Warning" not in report
    for name in ("ranks", "spectra"):
        assert f"]({name}.png)" in report
        assert (tmp_path / f"{name}.png").is_file()


def test_training_cost_sums_tokens_and_takes_the_median_speed_and_the_peak():
    assert training_cost([]) is None
    rows = [
        {"step": n, "tokens": 10 * n, "tokens_per_second": speed, "peak_memory_bytes": speed}
        for n, speed in enumerate([1, 100, 7], start=1)
    ]
    assert training_cost(rows) == {"tokens": 60, "tokens_per_second": 7, "peak_memory_bytes": 100}
    assert training_cost([*rows, {"step": 4, "valid_loss": 1.0}]) == training_cost(rows)


def test_a_run_without_a_set_to_score_on_shows_its_loss(tmp_path, metrics, capsys):
    costs = {"tokens": 5, "tokens_per_second": 9.0, "peak_memory_bytes": 1}
    losses = ((10, 2.0, 1.75), (20, 1.0, 1.25))
    trained = [{"step": step, "loss": loss, "valid_loss": valid, **costs} for step, loss, valid in losses]
    rows = [{"step": 0, "valid_loss": 3.5}, *trained]
    for name in MODELS:
        del metrics[name]["generation_tokens_per_second"]
    log = tmp_path / "metrics.jsonl"
    for kept, name, value in ((("valid_loss",), "validation loss", "1.25"), ((), "training loss", "1")):
        found = [{key: row[key] for key in row if key in kept or key != "valid_loss"} for row in rows]
        log.write_text("".join(json.dumps(row) + "\n" for row in found))
        table = ScoreTable(title="ROUGE-L", columns=[], rows={name: [] for name in MODELS}, legend="No test set.")
        finish_report(tmp_path, metrics, fill_scores(table, {}, found))
        report = (tmp_path / "report.md").read_text()
        assert f"| model | params | size | {name} |" in report
        assert f"| trained | 521,152 | 43% | {value} | 3,585 |" in report
        assert (tmp_path / "curves.png").is_file()
        printed = capsys.readouterr().out
        assert name in printed
        assert "gen tok/s" not in report + printed
        finish_report(tmp_path, {key: metrics[key] for key in ("warnings", "run")}, replace(table, rows={}))
        assert f"The {name} at the end is {value}." in capsys.readouterr().out


def test_a_run_without_a_set_to_score_on_shows_how_far_its_student_is_from_its_teacher(tmp_path, metrics, capsys):
    shared = {"teacher_perplexity": 5.77, "tokens": 892, "of": "held-out rows"}
    nearness = {
        "teacher": {"rougeL": 18.6},
        "untrained": {"divergence": 1.3208, "perplexity": 22.7, "rougeL": 16.3, **shared},
        "student": {"divergence": 1.0098, "perplexity": 16.3, "rougeL": 15.1, **shared},
    }
    empty = ScoreTable(title="ROUGE-L", columns=[], rows={name: [] for name in MODELS}, legend="No test set.")
    for name in MODELS:
        metrics[name] = {"params": metrics[name]["params"], "rougeL": {}}
    finish_report(tmp_path, metrics | {"nearness": nearness}, fill_scores(empty, nearness, [{"step": 1, "loss": 2.0}]))
    report, page = ((tmp_path / f"report.{kind}").read_text(encoding="utf-8") for kind in ("md", "html"))
    assert "| model | params | size | nats per token | perplexity | ROUGE-L | train tok/s |" in report
    assert "| teacher | 1,220,224 | 100% | 0 | 5.77 | 18.6 |  |" in report
    assert "| trained | 521,152 | 43% | 1.01 | 16.3 | 15.1 | 3,585 |" in report
    for text in (report, page):
        assert (
            "is 1.01 nats per token from its teacher, 1.32 before training, at a perplexity of 16.3 (teacher 5.77)."
            in text
        )
        assert "training loss" not in text
        assert "Distance from the teacher" not in text, "the first table has it"
    assert f"width:{100 * 1.0098 / 1.3208:.1f}%" in page
    assert "On 892 tokens of held-out rows" in capsys.readouterr().out


def test_beside_scores_the_distance_from_the_teacher_is_a_second_table(tmp_path, metrics):
    far = {"divergence": 0.25, "perplexity": 12.0, "teacher_perplexity": 10.0, "tokens": 9, "of": "data.valid"}
    metrics["nearness"] = {"student": far}
    finish_report(tmp_path, metrics, fill_scores(rouge_table(metrics), metrics["nearness"], []))
    report, page = ((tmp_path / f"report.{kind}").read_text(encoding="utf-8") for kind in ("md", "html"))
    assert "keeps 99% of its ROUGE-L" in report
    assert "## Distance from the teacher\n\n| model | nats per token | perplexity |" in report
    assert "\n| trained | 0.25 | 12.0 |\n" in report
    assert page.index("<h2>Scores</h2>") < page.index("<h2>Distance from the teacher</h2>")


def test_the_page_begins_with_what_the_student_keeps(tmp_path, metrics):
    metrics["run"]["about"] = {"Teacher": "a <big> one", "Data": "rows.jsonl"}
    finish_report(tmp_path, metrics, rouge_table(metrics))
    page, text = ((tmp_path / f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))
    mean = {name: sum(metrics[name]["rougeL"].values()) / 3 for name in MODELS}
    said = (
        f"keeps 99% of its ROUGE-L: {mean['student']:.1f} of {mean['teacher']:.1f}, and {mean['untrained']:.1f} before"
    )
    assert mean["student"] / mean["teacher"] == pytest.approx(0.99, abs=0.005)
    for written in (page, text):
        assert "43% of the teacher" in written
        assert 0 < written.index(said) < written.index("skills")
    places = [page.index(part) for part in ("<h1>", said, "<dd>a &lt;big&gt; one</dd>", "width:42.7%", "<h2>Scores")]
    assert places == sorted(places)
    table = replace(rouge_table(metrics), columns=["F1"], rows={"teacher": ["9"], "untrained": [""], "student": ["7"]})
    for name in MODELS:
        del metrics[name]["rougeL"]
    finish_report(tmp_path, metrics, table)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "the student has, in F1: trained 7, teacher 9." in page
    assert "width:" not in page.split("</style>")[1], "another score has no bars"


@pytest.mark.parametrize("models", range(1, 9))
def test_no_card_of_an_answer_stands_alone_in_the_last_row(models):
    answers = {f"m{n}": "answer" for n in range(models)}
    sample = Sample(set="set", prompt="prompt", reference="reference", answers=answers)
    page = render("run.html.j2", **PAGE, samples=[sample])
    columns = {int(most): int(count) for most, count in re.findall(r"--c(\d):(\d+);", page.split("</style>")[1])}
    cards = models + 1
    for most, count in columns.items():
        fitting = [n for n in range(1, min(most, cards) + 1) if n == 1 or cards % n != 1]
        rows = {n: -(-cards // n) for n in fitting}
        fewest = [n for n in fitting if rows[n] == min(rows.values())]
        assert count == min(fewest), "the fewest rows, and these as even as they can be"
    assert len(columns) == 4


def predict(folder, name, answers):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"instruction": f"Say {n} <b>|", "input": "", "references": [f"It is {n}"], "predictions": {"greedy": answer}}
        for n, answer in enumerate(answers)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_eight_prompts_have_the_answers_of_all_models_side_by_side(tmp_path, metrics):
    for name, count in (("seen", 100), ("unseen", 3), ("skills", 1)):
        for model in MODELS:
            said = ["It is 0" if n == 0 else f"{model} <script> " + "x" * 2000 for n in range(count)]
            predict(tmp_path / "predictions" / model, name, said)
    predict(tmp_path / "predictions" / "teacher", "valid", ["never shown"] * 9)
    metrics["asked"] = {"tests": dict.fromkeys(("seen", "unseen", "skills"), "a file")}
    finish_report(tmp_path, metrics, rouge_table(metrics))
    page, text = ((tmp_path / f"report.{kind}").read_text(encoding="utf-8") for kind in ("html", "md"))
    # Three places for each of two sets, two for the third, which has a single prompt.
    assert page.count('<div class="sample">') == text.count("| reference |") == 3 + 3 + 1
    assert all(page.count(f"<b>{name}") == 7 for name in ("reference", "teacher", "untrained", "trained"))
    assert all(f"Say {n} &lt;b&gt;|</div>" in page for n in (0, 33, 66))
    assert "<script>" not in page + text
    assert page.count("It is 0") == 3 * 4
    assert page.count("trained ✓") == 3 * 2, "untrained and trained are right about the first prompt of each set"
    assert "x" * 600 not in page + text
    assert "xxx …" in page
    assert "never shown" not in page + text
    before = page
    finish_report(tmp_path, metrics, rouge_table(metrics))
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before


@pytest.mark.parametrize("width", [28, 80])
def test_a_table_too_wide_is_turned(width):
    out, rows = io.StringIO(), [["teacher", "one", "70.1"], ["student of it", "two", "9.5"]]
    header = ["model", "stage", "RTE accuracy"]
    print_table("A title", header, rows, console=Console(file=out, width=width), transposed=True)
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert any(line.startswith("RTE") and line.endswith("9.5") for line in lines) == (width == 28), lines
