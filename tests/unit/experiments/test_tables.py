"""The published tables: their figures, and that every row names something that exists here."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import pytest

from llmdistill.config import RunConfig
from llmdistill.config.command_line import changed, recipe_names
from llmdistill.config.tasks import ProtocolName
from llmdistill.experiments import chunks
from llmdistill.experiments.tables import load_table, table_names
from llmdistill.experiments.variants import load_suite
from llmdistill.methods import METHODS
from llmdistill.report.paper import PublishedTable
from llmdistill.tasks import task_key
from llmdistill.tasks.glue_files import GLUE, GLUE_TASKS, column_of
from llmdistill.tasks.out_of_domain import known_sets
from llmdistill.tasks.squad_metrics import LANGUAGES

ROOT = Path(__file__).resolve().parents[3]
TABLES = [load_table(name) for name in table_names()]

XNLI = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
SUMMARY = {"rouge1", "rouge2", "rougeL"}
COLUMNS: dict[str, dict[str, set[str]]] = {
    "squad1": {"SQuAD1": {"f1", "em"}},
    "squad2": {"SQuAD2": {"best_f1", "best_em", "f1", "em"}},
    "mlqa": {column: {"f1", "em"} for column in ("MLQA", *(f"MLQA-{language}" for language in LANGUAGES))},
    "xnli": {column: {"accuracy"} for column in ("XNLI", *(f"XNLI-{language}" for language in XNLI))},
    "questiongeneration": {"QuestionGeneration-test": {"bleu4", "meteor", "rougeL"}},
    "cnndailymail": {"CNN-DailyMail-test": SUMMARY},
    "xsum": {"XSum-test": SUMMARY},
    **{
        task.hub: {column_of(title, split): set(task.metrics) for split in ("dev", "dev_mismatched")}
        for title, task in ((title, GLUE_TASKS[title]) for title in GLUE)
    },
}
"""Task -> column -> metrics."""

SECTIONS: dict[str, Any] = {
    **vars(RunConfig()),
    **{name: method.settings() for name, method in METHODS.items() if method.settings is not None},
}
"""The sections of a run's configuration that rows change."""


def test_rows_name_what_exists() -> None:
    for row in (row for table in TABLES for row in table.rows):
        assert sum(each is not None for each in (row.recipe, row.model, row.missing)) == 1, row.name
        assert row.recipe is None or row.recipe in recipe_names()
        assert row.model is None or re.fullmatch(r"[\w-]+/[\w.-]+", row.model)
        assert row.recipe is not None or not row.settings
        sections: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, value in row.settings.items():
            section, _, setting = key.partition(".")
            sections[section][setting] = value
        assert sections.pop("method", {"": "makd"})[""] in METHODS
        for section, values in sections.items():
            # Raises UserError for an unknown key, or a value that does not fit.
            changed(SECTIONS[section], values, key=section)


def test_columns_are_those_of_the_tasks_and_rows_have_a_figure_for_each() -> None:
    for table in TABLES:
        assert bool(table.tasks) != bool(table.suite)
        assert table.suite in (None, chunks.SUITE.name)
        assert (table.protocol is None) == (not table.tasks)
        assert table.protocol in (None, *get_args(ProtocolName))
        columns = [(each.column, each.metric) for each in table.columns]
        assert len(set(columns)) == len(columns)
        # A set of other data has a column of its own, and is scored by the models of one of the tasks.
        further = {column: known_sets()[column]["task"] for column in table.out_of_domain}
        tasks = {**{column: task for task in table.tasks for column in COLUMNS[task]}, **further}
        metrics = {column: all_ for task in table.tasks for column, all_ in COLUMNS[task].items()}
        metrics |= {column: {"accuracy"} for column in further}
        assert set(further) <= {column for column, _ in columns}
        if table.tasks:
            assert all(metric in metrics[column] for column, metric in columns)
            owners = [task_key(tasks[column]) for column, _ in columns]
            assert list(dict.fromkeys(owners)) == list(table.tasks), "the tasks are in the order of their columns"
        # SQuAD 2.0 is on no server of GLUE's.
        assert len({each.on_server for each in table.columns if each.column != "SQuAD2"}) == 1
        assert not any(each.on_server for each in table.columns if each.column == "SQuAD2")
        assert all(len(row.published) == len(columns) + table.average for row in table.rows)
        assert len({row.label for row in table.rows}) == len(table.rows)
        known = [row.published for row in table.rows if set(row.published) != {None}]
        assert len(set(known)) == len(known), "two rows have the same figures"
        # Of the figures that draw scores, the text at hand has no numbers for most rows.
        assert (len(known) == len(table.rows)) == ("-figure" not in table.name)


def means_of(table: PublishedTable) -> list[tuple[int, list[int]]]:
    """The columns that are means of other columns, by their positions: the average, and a task's over its languages."""
    means = [(len(table.columns), list(range(len(table.columns))))] if table.average else []
    for at, mean in enumerate(table.columns):
        parts = [
            index
            for index, each in enumerate(table.columns)
            if each.metric == mean.metric and each.column.startswith(f"{mean.column}-")
        ]
        means += [(at, parts)] if parts else []
    return means


def test_averages_are_the_means_of_their_columns() -> None:
    """So that a mistyped figure is found. The rows of which it is not true in the paper say so."""
    checked = 0
    for table in TABLES:
        noted = {row.name for row in table.rows if row.average_note is not None}
        for at, parts in means_of(table):
            for row in table.rows:
                figures = [row.published[part] for part in parts]
                mean = fmean(figure for figure in figures if figure is not None)
                assert None not in figures
                if row.published[at] == pytest.approx(mean, abs=0.0501):
                    continue
                assert row.average_note == f"the mean of the columns is {mean:.2f}", f"{table.name}, {row.name}"
                noted.remove(row.name)
            checked += len(table.rows)
        assert not noted, f"{table.name}: the averages of {noted} are the means"
    assert checked == 107


PAPERS = {
    "kroneckerbert-table3": "83.9 83.4 93.4 87.9 52.8 71.1 90.9 67 85.2 / 76.4 75.2 84.7 84.9 - - - - -"
    " / 75.8 76.1 84.0 - - 67.4 75.1 - - / 81.3 80.1 88.4 87.1 28.3 70.5 86.1 64.7 81.3",
    "kroneckerbert-table5": "80.5 88 74.5 77.7 / 70.1 79.5 60.8 64.6 / 72.7 82.1 68.2 71.8 / 78.1 86.3 70.4 73.8"
    " / 70.7 80.5 66.9 69.3",
    "kroneckerbert-table6": "82.8 91.0 87.5 / 80.7 86.6 70.8 / 80.0 88.8 86.5",
    "kroneckerbert-table9": "61.3 88.0 50.7 / 61.3 78.5 51.2 / 61.4 86.5 50.4",
    "minilm-table5": "72.4 82.2 91.0 / 71.0 80.9 89.9 / 69.4 80.3 90.2 / 67.5 79.0 89.2"
    " / 66.2 78.8 89.3 / 64.2 77.8 88.3",
    "minilm-table6": "72.4 82.2 91.0 / 71.4 82.0 90.8 / 69.4 80.3 90.2 / 68.3 80.1 89.9"
    " / 66.2 78.8 89.3 / 65.5 78.4 89.3",
    "minilm-table7": "72.4 82.2 91.0 / 71.6 81.8 90.6 / 69.4 80.3 90.2 / 67.6 79.9 89.6"
    " / 66.2 78.8 89.3 / 64.8 77.7 88.6",
    "minilm-table8": "66.3 / 70.7 / 74.5 / 71.1 / 68.0",
    "minilm-table9": "57.7 41.6 / 61.6 43.5 / 62.9 45.7 / 64.9 46.9 / 63.2 44.7 / 53.7 36.6",
    "minilm-table10": "38 37 35 30 24 20 16 18 19 / 45 49 46 47 37 36 - - -",
    "minilm_v1-table9": "15.16 19.12 - / 18.37 22.65 46.68 / 22.78 25.49 51.57 / 21.07 24.09 49.14 / 20.31 23.43 48.21"
    " / 16.38 20.25 44.48 / 20.76 24.20 48.91 / 24.32 26.10 52.69 / 23.27 25.15 50.60 / 22.01 24.24 49.51",
    "minilm_v1-table10": "40.42 17.62 36.67 16.30 1.60 11.95 / 39.53 17.28 36.38 28.10 8.02 21.72"
    " / 41.22 18.68 38.34 - - - / 43.08 20.43 40.34 - - - / 44.16 21.28 40.90 45.14 22.27 37.25"
    " / 43.52 21.55 40.69 - - - / 42.12 19.50 39.01 39.75 17.24 31.95 / 41.72 19.39 38.76 38.76 16.33 31.15"
    " / 42.05 20.34 39.40 - - - / 42.66 19.91 39.73 40.43 17.72 32.60 / 41.57 19.21 38.64 38.79 16.39 31.10",
    "minilmv2-table3": "76.8 84.5 91.7 91.3 68.6 93.2 87.3 58.9 89.5 / 83.7 87.6 92.8 91.9 78.7 94.8 90.2 63.6 91.2"
    " / 81.8 86.5 92.6 91.6 76.4 93.3 89.2 62.3 90.5 / 86.6 89.4 94.0 91.8 83.1 95.9 91.2 65.0 91.3",
    "minilmv2-table8": "82.8 74.5 / 82.9 75.0 / 83.0 74.9 / 83.4 75.7 / 81.9 71.9 / 82.2 72.8 / 82.2 72.7 / 82.4 73.0",
    "minilmv2-table10": "72.9 82.8 91.3 / 73.3 82.8 91.6 / 74.3 83.0 91.1 / 74.7 83.2 92.4 / 76.4 84.4 92.0"
    " / 76.0 84.4 92.1 / 76.3 84.2 92.4 / 76.8 84.4 92.3 / 77.7 85.0 92.5 / 78.1 85.2 92.5 / 81.6 87.0 94.5"
    " / 81.2 87.3 94.1",
    "minilmv2-figure2a": "72.9 82.8 91.3",
    "minilmv2-figure2b": "74.3 83.0 91.1",
    "minilmv2-figure2c": "69.1",
}
"""The figures of the tables without means, read from the papers: rows between slashes, x 100."""


def test_tables_without_averages_have_the_papers_figures() -> None:
    """So that a mistyped figure is found there too."""
    without = [table for table in TABLES if not means_of(table)]
    assert {table.name for table in without} == PAPERS.keys()
    for table in without:
        rows = [row.split() for row in PAPERS[table.name].split("/")]
        figures = [tuple(None if figure == "-" else float(figure) for figure in row) for row in rows]
        assert [row.published for row in table.rows if set(row.published) != {None}] == figures, table.name


@pytest.mark.parametrize("name", ["makd-table3", "makd-table4"])
def test_ablations_of_an_encoder_are_those_of_a_decoder(name: str) -> None:
    def compared(settings: dict[str, Any]) -> dict[str, Any]:
        own = {"makd.matrix_layers": "lower", "makd.layer_layers": "upper", **settings}
        return {key: value for key, value in own.items() if key not in ("method", "makd.ffn_gate")}

    decoder = [compared(dict(variant.settings)) for variant in load_suite(f"{name}-decoder").variants]
    assert [compared(dict(row.settings)) for row in load_table(name).rows] == decoder


def test_recipes_page_lists_every_table() -> None:
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| [^|]* \| `([a-z_0-9]+-(?:table|figure)\d+[a-z]?)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted([*table_names(), "makd-table5"])
