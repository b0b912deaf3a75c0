"""C++ extensions, which are compiled when they are first needed: a compilation that was killed stops no later run.

torch's lock is a file that a compilation makes first and removes last (`torch.utils.file_baton`). A process that is
killed in between leaves it, and torch waits for it in silence and for ever.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil
from torch.utils.file_baton import FileBaton

from llmdistill.messages import logger, say

NOTICE_SECONDS = 5.0
"""Seconds after which a process says what it waits for."""
QUIET_SECONDS, QUIET_SECONDS_SHARED = 10.0, 900.0
"""A compilation that no process of this machine carries on has ended if its folder has not changed for so long. On a
file system that machines share it may be another one's, which changes no file while it compiles one."""
_SHARED = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse", "9p", "virtiofs")


def replace_torch_locks() -> None:
    """From now on this process takes the locks of torch's extensions as `Lock` does."""
    from torch.utils import cpp_extension

    cpp_extension.FileBaton = Lock  # type: ignore[misc]


class Lock(FileBaton):
    """torch's lock, which is waited for while a compilation lives, and removed when it was killed."""

    _system_lock: IO[str]

    def try_acquire(self) -> bool:
        """Take the lock, however long it takes.

        It never returns False, upon which torch would wait and then load the extension: where a compilation was killed
        there is none. To compile what is compiled already takes a moment.
        """
        lock = Path(self.lock_file_path)
        # The system ends this second lock with its process: of all that see a lock that was left, one alone removes it.
        self._system_lock = lock.with_suffix(".turn").open("a")
        began, silent = time.monotonic(), os.environ.get("LOCAL_RANK", "0") != "0"
        while not (is_mine := self._try_system_lock()) or not super().try_acquire():
            due = not silent and time.monotonic() - began >= NOTICE_SECONDS
            user = _find_user(lock) if is_mine or due else None
            if is_mine and user is None:
                lock.unlink(missing_ok=True)
                logger.warning("%s", f"removed {lock}, which a killed compilation had left")
                continue
            if due:
                silent = True
                logger.warning("%s", f"waiting for {lock}, by which {user or 'another process'} compiles an extension")
            time.sleep(1.0 if is_mine else 0.1)  # to look at all processes takes a moment
        if not any(lock.parent.glob("*.so")):
            say(f"Compiling {lock.parent.name}, an extension of DeepSpeed, once: about a minute")
        return True

    def release(self) -> None:
        """Give the lock back."""
        super().release()
        self._system_lock.close()

    def _try_system_lock(self) -> bool:
        try:
            fcntl.flock(self._system_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some network file systems have no such locks
            pass
        return True


def _find_user(lock: Path) -> str | None:
    """Return who holds a lock or works in its folder, as far as this machine can tell; None if nobody does."""
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error, OSError):
            # torch keeps the file open while it has the lock. The compilers that it starts work in the folder, and
            # may outlive it; a shell there, which leads its session, is a user's.
            works = process.cwd() == str(lock.parent) and os.getsid(process.pid) != process.pid
            if process.pid != os.getpid() and (works or str(lock) in (file.path for file in process.open_files())):
                return f"process {process.pid} ({process.info['name']})"
    changed = 0.0
    for file in lock.parent.iterdir():
        if file.suffix != ".turn":
            with suppress(FileNotFoundError):
                changed = max(changed, file.stat().st_mtime)
    mounts = [mount for mount in psutil.disk_partitions(all=True) if lock.is_relative_to(mount.mountpoint)]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    quiet = QUIET_SECONDS_SHARED if kind.startswith(_SHARED) else QUIET_SECONDS
    return "a process that this machine does not see" if time.time() - changed < quiet else None
