"""SIGTERM, SIGINT and SIGHUP: a training finishes its step and saves, all else ends at once, both with one line."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from llmdistill.errors import Stopped

_RUNNER = re.compile(r"/deepspeed$|^deepspeed\.launcher")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_AGAIN_SECONDS = 0.5
"""From then on a second SIGINT is another Ctrl-C, and not the same one that a launcher passes on."""
_BLOCKED_SECONDS = 20.0
"""How long a process may go on after a signal that Python has not handled, because it waits inside a library. It has no
limit in a block of `waiting`."""

_WATCH_SECONDS = 0.5
"""How often a rank looks whether its launcher is still there."""


class _State:
    """What a block of `handling` knows of signals."""

    def __init__(self) -> None:
        self.number = 0
        self.since = 0.0
        self.waits = False
        self.keeps = True
        self.is_over = threading.Event()
        self.is_hopeless: Callable[[], bool] | None = None


_interrupted = threading.Event()
"""Set by a Ctrl-C, also after the block that handles it."""
_state = _State()
"""State of the block that handles signals; they belong to the process, so only one block can be active."""


@contextmanager
def handling() -> Iterator[None]:
    """Handle SIGNALS in this block: raise Stopped, or in a block of `waiting` only remember the signal.

    The end of the launcher that has started this rank counts as SIGTERM, because a launcher that is killed passes
    nothing on. A second Ctrl-C ends the process at once. Only the main thread can handle signals; elsewhere nothing
    changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _state
    _state = state = _State()
    # Python runs its handlers in the main thread, between two instructions. While that waits in a library, the thread
    # behind this socket is the only one that hears of a signal.
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # a signal handler must not wait, and set_wakeup_fd takes nothing else
    before = set_handlers(_handle)
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reader, state), name="signals", daemon=True).start()
    _watch_launcher(state)
    try:
        yield
    finally:
        state.is_over.set()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
        _state = _State()  # of this signal later work in the process knows nothing


@contextmanager
def waiting() -> Iterator[None]:
    """Only remember a signal in this block, which calls `first_signal` from time to time.

    Raises Stopped after the block for a signal that the block did not see.
    """
    _state.waits = True
    try:
        yield
    finally:
        _state.waits = False
    if _state.number:
        raise Stopped(_state.number, keeps=_state.keeps)


def begin_anew() -> None:
    """Let the message of a later signal say that the same command begins anew: it keeps nothing before its end."""
    _state.keeps = False


def set_handlers(handler: Callable[[int, object], None] | signal.Handlers) -> dict[signal.Signals, Any]:
    """Set the handler of SIGNALS and return the handlers before; a SIGHUP that nohup ignores stays ignored.

    SIG_DFL ends the process at once and silently, SIG_IGN does nothing. Outside of the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return {number: signal.signal(number, handler) for number in SIGNALS if number not in ignored}


def first_signal() -> int:
    """Return the number of the first signal; 0 if there was none."""
    return _state.number


def line_start() -> str:
    """Return what begins a new line behind the ^C that a terminal has shown; nothing without a Ctrl-C."""
    return "\n" if _interrupted.is_set() and sys.stderr.isatty() else ""


def end_if_hopeless(is_hopeless: Callable[[], bool] | None) -> None:
    """End this process at once at a signal if `is_hopeless` says, in another thread, that its work cannot go on."""
    _state.is_hopeless = is_hopeless


def _handle(number: int, _frame: object) -> None:
    if number == signal.SIGHUP:
        # The terminal is closed, and a program behind a pipe ends with it: what would go there goes nowhere.
        for output in (1, 2):
            with suppress(OSError):
                if not stat.S_ISREG(os.fstat(output).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    if number == signal.SIGINT:
        _interrupted.set()
    if _state.number == 0:
        _state.number, _state.since = number, time.monotonic()
        if not _state.waits:
            raise Stopped(number, keeps=_state.keeps)
    elif number == signal.SIGINT and time.monotonic() - _state.since > _AGAIN_SECONDS:
        how = "goes on from the last checkpoint" if _state.keeps else "begins anew"
        _say(f"error: stopped at once by a second SIGINT; the same command {how}")
        os._exit(Stopped(number).code)


def _say(line: str) -> None:
    # A handler may interrupt a print, and Python's streams cannot be entered twice.
    os.write(2, f"{line_start()}{line}\n".encode())


def _listen(reader: socket.socket, state: _State) -> None:
    """End the process where its main thread cannot: it waits inside a library, which Python does not interrupt."""
    with reader:
        while numbers := reader.recv(1):
            if numbers[0] not in SIGNALS:
                continue
            if state.is_hopeless is not None and state.is_hopeless():
                os._exit(Stopped(numbers[0]).code)
            # Where a signal waits anyway, a long call may be the writing of a checkpoint, which nothing must cut short.
            if not state.is_over.wait(_BLOCKED_SECONDS) and state.number == 0 and not state.waits:
                _say(f"error: {Stopped(numbers[0], keeps=state.keeps)}")
                os._exit(Stopped(numbers[0]).code)


def _watch_launcher(state: _State) -> None:
    """Send this rank SIGTERM when its parent ends, in whichever way, or DeepSpeed's runner that started the parent."""
    launchers: list[int] = []
    for number, process in enumerate(psutil.Process().parents() if "RANK" in os.environ else ()):
        with suppress(psutil.Error):
            # On one node a SIGTERM ends DeepSpeed's runner alone: neither its child nor the ranks hear of it.
            if process.pid == 1 or (number > 0 and not any(map(_RUNNER.search, process.cmdline()[:4]))):
                break
            launchers.append(process.pid)

    def watch() -> None:
        while not any(map(has_ended, launchers)):
            if state.is_over.wait(_WATCH_SECONDS):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    if launchers:
        threading.Thread(target=watch, name="launcher", daemon=True).start()


def has_ended(process: int) -> bool:
    """Return whether a process has ended, also if the one that started it has not asked for its exit code yet."""
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def end_with_parent() -> None:
    """On Linux, let this process get SIGTERM when the one that started it ends; called between fork and exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
