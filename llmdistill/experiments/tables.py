"""The papers' tables of scores (suites/PAPER-tableN.yaml): the published figures, and what runs each row here."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml

from llmdistill.config.strict import did_you_mean
from llmdistill.errors import UserError
from llmdistill.report.paper import Column, PublishedTable, TableRow

_SUITES = resources.files("llmdistill") / "suites"


def suite_files(key: str) -> list[str]:
    """Return the names of the files in suites/ that have a key: `methods` (a comparison) or `columns` (a table)."""
    files = (item for item in _SUITES.iterdir() if item.name.endswith(".yaml"))
    # Names are asked for by --help, which does not wait until YAML has parsed every file.
    return sorted(item.name.removesuffix(".yaml") for item in files if f"\n{key}:" in item.read_text(encoding="utf-8"))


def read_suite(name: str) -> dict[str, Any]:
    """Return the content of a file in suites/."""
    content: dict[str, Any] = yaml.safe_load((_SUITES / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


def table_names() -> list[str]:
    """Return the names of the tables, such as minilm-table2."""
    return suite_files("columns")


def load_table(name: str) -> PublishedTable:
    """Load a table by its name.

    Raises:
        UserError: there is no table with this name; the message contains the nearest name.
    """
    names = table_names()
    if name not in names:
        raise UserError(
            f"--suite {name}: there is no such table{did_you_mean(name, names)} (there are {', '.join(names)})"
        )
    content = read_suite(name)
    columns = [Column(**fields) for fields in content["columns"]]
    # A figure of a paper may be a drawing without numbers.
    none = [None] * (len(columns) + content.get("average", False))
    rows = [
        TableRow(name=key, **{**fields, "published": tuple(fields.get("published", none))})
        for key, fields in content["rows"].items()
    ]
    parts = {"tasks": tuple(content["tasks"]), "columns": tuple(columns), "rows": tuple(rows)}
    return PublishedTable(name=name, **{**content, **parts})
