from __future__ import annotations

import os

from llmdistill.runtime.devices import stale_locks


def test_only_a_lock_that_no_compilation_can_still_hold_is_stale(tmp_path, monkeypatch) -> None:
    for name in ("shm", "py311_cpu/adam", "now"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "lock").touch()
    for name in ("shm", "py311_cpu/adam"):
        os.utime(tmp_path / name / "lock", (0, 0))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert stale_locks() == [tmp_path / "shm/lock", tmp_path / "py311_cpu/adam/lock"]
