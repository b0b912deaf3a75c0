"""The published tables: their figures, and that every row names something that exists here."""

import re
from pathlib import Path
from statistics import fmean
from typing import get_args

import pytest
import yaml

from llmdistill.config.command_line import config_of, recipe_names
from llmdistill.config.tasks import ProtocolName
from llmdistill.methods import METHODS
from llmdistill.papers import phrases
from llmdistill.report.paper import load_table, table_names
from llmdistill.studies.variants import load_method_table
from llmdistill.tasks import task_key
from llmdistill.tasks.glue import GLUE, GLUE_TASKS, column_of
from llmdistill.tasks.out_of_domain import KNOWN_SETS
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


def test_rows_name_what_exists() -> None:
    for row in (row for table in TABLES for row in table.rows):
        assert sum(each is not None for each in (row.recipe, row.model, row.missing)) == 1, row.name
        assert row.recipe is None or row.recipe in recipe_names()
        assert row.model is None or re.fullmatch(r"[\w-]+/[\w.-]+", row.model)
        assert row.recipe is not None or not row.settings
    for settings in {str(row.settings): row.settings for table in TABLES for row in table.rows}.values():
        config_of(settings, {}, METHODS)  # raises UserError for an unknown key, or a value that does not fit


def test_columns_are_those_of_the_tasks_and_rows_have_a_figure_for_each() -> None:
    for table in TABLES:
        assert bool(table.tasks) != bool(table.suite)
        assert table.suite in (None, phrases.SUITE.name)
        assert (table.protocol is None) == (not table.tasks)
        assert table.protocol in (None, *get_args(ProtocolName))
        columns = [(each.column, each.metric) for each in table.columns]
        assert len(set(columns)) == len(columns)
        # A set of other data has a column of its own, and is scored by the models of one of the tasks.
        further = {column: KNOWN_SETS[column]["task"] for column in table.out_of_domain}
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


def means_of(table):
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


PAPERS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("papers.yaml").read_text(encoding="utf-8"))


def test_tables_without_averages_have_the_papers_figures() -> None:
    """So that a mistyped figure is found there too."""
    without = [table for table in TABLES if not means_of(table)]
    assert {table.name for table in without} == PAPERS.keys()
    for table in without:
        rows = PAPERS[table.name]
        figures = [tuple(None if figure == "-" else float(figure) for figure in row.split()) for row in rows]
        assert [row.published for row in table.rows if set(row.published) != {None}] == figures, table.name


@pytest.mark.parametrize("name", ["makd-table3", "makd-table4"])
def test_ablations_of_an_encoder_are_those_of_a_decoder(name: str) -> None:
    def compared(settings):
        own = {"makd.matrix_layers": "lower", "makd.layer_layers": "upper", **settings}
        return {key: value for key, value in own.items() if key not in ("method", "makd.ffn_gate")}

    decoder = [compared(dict(variant.settings)) for variant in load_method_table(f"{name}-decoder").variants]
    assert [compared(dict(row.settings)) for row in load_table(name).rows] == decoder


def test_recipes_page_lists_every_table() -> None:
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z_0-9]+-(?:table|figure)\d+[a-z]?)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted([*table_names(), "makd-table5"])
