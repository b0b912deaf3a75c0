"""How far the students of a run are from their teacher, as a table, a sentence and bars of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmdistill.tasks.base import ScoreTable
from llmdistill.tasks.perplexity import show_perplexity

NATS = "nats per token"
"""The column of the divergence KL(teacher‖student)."""
Measured = Mapping[str, Mapping[str, Any]]
"""What was measured of each model, by its key in metrics.json: nearness in that file."""


def nearness_scores(measured: Measured) -> ScoreTable | None:
    """Return the table of what was measured; None if there is no student in it."""
    students = {key: measured[key] for key in ("untrained", "student") if "divergence" in measured.get(key, {})}
    if not students:
        return None
    some = next(iter(students.values()))
    rows = {
        "teacher": ["0", show_perplexity(some["teacher_perplexity"])],
        **{
            key: [f"{student['divergence']:.3g}", show_perplexity(student["perplexity"])]
            for key, student in students.items()
        },
    }
    rouge = {key: f"{values['rougeL']:.1f}" for key, values in measured.items() if "rougeL" in values}
    legend = f"On {some['of']}: KL(teacher‖student) in {NATS}, and the perplexity of the rows."
    if rouge:
        rows = {key: [*cells, rouge.get(key, "")] for key, cells in rows.items()}
        legend += " ROUGE-L (0-100) is that of greedy answers to the first of these rows."
    return ScoreTable(
        title=f"On {some['tokens']:,} tokens of {some['of']}",
        columns=[NATS, "perplexity", *(["ROUGE-L"] if rouge else [])],
        rows=rows,
        legend=legend,
    )


def nearness_sentence(measured: Measured) -> str:
    """Say how far the trained student is from its teacher, as the end of a sentence that begins with the student."""
    student, before = measured["student"], measured.get("untrained", {}).get("divergence")
    text = f"is {student['divergence']:.3g} {NATS} from its teacher"
    text += "" if before is None else f", {before:.3g} before training,"
    return (
        f"{text} at a perplexity of {show_perplexity(student['perplexity'])} "
        f"(teacher {show_perplexity(student['teacher_perplexity'])})."
    )


def nearness_bars(measured: Measured, names: Mapping[str, str]) -> list[tuple[str, float, str]]:
    """Return a bar for each student: its name, the share of the longest, and a label."""
    far = {
        key: measured[key]["divergence"] for key in ("untrained", "student") if "divergence" in measured.get(key, {})
    }
    longest = max(far.values(), default=0.0) or 1.0
    return [(names[key], nats / longest, f"{nats:.3g}") for key, nats in far.items()]
