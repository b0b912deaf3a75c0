"""A published table beside our own figures: what runs, what is missing, and the pages."""

import json
from dataclasses import replace

import pytest
from transformers import BertConfig

from llmdistill.cli import main
from llmdistill.papers.published import Measured, PublishedReport, draw_rows, published_report
from llmdistill.papers.table_study import TableStudy
from llmdistill.report.paper import Column, PublishedTable, TableRow

COLUMNS = (
    Column(label="SQuAD 2.0 F1", column="SQuAD2", metric="best_f1"),
    Column(label="MRPC", column="MRPC", metric="accuracy", on_server=True),
)
MINE = Measured(
    folder="runs/t/tasks/mine",
    model="runs/t/trials/mine/student",
    scores={("SQuAD2", "best_f1"): [70.0, 72.0], ("MRPC", "accuracy"): [80.0], ("MRPC", "f1"): [1.0]},
    params=1234,
    settings={"MRPC": {"learning_rate": 2e-5, "epochs": 3, "seeds": [1]}},
    warnings=["the teacher scores at chance"],
    seconds=61.0,
    tuning_seconds=30.0,
)
TABLE = PublishedTable(
    name="t",
    title="A table",
    tasks=("squad2", "mrpc"),
    columns=COLUMNS,
    average=True,
    rows=(
        TableRow(name="teacher", label="Teacher", published=(76.8, 87.25, 82.0)),
        TableRow(name="mine", label="Mine <6x768>", published=(76.4, None, None)),
        *(TableRow(name=name, label=name.title(), published=(1.0, 2.0, 1.5)) for name in ("half", "broken")),
        TableRow(name="theirs", label="Theirs", published=(1.0, 2.0, 1.5), missing="no weights are published"),
    ),
)
MEASURED = {
    "mine": MINE,
    "half": Measured(folder="f", scores={("MRPC", "accuracy"): [9.0]}),
    "broken": Measured(folder="f", error="no memory"),
}
REPORT = PublishedReport(table=TABLE, measured=MEASURED, facts={"Command": "llmdistill compare"})


def test_our_figures_stand_beside_the_paper_s(tmp_path, capsys):
    results = published_report(tmp_path, REPORT).write()
    figures = {row["key"]: row["measured"] and row["measured"]["figures"] for row in results["rows"]}
    assert [each["mean"] for each in figures["mine"]] == [71.0, 80.0, 75.5]
    assert figures["mine"][0]["std"] == pytest.approx(2**0.5)
    assert [each and each["mean"] for each in figures["half"]] == [None, 9.0, None]  # no average of a part
    assert figures["broken"] == [None, None, None]
    assert figures["teacher"] is None
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| Mine &lt;6x768&gt; | 75.5  | –  | 71.0 ± 1.4 (76.4) | 80.0  | 1,234 |" in text
    assert "| Teacher | (82.0) |  | (76.8) | (87.25) | – |" in text
    assert "Failed: Broken: no memory" in text
    assert "| Theirs | (1.5) | (−80.5) | (1.0) | (2.0) | – |" in text
    taught = replace(MINE, scores={key: [90.0] for key in MINE.scores})
    published_report(tmp_path / "taught", replace(REPORT, measured={**MEASURED, "teacher": taught})).write()
    assert "| 75.5  | −14.5  | 71.0" in (tmp_path / "taught/report.md").read_text(encoding="utf-8")
    assert "71.0 ± 1.4<br><small>76.4</small>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    published_report(tmp_path, REPORT).print()
    assert "71.0 ± 1.4 (76.4)" in capsys.readouterr().out


def test_scores_are_drawn_over_the_numbers_of_the_rows() -> None:
    published = {("A", 6): 79.0, ("A", 3): None, ("A", 9): 78.0, ("B", 3): None}
    rows = [
        TableRow(name=f"{line}{at}", label="l", published=(figure,), at=at, line=line)
        for (line, at), figure in published.items()
    ]
    scores = {"A6": [80.0, 82.0], "A3": [70.0], "B3": [60.0]}
    measured = {key: Measured(folder="f", scores={("MRPC", "accuracy"): each}) for key, each in scores.items()}
    table = PublishedTable(name="t", title="T", tasks=("mrpc",), columns=COLUMNS[1:], rows=tuple(rows), axis="layer")
    report = PublishedReport(table=table, measured=measured, facts={})
    (drawing,) = draw_rows(report)
    (panel,) = drawing.figure.axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines}
    assert drawn == {"A, ours": ([3, 6], [70.0, 81.0]), "A, paper": ([6, 9], [79.0, 78.0]), "B, ours": ([3], [60.0])}
    band = {tuple(point) for point in panel.collections[0].get_paths()[0].vertices}
    assert band == {(3, 70.0), (6, 80.0), (6, 82.0)}
    assert panel.get_yscale() == "linear", "scores are never on a logarithm"
    assert draw_rows(replace(report, table=replace(table, rows=[replace(each, at=None) for each in rows]))) == []


@pytest.fixture
def teacher(tmp_path):
    """A teacher that is nothing but a config, with a vocabulary."""
    folder = tmp_path / "teacher"
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]), encoding="utf-8")
    (tmp_path / "text.txt").write_text("a b c", encoding="utf-8")
    (tmp_path / "glue" / "RTE").mkdir(parents=True)
    return folder


def plan(capsys: pytest.CaptureFixture[str], *words: str, suite: str = "minilm-table2") -> dict:
    assert main(["compare", "--suite", suite, *words, "--dry_run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_dry_run_names_what_is_missing(capsys, teacher, tmp_path):
    own = ("--rows", "teacher,minilm", "--teacher.model", str(teacher), "--tasks.names", "rte,sst2")
    found = plan(capsys, *own)
    assert list(found["rows"]) == ["teacher", "minilm"]
    # The row of the recipes' own teacher is that of the user's.
    assert found["rows"]["teacher"]["model"] == str(teacher)
    assert found["rows"]["minilm"]["model"].startswith("runs/minilm-table2/trials/minilm-6x768-seed0-")
    assert found["fine_tunings"] == {"RTE": 4 * 4 * 4, "SST-2": 4 * 3 * 4}  # MiniLM's protocol
    assert len(found["missing"]) == 1
    assert found["missing"][0].startswith("corpus/train.txt: no such file")
    own = (*own, "--data.train", str(tmp_path / "text.txt"), "--tasks.data_dir", str(tmp_path / "glue"))
    (missing,) = plan(capsys, *own)["missing"]
    assert missing.startswith(f"tasks.data_dir {tmp_path / 'glue'}: it has no folder SST-2")
    last = plan(capsys, *own, "--tasks.names", "rte", "--tasks.seeds", "7")
    assert (last["missing"], last["fine_tunings"]) == ([], {"RTE": 16})


def test_sets_of_other_data_are_checked_before_the_first_run(capsys, teacher, tmp_path):
    own = ("--rows", "teacher", "--teacher.model", str(teacher))
    found = plan(capsys, *own, suite="kroneckerbert-table9")
    assert found["missing"] == []  # the three sets are on the hub
    assert (list(found["fine_tunings"]), found["out_of_domain"]) == (["MRPC", "SST-2", "RTE"], ["PAWS", "IMDb", "HANS"])
    mine = {"PAWS": {"data": "paws/dev.tsv"}, "IMDb": {"data": "imdb.jsonl", "labels": {"0": "neg"}}, "HANS": {}}
    own = (*own, "--tasks.out_of_domain", json.dumps(mine))
    missing = plan(capsys, *own, suite="kroneckerbert-table9")["missing"]
    assert len(missing) == 2
    assert missing[0].startswith("paws/dev.tsv: no such file")
    assert "IMDb.labels is {'0': 'neg'}: give a label of the set for each class of SST-2, which are 0, 1" in missing[1]
    # A set of a task that is not asked for is not needed.
    assert plan(capsys, *own, "--tasks.names", "rte", suite="kroneckerbert-table9")["missing"] == []


def test_the_tasks_are_read_before_hours_of_distillation(monkeypatch, capsys, teacher, tmp_path):
    good = "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n"
    for name, text in (("train", good), ("dev", good + "1\ta\tb\tmaybe\n")):
        (tmp_path / f"glue/RTE/{name}.tsv").write_text(text, encoding="utf-8")
    monkeypatch.setattr(TableStudy, "conduct", lambda study: pytest.fail("it began"))
    words = ("--suite", "minilm-table2", "--rows", "minilm", "--teacher.model", str(teacher), "--tasks.names", "rte")
    words += ("--data.train", str(tmp_path / "text.txt"), "--tasks.data_dir", str(tmp_path / "glue"))
    assert main(["compare", *words, "--output_dir", str(tmp_path / "out")]) == 2
    assert "dev.tsv:3: label 'maybe'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


NOWHERE = ("--teacher.model", "nowhere/at/all", "--tasks.data_dir", "nowhere")


def test_mistakes(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for arguments, said in (
        (["--rows", "teacher,minlm"], "no row 'minlm' in this table; did you mean minilm? (there are teacher, bert"),
        (["--recipe", "minilm/6x384"], "--recipe: each row of a published table has its own"),
        (["--methods", "kd"], "--suite and --methods both say what is compared"),
        (["--seeds", "2"], "--seeds is for comparisons of decoders"),
        (["--suite", "minilm-table10", "--tasks.names", "rte"], "nothing is fine-tuned for minilm-table10"),
        (["--rows", "teacher", *NOWHERE], "nowhere/at/all: no such folder"),
        (["--rows", "minilm", *NOWHERE, "--tasks.names", "rte"], "3 things are missing for the table: (1) "),
    ):
        assert main(["compare", "--suite", "minilm-table2", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
