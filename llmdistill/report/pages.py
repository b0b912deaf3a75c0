"""Writes the pages of reports from the templates in templates/, and formats the values on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from llmdistill.files import byte_size, write_text
from llmdistill.progress import duration
from llmdistill.report.record import describe_versions
from llmdistill.report.tables import show_seeds
from llmdistill.tasks.perplexity import show_perplexity


def write_page(file: Path, template: str, **values: Any) -> None:
    """Write a page from a template and its variables; page.md.j2 names those of every page with a single table."""
    write_text(file, render(template, **values))


def render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("llmdistill", "report/templates"),
        autoescape=select_autoescape(enabled_extensions=("html.j2",)),
        undefined=StrictUndefined,  # a misspelled variable is an error instead of an empty text
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {function.__name__: function for function in FILTERS}
    return environment.get_template(template).render(values)


def figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def precise(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def signed(value: float | None, show: Callable[[float | None], str] = figure) -> str:
    """Format a difference of two scores with its sign; `show` formats a score."""
    # A difference that is rounded to 0 has no sign.
    text = show(None if value is None else abs(value))
    if value is None or text == show(0.0):
        return text
    return f"{'+' if value > 0 else '−'}{text}"


def thousands(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def settings_text(settings: Mapping[str, Any] | None) -> str:
    if not settings:
        return "–"
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in settings.items()}
    return ", ".join(f"{key} {text}" for key, text in texts.items())


def markdown(value: object) -> str:
    """Escape a text for Markdown and its tables."""
    # An underscore within a word is no mark of emphasis.
    text = re.sub(r"([\\`*\[\]|~#])|((?<!\w)_|_(?!\w))", r"\\\g<0>", str(value))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "<br>".join(text.splitlines())


def markdown_code(value: object) -> str:
    text = " ".join(str(value).split("\n"))
    # A span ends at as many backquotes as it begins with, so it has more than the text.
    fence = "`" * (_longest_fence(text) + 1)
    space = " " if "`" in text else ""  # one at an end would join the fence
    return f"{fence}{space}{text}{space}{fence}"


def markdown_block(text: str, language: str = "text") -> str:
    fence = "`" * max(3, _longest_fence(text) + 1)
    return f"{fence}{language}\n{text.removesuffix(chr(10))}\n{fence}"


def _longest_fence(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def relative(path: str, folder: Path) -> str:
    """Return a path as a page in a folder links to it: relative to the folder if the path is inside."""
    inside = Path(path).resolve()
    return str(inside.relative_to(folder.resolve())) if inside.is_relative_to(folder.resolve()) else path


FILTERS: list[Callable[..., Any]] = [
    *(figure, precise, signed, thousands, byte_size, duration, settings_text, markdown, markdown_code, markdown_block),
    *(describe_versions, relative, show_seeds, show_perplexity),
]
