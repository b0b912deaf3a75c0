"""Damage to any file of a run's folder: the same command names it or makes the file again, and never uses it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from damage import damage, kinds

from llmdistill.artifacts import MANIFEST
from llmdistill.cli import main as command

from support import interrupted_copy


def unseen(folder: Path, again: Callable[[], tuple[int, str]], *, but: tuple[str, ...] = ()) -> list[str]:
    """Damage a file of every kind, and do something again; returns the kinds that go unnoticed.

    Of checkpoints and the like the last one is taken, which is the one that is read.
    `again` returns the exit code and all that was said. Each time begins with the folder as it is now.
    """
    kept, found = folder.with_name("kept"), []
    shutil.copytree(folder, kept)
    for kind, (*_, file) in kinds(folder).items():
        if kind.startswith(but):
            continue
        with damage(file):
            damaged = file.read_bytes()
            code, said = again()
            assert code in (0, 2), kind
            assert code == 0 or "error: " in said, kind
            is_named = file.name in "".join(said.replace("│", "").split())
            is_made_again = code == 0 and file.is_file() and file.read_bytes() != damaged
            if not (is_named or is_made_again):
                found.append(kind)
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
    shutil.rmtree(kept)
    return found


def test_every_kind_of_file_of_a_finished_run(finished, trains):
    assert trains(finished) == (0, trains(finished)[1])
    assert {"student/model.safetensors", "scores/student.json", "metrics.jsonl", "run.json"} <= kinds(finished).keys()
    # A finished run reads no checkpoint, and an unfinished one what it began with.
    assert unseen(finished, lambda: trains(finished), but=("checkpoints", "untrained")) == []


def test_every_kind_of_file_of_an_unfinished_run(finished, base, trains):
    run = interrupted_copy(finished, base / "unfinished")
    assert len(kinds(run)["checkpoints/step-N/manifest.json"]) == 2
    assert unseen(run, lambda: trains(run), but=("run.json",)) == []


def test_the_remedies_work(finished, base, trains):
    run = base / "fixed"
    shutil.copytree(finished, run)
    for made in ("student", "untrained"):
        before = (run / made / "model.safetensors").read_bytes()
        (run / made / "model.safetensors").write_bytes(b"")
        assert f"remove {run / made}, and the same command" in trains(run)[1]
        shutil.rmtree(run / made)
        assert trains(run)[0] == 0
        assert (run / made / "model.safetensors").read_bytes() == before
    (run / "metrics.jsonl").write_text("")
    assert "remove" in trains(run)[1]
    (run / MANIFEST).unlink()
    assert trains(run)[0] == 0


def test_every_kind_of_file_of_a_teachers_cache(base, settings, trains, capsys, monkeypatch):
    cache = base / "cache"

    def make() -> tuple[int, str]:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        capsys.readouterr()
        code = command(["cache", *settings, "--output", str(cache)])
        return code, capsys.readouterr().err

    assert make()[0] == 0
    assert {"cache.json", "shards/N.safetensors"} <= kinds(cache).keys()
    assert unseen(cache, make) == []

    def use() -> tuple[int, str]:
        shutil.rmtree(base / "learns", ignore_errors=True)
        return trains(base / "learns", "--teacher.cache", str(cache), "--scoring.models", "[]")

    assert unseen(cache, use) == []
