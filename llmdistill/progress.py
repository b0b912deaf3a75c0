"""Progress of long work: a bar on a terminal, elsewhere a line now and then, and nothing for a few seconds' work.

They go to stderr, on rank 0 alone; the environment variable TQDM_DISABLE=1 turns them off, as it does for tqdm.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any, TypeVar

from tqdm import tqdm

Value = TypeVar("Value")

_TICK_SECONDS = 1.0
_BAR_SECONDS = 3.0
"""Work that takes less has no bar."""
_FIRST_SECONDS = 8.0
"""When the first line is written where there is no bar."""
_NEXT_SECONDS = 20.0
"""How long it may then be silent."""
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}{postfix}]"
_COUNT = "{desc} {n_fmt} {unit} [{elapsed}{postfix}]"

_under_way: list[Activity] = []
"""What the process is doing, the innermost activity last."""
_ended: tuple[str, float] | None = None
"""The last activity within the outermost one that has ended, and when, on time.monotonic's clock."""
_next_line = 0.0
"""When the next line is due, on time.monotonic's clock."""


class Activity:
    """Work that is shown while the `with` block runs; activities can be nested.

    Args:
        what: the name of the work, such as "Calibration".
        total: the number of units of the work; None if it is not known.
        unit: what is counted, in the plural, such as "texts"; "" if nothing is.
        done: the number of units that an earlier process has done.
        detail: says more of the unit that is worked at, "" for nothing.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "",
        *,
        done: int = 0,
        detail: Callable[[], str] = str,
    ) -> None:
        self._what, self.total, self._unit, self._detail = what, total, unit, detail
        self._start = self._done = done
        self._shown = os.environ.get("RANK", "0") == "0" and os.environ.get("TQDM_DISABLE", "0") in ("", "0")
        self._bar: Any = None
        self._is_over = threading.Event()

    def __enter__(self) -> Activity:
        global _ended, _next_line
        self._began = self._advanced = time.monotonic()
        if not self._shown:
            return self
        if self._unit:
            self._bar = tqdm(
                desc=self._what,
                total=self.total,
                unit=self._unit,
                initial=self._start,
                delay=_BAR_SECONDS,
                disable=None,  # without a terminal
                leave=False,
                bar_format=_BAR if self.total else _COUNT,
            )
        _under_way.append(self)
        if _under_way[0] is self:
            _ended, _next_line = None, self._began + _FIRST_SECONDS
            threading.Thread(target=_tick, args=(self._is_over,), name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        global _ended
        self._is_over.set()
        _ended = self._what, time.monotonic()
        if self in _under_way:  # `hand_over` takes all of them out
            _under_way.remove(self)
        if self._bar is not None:
            self._bar.close()

    def advance(self, units: int = 1, *, earlier: bool = False) -> None:
        """Count units that are done; `earlier`: by an earlier process, so that they tell nothing of the time."""
        self._done += units
        self._start += units if earlier else 0
        self._advanced = time.monotonic()
        if self._bar is not None:
            self._bar.update(units)

    def expect(self, total: int) -> None:
        """Correct the number of units of the work."""
        self.total = total
        if self._bar is not None:
            self._bar.total = total

    @property
    def done(self) -> int:
        """The number of units that are done."""
        return self._done

    @property
    def has_bar(self) -> bool:
        return self._bar is not None and not self._bar.disable

    def refresh(self) -> None:
        """Show the elapsed time, also in the middle of a unit."""
        if self.has_bar and time.monotonic() - self._began > _BAR_SECONDS:
            self._bar.set_postfix_str(self._detail())  # which refreshes it

    def line(self) -> str:
        """Return what is done, how far, and how long it still takes."""
        now, done, detail = time.monotonic(), self._done - self._start, self._detail()
        text, time_text = self._what, f"{duration(now - self._began)} so far"
        if [self] == _under_way and not self._unit and _ended is not None:  # what goes on has no name of its own
            time_text = f"{duration(now - _ended[1])} since the end of {_ended[0]}"
        if self._unit:
            text += f"  {self._done:,}{f' of {self.total:,}' if self.total else ''} {self._unit}"
        if self.total and done:
            # The seconds of a finished unit, times the units that are left, less what the next one has taken so far.
            left = (self._advanced - self._began) / done * (self.total - self._done) - (now - self._advanced)
            if left > 0:  # a unit that takes longer than those before tells nothing of the rest
                time_text = f"{duration(left)} left"
        return f"{text}, {time_text}{f': {detail}' if detail else ''}"


def progress(items: Iterable[Value], what: str, unit: str) -> Iterator[Value]:
    """Yield the items as one Activity."""
    with Activity(what, len(items) if isinstance(items, Sized) else None, unit) as activity:
        for item in items:
            yield item
            activity.advance()


def postpone_line() -> None:
    """Put the next line off, because the user has just read something else."""
    global _next_line
    _next_line = time.monotonic() + _NEXT_SECONDS


def hand_over() -> None:
    """Show nothing from now on: what this process waits for shows itself on the same terminal."""
    _under_way.clear()


def duration(seconds: float | None) -> str:
    """Format a duration in its two largest units."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _tick(is_over: threading.Event) -> None:
    """Refresh the bars and write the lines until the outermost activity is over."""
    global _next_line
    while not is_over.wait(_TICK_SECONDS):
        activities = list(_under_way)  # a copy: the work itself goes on in another thread
        if not activities:
            return
        with suppress(OSError, ValueError):  # stderr is closed
            for activity in activities:
                activity.refresh()
            if any(activity.has_bar for activity in activities):
                postpone_line()  # the user has just seen the bar
            elif time.monotonic() >= _next_line:
                postpone_line()
                # What encloses the innermost activity is told only if its progress is known.
                shown = [outer.line() for outer in activities[:-1] if outer.total] + [activities[-1].line()]
                tqdm.write(": ".join(shown), file=sys.stderr)
                sys.stderr.flush()
