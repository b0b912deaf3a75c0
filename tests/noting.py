"""Notes which messages of the package the tests raise, when LLMDISTILL_MESSAGES names a folder (scripts/messages.py).

Each process writes a file of its own with lines such as data/sources.py:87. A UserError is noted where it is made, with
the exception that it replaces. Any other exception is noted where a test expects it by pytest.raises.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "LLMDISTILL_MESSAGES"
_PACKAGE = f"{Path(__file__).resolve().parent.parent / 'llmdistill'}{os.sep}"
_noted: set[tuple[int, str]] = set()


def begin() -> None:
    """Note from now on, also in the forks of this process; do nothing without the variable."""
    if VARIABLE not in os.environ:
        return
    import pytest

    from llmdistill.errors import UserError

    folder = Path(os.environ[VARIABLE]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make, expect = UserError.__init__, pytest.raises

    def noted(self: UserError, message: str) -> None:
        frame = sys._getframe(1)
        _note(folder, frame.f_code.co_filename, frame.f_lineno)
        _note_chain(folder, sys.exc_info()[1])
        make(self, message)

    def raises(*arguments: Any, **keywords: Any) -> Any:
        expected = expect(*arguments, **keywords)
        return _Expected(folder, expected) if hasattr(expected, "__exit__") else expected

    UserError.__init__ = noted  # type: ignore[method-assign]
    pytest.raises = raises  # type: ignore[assignment]


class _Expected:
    """The context of pytest.raises, which also notes what was raised in it."""

    def __init__(self, folder: Path, context: Any) -> None:
        self._folder, self._context = folder, context

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> Any:
        _note_chain(self._folder, error)
        return self._context.__exit__(kind, error, trace)


def _note_chain(folder: Path, error: BaseException | None) -> None:
    """Note where an exception and those before it were raised."""
    for each in _chain(error):
        trace = each.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            _note(folder, trace.tb_frame.f_code.co_filename, trace.tb_lineno)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _note(folder: Path, file: str, line: int) -> None:
    key = (os.getpid(), f"{file.removeprefix(_PACKAGE)}:{line}")
    if file.startswith(_PACKAGE) and key not in _noted:
        _noted.add(key)
        with (folder / str(key[0])).open("a", encoding="utf-8") as notes:
            notes.write(f"{key[1]}\n")
