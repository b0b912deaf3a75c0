"""Writes the table of what does not go together into docs/train.md: `python scripts/make/rules.py`."""

from pathlib import Path

from llmdistill.training.rules import list_excluded

PAGE = Path(__file__).resolve().parents[2] / "docs/train.md"
MARKS = ("<!-- from scripts/make/rules.py -->", "<!-- end of the rules -->")


def table() -> str:
    """The choices with those that a run cannot combine with them."""
    rows = (f"| {choice} | {'; '.join(others)} |\n" for choice, others in list_excluded().items())
    return "| choice | not with |\n|---|---|\n" + "".join(rows)


def with_table(page: str) -> str:
    """The text of the page with the table between its marks."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}\n{table()}{MARKS[1]}{rest.split(MARKS[1])[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
