"""The report of a comparison: its numbers, its pages, and what it says of failures."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from llmdistill.report.comparison import comparison_report
from llmdistill.report.results import Comparison, ComparisonRow, Sample, describe_finding
from llmdistill.report.score import PERPLEXITY, ROUGE_L
from llmdistill.report.trials import TrialRow, entry_of
from llmdistill.report.weights_on_disk import Checkpoint

SETS = ["seen", "unseen"]
SCORES = {"sft": [(40.0, 30.0), (41.0, 32.5), (42.0, 31.0)], "makd": [(50.0, 30.0), (52.5, 31.0), (51.0, 32.5)]}
"""ROUGE-L by method, seed and set."""

CHECKPOINT = Checkpoint(size=2_097_152, formats={"F32": 500}, parts={"embeddings and head": 1500, "factors": 500})

COSTS = {"training_tokens_per_second": 123.0, "generation_tokens_per_second": 45.0}
COSTS |= {"peak_memory_bytes": 2**30, "seconds": 3725.0}
LOG = [{"step": 10 * n, "loss": 2.0 / n, "valid_loss": 3.0 / n, "a": 1.0 / n, "b": 5.0 / n} for n in (1, 2, 3)]

VOID = {"meta", "br", "link", "img"}


def make_run(method, seed, scores=None, *, score=ROUGE_L, valid=None, **more):
    values = {} if scores is None else {(name, score.key): value for name, value in zip(SETS, scores, strict=True)}
    values["valid", score.key] = 45.0 + seed if valid is None else valid
    if score is ROUGE_L:
        values["wikitext2", "perplexity"] = (30.0 if method == "sft" else 40.0) + seed
        if scores is not None:
            references = {"seen": 2.0 + seed, "unseen": 8.0 + 4 * seed}
            values |= {(name, "reference_perplexity"): value for name, value in references.items()}
    model = {"teacher": "teacher", "none": "untrained"}.get(method, "student")
    base = {
        "row": method,
        "title": method,
        "folder": f"cells/{method}-seed{seed}",
        "command": f"train {method} --seed {seed}",
        "settings": {"train.learning_rate": 0.003},
        "models": {model: entry_of(values, generation_tokens_per_second=COSTS["generation_tokens_per_second"])},
        "tokens": 1000 * (seed + 1) ** 2,
        "tokens_per_second": COSTS["training_tokens_per_second"],
        "peak_memory_bytes": COSTS["peak_memory_bytes"],
        "seconds": COSTS["seconds"],
    }
    return TrialRow(seed=seed, **{**base, **more})


def make_row(name, label, scores, score=ROUGE_L, **more):
    runs = [make_run(name, seed, values, score=score) for seed, values in enumerate(scores)]
    own = {"params": 500, "checkpoint": CHECKPOINT, "runs": runs, **more}
    logs = {run.folder: LOG for run in own["runs"]}
    return ComparisonRow(name=name, label=label, score=score, logs=logs, **own)


def sized(method, params):
    run = make_run(method, 0, (params / 10,) * 2, folder=f"cells/{params}")
    return make_row(method, f"rank {params}", [], params=params, runs=[run])


def make_comparison():
    tried = [
        make_run("makd", 0, folder="cells/low", valid=38.2, settings={"train.learning_rate": 0.001}),
        make_run("makd", 0, folder="cells/high", valid=45.0),
    ]
    return Comparison(
        title="Two methods",
        sets=SETS,
        examples={"seen": (20, 60), "unseen": (60, 60)},
        texts={"wikitext2": (24, 141)},
        rows=[
            make_row("teacher", "Teacher", [(80.0, 70.0)], params=1000),
            make_row("none", "Untrained", [(5.0, 4.0)]),
            make_row("sft", "SFT", SCORES["sft"]),
            make_row("makd", "MaKD", SCORES["makd"], trials=tried, terms=["a", "b"]),
        ],
        sizes=[sized(method, params) for method in ("sft", "makd") for params in (300, 500)],
        samples=[Sample(set="seen", prompt="Who?", reference="A cat ", answers={"teacher": " A cat", "makd": "A dog"})],
        warnings=["the teacher knows nothing"],
        facts={"Hardware": "a laptop"},
        paper={"makd": {"Dolly": 25.1}},
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The folder of the comparison as it is."""
    folder = tmp_path_factory.mktemp("report")
    comparison_report(folder, make_comparison()).write()
    return folder


def replace_row(comparison, name, **changes):
    rows = [dataclasses.replace(row, **changes) if row.name == name else row for row in comparison.rows]
    return dataclasses.replace(comparison, rows=rows)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a comparison without its plots; gives the text of a file."""
    monkeypatch.setattr("llmdistill.report.comparison.draw_comparison", lambda comparison: [])

    def write(comparison, name="report.html"):
        comparison_report(tmp_path, comparison).write()
        return (tmp_path / name).read_text(encoding="utf-8")

    return write


class Page(HTMLParser):
    """Tags in balance, every address, and the text of some classes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.tags, self.bold, self.correct = [], [], [], [], []
        self._classes = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.addresses += [value for key, value in attributes if key in ("href", "src", "xlink:href", "data")]
        if tag not in VOID:
            self.open.append(tag)
            self._classes.append((values.get("class") or "").split())

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag
            self._classes.pop()

    def handle_data(self, data):
        classes = {name for each in self._classes for name in each}
        if "best" in classes and "small" not in self.open:
            self.bold.append(data.strip())
        if "correct" in classes:
            self.correct.append(data)


def test_results_are_the_statistics_of_the_runs(report, capsys):
    results = json.loads((report / "results.json").read_text(encoding="utf-8"))
    assert results["sets"] == SETS
    assert list(results["methods"]) == ["teacher", "none", "sft", "makd"]
    for name, values in SCORES.items():
        table, method = np.array(values), results["methods"][name]
        for index, each in enumerate(SETS):
            assert method["rougeL"][each]["mean"] == pytest.approx(table[:, index].mean())
            assert method["rougeL"][each]["std"] == pytest.approx(table[:, index].std(ddof=1))
        assert method["rougeL"]["average"] == pytest.approx(table.mean())
        assert method["average_std"] == pytest.approx(table.mean(axis=1).std(ddof=1))
        assert method["difference_to_teacher"] == pytest.approx(table.mean() - 75.0)
        assert method["seeds"] == [0, 1, 2]
        assert method["valid_rougeL"] == pytest.approx(46.0)
    teacher = results["methods"]["teacher"]
    assert teacher["difference_to_teacher"] == 0
    assert teacher["average_std"] is teacher["rougeL"]["seen"]["std"] is teacher["perplexity"]["std"] is None
    # Costs are medians over seeds.
    costs = json.loads((report / "costs.json").read_text(encoding="utf-8"))
    held = {"bytes": 2_097_152, "formats": {"F32": 500}, "parts": {"embeddings and head": 1500, "factors": 500}}
    checkpoint = {f"checkpoint_{name}": value for name, value in held.items()}
    assert costs["sft"] == {"params": 500, "training_tokens": 4000, **checkpoint, **COSTS}
    comparison_report(report, make_comparison()).print(Console(width=200))
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["teacher"])
    assert printed.split() == ["teacher", "75.0", "–", "4.00", "80.0", "70.0", "40.0", "1,000"]


def test_two_writes_give_equal_bytes_and_plots_of_an_earlier_report_do_not_stay(report, tmp_path):
    (tmp_path / "plots").mkdir()
    for name in ("mine.png", "terms_sft.png", "ranks_loss.svg"):
        (tmp_path / "plots" / name).write_bytes(b"")
    comparison_report(tmp_path, make_comparison()).write()
    (tmp_path / "plots" / "mine.png").unlink()
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    plots = ("scores", "learning_curves", "terms_makd", "size", "perplexity_wikitext2", "perplexity_size_wikitext2")
    assert {str(file) for file in files} == {
        *("results.json", "costs.json", "report.md", "report.html"),
        *(f"plots/{name}.{kind}" for name in plots for kind in ("png", "svg")),
    }
    for file in files:
        assert (tmp_path / file).read_bytes() == (report / file).read_bytes(), file


def test_page_stands_alone_and_only_the_best_method_is_bold(report):
    text = (report / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("svg") == 6
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert not re.search(r"https?:|//\w|@import|url\((?!#)", text)
    assert {"cells/makd-seed0", "cells/makd-seed2", "cells/low", "cells/300"} <= set(page.addresses)
    for address in page.addresses:
        assert address.startswith(("#", "cells/")), address
    assert "<code>train makd --seed 2</code>" in text
    for said in ("the teacher knows nothing", "a laptop", "25.1"):
        assert said in text
    assert "Teacher ✓" in page.correct
    assert not any("dog" in text for text in page.correct)
    # Only the best method is bold, and ties are all: both are 31.2 on the second set. The teacher is better everywhere,
    # and the chosen grid point's score is bold, too. Of perplexities the lowest is the best.
    assert [text for text in page.bold if text] == ["31.2", "31.0", "41.2", "−33.8", "51.2", "31.2", "45.0"]
    text = (report / "report.md").read_text(encoding="utf-8")
    assert "**[51.2](cells/makd-seed0)** ± 1.3" in text
    assert "**[41.0]" not in text
    assert "**[80.0]" not in text


def test_text_of_users_is_escaped(tmp_path, written):
    attack = "<script>alert(1)</script>|\n* x"
    sample = Sample(set="seen", prompt=attack, reference=attack, answers={"makd": attack})
    run = make_run("sft", 0, (1.0, 2.0), command=f'x "{attack}', folder="javascript:alert(1)")
    attacked = replace_row(make_comparison(), "sft", label=attack, runs=[run], terms=["a", "b"])
    about = {"title": attack, "facts": {attack: attack}, "warnings": [attack]}
    page = Page(written(dataclasses.replace(attacked, samples=[sample], **about)))
    assert "script" not in page.tags
    assert "javascript:alert(1)" not in page.addresses
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    outside_code = re.sub(r"`[^`\n]*`", "", report)
    assert "<script" not in outside_code
    tables = [line for line in report.splitlines() if line.startswith("| ") and "alert" in line]
    assert len(tables) > 3
    assert all(line.rstrip().endswith("|") for line in tables)


def test_what_failed_is_there_with_its_reason_and_does_not_lose_the_rest(tmp_path, written):
    ended = [make_run("makd", seed, SCORES["makd"][seed]) for seed in (0, 2)]
    partly = make_run("makd", 1, error=f"it broke (exit code 1, log {tmp_path}/cells/makd.log)")
    wholly = [make_run("sft", seed, error=f"no memory {seed}") for seed in range(2)]
    size = make_run("makd", 0, error="rank 99 is too large", folder="cells/size")
    failed = replace_row(replace_row(make_comparison(), "makd", runs=[ended[0], partly, ended[1]]), "sft", runs=wholly)
    failed = dataclasses.replace(failed, sizes=[*failed.sizes, make_row("makd", "rank 99", [], runs=[size])])
    text = written(failed, "results.json")
    assert str(tmp_path) not in text
    makd, sft = (json.loads(text)["methods"][name] for name in ("makd", "sft"))
    assert makd["seeds"] == [0, 2]
    assert makd["rougeL"]["seen"]["mean"] == pytest.approx(50.5)
    reason = "it broke (exit code 1, log cells/makd.log)"
    assert makd["failed"] == [{"seed": 1, "folder": "cells/makd-seed1", "error": reason}]
    assert sft["rougeL"] is sft["difference_to_teacher"] is None
    assert [item["error"] for item in sft["failed"]] == ["no memory 0", "no memory 1"]
    for name in ("report.html", "report.md"):
        page = (tmp_path / name).read_text(encoding="utf-8")
        for said in ("it broke (exit code 1", "no memory 1", "1 failed", "rank 99 is too large"):
            assert said in page


def on_text():
    """By the arithmetic mean of its texts MaKD is ahead of SFT, by the geometric mean SFT of MaKD."""
    scores = {"teacher": [(20.0, 5.0)], "none": [(4e6, 900.0)]}
    scores |= {"sft": [(32.0, 8.0), (32.0, 8.0)], "makd": [(27.0, 12.0), (27.0, 12.0)]}
    more = {"score": PERPLEXITY, "valid": 25.0}
    rows = []
    for name, found in scores.items():
        runs = [make_run(name, seed, values, **more) for seed, values in enumerate(found)]
        trials = [make_run(name, 0, **more)] if name == "sft" else []
        about = {"score": PERPLEXITY, "params": 500, "trials": trials}
        rows.append(ComparisonRow(name=name, label=name.upper(), runs=runs, **about))
    return Comparison(title="On text", sets=SETS, examples={"seen": (9, 60), "unseen": (9, 9)}, rows=rows, sizes=rows)


def test_of_perplexities_the_lowest_is_the_best_everywhere(tmp_path, capsys, written):
    text = written(on_text(), "report.md")
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    sft, makd = (results["methods"][name] for name in ("sft", "makd"))
    assert (sft["perplexity"]["average"], makd["perplexity"]["average"]) == pytest.approx((16.0, 18.0))
    assert (sft["difference_to_teacher"], sft["valid_perplexity"]) == pytest.approx((6.0, 25.0))
    assert results["windows"]["seen"] == {"scored": 9, "total": 60}
    assert "SFT leads the next best, MAKD, by 2.00 points of perplexity on the average of 2 sets" in text
    assert "seen (perplexity, 9 of 60 windows)" in text
    bold = re.findall(r"\*\*\[(.+?)\]", text)
    assert bold == ["16.0", "+6.00", "8.00", "27.0"]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [each for each in Page(page).bold if each] == ["16.0", "+6.00", "8.00", "27.0", "25.0"]
    assert "ROUGE" not in text + page
    comparison_report(tmp_path, on_text()).print(Console(width=200))
    printed = capsys.readouterr().out
    assert ["sft", "16.0", "±", "0.00", "+6.00", "32.0", "±", "0.00", "8.00", "±", "0.00", "500"] in map(
        str.split, printed.splitlines()
    )


def finding(score=ROUGE_L, **scores):
    rows = [(name, [(value, value) for value in values]) for name, values in scores.items()]
    return describe_finding([make_row(name, name.upper(), values, score=score) for name, values in rows], SETS)


def test_finding_is_a_lead_only_over_the_standard_error():
    kd, makd = [40.0, 42.0, 44.0], [48.0, 49.0, 50.0]
    error = np.sqrt(np.var(kd, ddof=1) / 3 + np.var(makd, ddof=1) / 3)
    lead = "MAKD leads the next best, KD, by 7.0 points on the average of 2 sets"
    assert finding(sft=[1.0, 2.0], kd=kd, makd=makd) == f"{lead} (standard error of the difference {error:.1f})."
    close = "No method is ahead beyond one standard error: MAKD is 0.7"
    assert finding(kd=kd, makd=[43.0, 42.0, 43.0]).startswith(close)
    assert finding(kd=kd, makd=kd).startswith("No method is ahead")


def test_finding_is_honest_about_one_seed_and_no_gain():
    assert "from one seed" in finding(kd=[40.0], makd=[50.0])
    assert finding(none=[60.0], kd=[40.0, 41.0], makd=[50.0, 51.0]) == (
        "No method is above the untrained student: the best, MAKD, is 9.5 points below it on the average of 2 sets."
    )
    assert finding(teacher=[60.0], none=[5.0], kd=[40.0]) == (
        "KD reaches 40.0 on the average of 2 sets, 20.0 points below the teacher, "
        "35.0 points above the untrained student."
    )


def test_finding_knows_that_a_lower_perplexity_is_better():
    def of(**scores):
        return finding(score=PERPLEXITY, **{name: [value] for name, value in scores.items()})

    where = "on the average of 2 sets"
    assert of(sft=20.0, kd=16.0).startswith(f"KD is 4.00 points of perplexity below the next best, SFT, {where};")
    assert of(none=15.0, sft=20.0, kd=16.0) == (
        f"No method is below the untrained student: the best, KD, is 1.00 points of perplexity above it {where}."
    )
    below = "6.00 points of perplexity above the teacher, 884 points of perplexity below the untrained student."
    assert of(teacher=10.0, none=900.0, kd=16.0) == f"KD reaches 16.0 {where}, {below}"
