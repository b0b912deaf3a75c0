"""Conducts the study of a command, and says how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmdistill.errors import Stopped
from llmdistill.messages import logger, print_result
from llmdistill.runtime import signals

if TYPE_CHECKING:
    from llmdistill.report.study_report import StudyReport


def conclude(study: Any, report: Callable[[Any], StudyReport], *, as_json: bool) -> int:
    """Conduct a study, write and print its report; return 1 if a run failed, 130 or 143 after a signal, else 0."""
    try:
        outcome = study.conduct()
    except KeyboardInterrupt as stop:
        begin = signals.line_start()
        logger.warning("%sStopped; what is finished stays in %s, and the same command goes on.", begin, study.folder)
        return stop.code if isinstance(stop, Stopped) else 130
    study_report = report(outcome)
    results = study_report.write()
    if as_json:
        print_result(results)
    else:
        study_report.print()
    return 1 if study_report.failed else 0
