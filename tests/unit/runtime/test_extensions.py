"""The locks of torch's extensions, beside stand-ins for compilations that live, end and are killed."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest
from torch.utils import cpp_extension, file_baton

from llmdistill.runtime import extensions
from llmdistill.runtime.extensions import Lock

FORK = multiprocessing.get_context("fork")


class Clock:
    """Stands in for `time`: each sleep passes at once, and does what the test has planned for then."""

    def __init__(self, monkeypatch):
        self.now, self.plan = time.time(), {}
        monkeypatch.setattr(extensions, "time", self)

    def time(self):
        return self.now

    monotonic = time

    def sleep(self, seconds):
        self.now += seconds
        for when in sorted(each for each in self.plan if each <= self.now - self.began):
            self.plan.pop(when)()

    def passes(self, action):
        """Return the seconds that an action takes."""
        self.began = self.now
        action()
        return self.now - self.began


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    """Of a compilation that has begun long ago."""
    for name in ("lock", "build.ninja"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    return tmp_path


def hold(folder, baton, taken, freed):
    held = baton(str(folder / "lock"))
    assert held.try_acquire()
    os.utime(folder / "lock", (0, 0))
    taken.set()
    freed.wait()
    held.release()


@pytest.fixture(params=[file_baton.FileBaton, Lock], ids=["torch's", "ours"])
def compilation(request, tmp_path):
    """A process that has the lock, and what lets it end."""
    taken, freed = FORK.Event(), FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path, request.param, taken, freed))
    process.start()
    taken.wait()
    yield process, freed
    process.kill()
    process.join()


def test_a_lock_that_was_left_long_ago_is_removed_at_once(folder, clock, caplog):
    lock = Lock(str(folder / "lock"))
    assert clock.passes(lock.try_acquire) < 1
    assert [each.getMessage() for each in caplog.records] == [
        f"removed {folder / 'lock'}, which a killed compilation had left",
        f"Compiling {folder.name}, an extension of DeepSpeed, once: about a minute",
    ]
    assert (folder / "lock").exists()
    lock.release()
    assert not (folder / "lock").exists()
    (folder / f"{folder.name}.so").touch()
    caplog.clear()
    lock.try_acquire()
    lock.release()
    assert not caplog.records, "it is compiled"


def test_a_compilation_that_lives_is_waited_for_and_named(tmp_path, compilation, clock, caplog):
    process, freed = compilation
    clock.plan[60] = lambda: (freed.set(), process.join())
    lock = Lock(str(tmp_path / "lock"))
    clock.plan[10] = lambda: said.extend(each.getMessage() for each in caplog.records)
    said = []
    assert clock.passes(lock.try_acquire) >= 60
    assert (len(said), len(caplog.records)) == (1, 2)
    assert said[0].startswith(f"waiting for {tmp_path / 'lock'}, by which process {process.pid} (")


def test_a_compilation_that_is_killed_while_others_wait_lets_them_go_on(tmp_path, compilation, clock, caplog):
    process, _ = compilation
    clock.plan[40] = lambda: (process.kill(), process.join())
    assert 40 <= clock.passes(Lock(str(tmp_path / "lock")).try_acquire) < 60
    assert [each.getMessage().split()[0] for each in caplog.records] == ["waiting", "removed", "Compiling"]


def test_a_folder_that_still_changes_belongs_to_a_compilation(folder, clock, monkeypatch):
    for second in range(0, 20, 5):
        clock.plan[second] = lambda: os.utime(folder / "build.ninja", (clock.now, clock.now))
    os.utime(folder / "build.ninja", (clock.now, clock.now))
    assert 20 <= clock.passes(Lock(str(folder / "lock")).try_acquire) < 40
    # Another machine may compile where machines share the file system.
    monkeypatch.setattr(extensions, "QUIET_SECONDS_SHARED", 20.0)
    os.utime(folder / "build.ninja", (clock.now, clock.now))
    disk = type("", (), {"mountpoint": "/", "fstype": "nfs4"})
    monkeypatch.setattr(extensions.psutil, "disk_partitions", lambda all: [disk])
    assert 15 <= clock.passes(Lock(str(folder / "lock")).try_acquire) < 25


def test_compilers_that_outlive_their_process_are_waited_for(folder, clock):
    compiler = subprocess.Popen([sys.executable, "-c", "input()"], cwd=folder, stdin=subprocess.PIPE)
    clock.plan[30] = lambda: compiler.communicate(b"\n")
    assert 30 <= clock.passes(Lock(str(folder / "lock")).try_acquire) < 50


def test_other_ranks_of_a_node_say_nothing(tmp_path, compilation, clock, caplog, monkeypatch):
    process, freed = compilation
    monkeypatch.setenv("LOCAL_RANK", "1")
    clock.plan[30] = lambda: (freed.set(), process.join())
    clock.passes(Lock(str(tmp_path / "lock")).try_acquire)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def build(folder, log):
    lock = Lock(str(folder / "lock"))
    lock.try_acquire()
    for word in ("begins", "ends"):
        with log.open("a") as file:
            file.write(f"{os.getpid()} {word}\n")
    lock.release()


def test_of_several_that_find_a_lock_that_was_left_one_compiles_at_a_time(folder, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "log"
    ranks = [FORK.Process(target=build, args=(folder, log)) for _ in range(6)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [word for _, word in lines] == ["begins", "ends"] * 6
    assert all(first[0] == second[0] for first, second in zip(lines[::2], lines[1::2], strict=True))
    assert not (folder / "lock").exists()


@pytest.mark.slow
def test_an_extension_whose_compilation_was_killed_is_compiled(tmp_path, monkeypatch):
    """By torch itself: a compiler that never ends, whose process is killed, and then the real one."""
    source, place, endless = tmp_path / "seven.cpp", tmp_path / "seven", tmp_path / "c++"
    source.write_text(
        "#include <Python.h>\n"
        'static PyModuleDef module = {PyModuleDef_HEAD_INIT, "seven"};\n'
        "PyMODINIT_FUNC PyInit_seven() { return PyModule_Create(&module); }\n"
    )
    place.mkdir()
    waits = "echo > started; while [ -e started ]; do sleep 0.1; done"
    endless.write_text(f'#!/bin/sh\ncase "$*" in *seven.cpp*) {waits};; *) exec c++ "$@";; esac\n')
    endless.chmod(0o755)
    call = f"load('seven', {str(source)!r}, build_directory={str(place)!r})"
    program = f"from torch.utils.cpp_extension import load; {call}"
    killed = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "CXX": str(endless)})
    while not (place / "started").exists():
        assert killed.poll() is None
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    (place / "started").unlink()
    assert (place / "lock").exists()
    monkeypatch.setattr(cpp_extension, "FileBaton", cpp_extension.FileBaton)  # as it was, after the test
    extensions.replace_torch_locks()
    assert cpp_extension.load("seven", str(source), build_directory=str(place)).__name__ == "seven"
