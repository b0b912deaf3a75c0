"""A signal to a training: it finishes its step, saves, and ends with one line; the same command goes on."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import psutil
import pytest

from support import FAULTY_RUN, PATIENCE, ROOT, environment, largest_difference, logged, saved_steps


# One rank alone stops after the step in which the signal came. Of two ranks one gets it, and both stop one step later.
@pytest.mark.parametrize(
    ("ranks", "rank", "kind", "code", "step"), [(1, 0, "SIGTERM", 143, 2), (2, 1, "SIGINT", 130, 3)]
)
def test_the_step_is_finished_and_saved_and_the_next_start_goes_on(
    faulty, launch, trained, settings, tmp_path, ranks, rank, kind, code, step
):
    folder = tmp_path / "run"
    done = faulty("training", kind, str(rank), *settings, "--output_dir", str(folder), ranks=ranks)
    assert done.returncode == code
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert said == f"error: stopped by {kind} after step {step}, which is saved; the same command goes on from there"
    assert saved_steps(folder)[-1] == step
    assert logged(folder, "step") == list(range(1, step + 1))
    launch(*settings, "--output_dir", str(folder), ranks=ranks)
    assert largest_difference(trained(ranks=ranks), folder) == 0
    assert logged(folder, "step") == [1, 2, 3, 4, 5]


def test_a_signal_at_the_last_step_saves_it(faulty, launch, settings, tmp_path):
    folder = tmp_path / "run"
    more = (*settings, "--train.save_every", "null", "--train.steps", "2", "--output_dir", str(folder))
    done = faulty("training", "SIGTERM", "0", *more, ranks=2)
    assert (done.returncode, saved_steps(folder)) == (143, [2])
    assert not (folder / "student").exists()
    launch(*more, ranks=2)
    assert (folder / "student").exists()


def test_elsewhere_the_command_ends_at_once_and_the_rank_says_so(faulty, settings, tmp_path):
    more = ("--data.tests.seen", "embedded:seen", "--scoring.models", "[student]", "--scoring.limit", "4")
    more = (*settings, *more, "--train.steps", "1", "--output_dir", str(tmp_path / "run"))
    done = faulty("scoring", "SIGTERM", "1", *more, ranks=2)
    assert done.returncode == 143
    said = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert said == ["error: stopped by SIGTERM; the same command goes on from what is finished (rank 1)"]
    assert "Traceback" not in done.stderr


def take_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup ignore it, and so would the command
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def interrupted_in_a_terminal(arguments: list[str], is_ready: Callable[[], bool]) -> tuple[int, list[str], int]:
    """Start a command in a terminal of its own, press Ctrl-C when it is ready, and wait for its end.

    Returns the exit code, the lines that the terminal shows after the ^C, and how many processes there were. All have
    ended with the command, and the terminal has the modes and the cursor that it had.
    """
    ours, theirs = pty.openpty()
    modes = termios.tcgetattr(ours)
    job = subprocess.Popen(
        [sys.executable, "-m", "llmdistill.cli", *arguments],
        cwd=ROOT,
        env=environment() | {"TERM": "xterm"},
        start_new_session=True,
        preexec_fn=take_terminal,
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
    )
    shown, patience = bytearray(), time.monotonic() + PATIENCE

    def read(seconds: float) -> None:
        nonlocal shown
        assert time.monotonic() < patience, shown.decode()
        if select.select([ours], [], [], seconds)[0]:
            shown += os.read(ours, 65536)

    processes = [psutil.Process(job.pid)]
    try:
        while not is_ready():
            assert job.poll() is None, shown.decode()
            read(0.1)
        processes += processes[0].children(recursive=True)
        while select.select([ours], [], [], 0)[0]:
            read(0)
        before = len(shown)
        os.write(ours, b"\x03")
        while job.poll() is None:
            read(0.1)
        assert not any(each.is_running() for each in processes[1:]), shown.decode()
        while select.select([ours], [], [], 0)[0]:
            read(0)
        assert termios.tcgetattr(ours) == modes
    finally:
        for each in processes if job.poll() is None else ():
            each.kill()
        os.close(theirs)
        os.close(ours)
    assert shown.rfind(b"\x1b[?25l") <= shown.rfind(b"\x1b[?25h"), "the cursor stays hidden"
    assert "Traceback" not in shown.decode(), shown.decode()
    return job.returncode, shown[before:].decode().splitlines(), len(processes)


@pytest.mark.slow
def test_ctrl_c_gives_one_line_and_the_prompt_after_the_last_rank(settings, tmp_path):
    """A closed terminal is in tests/unit/runtime/test_signals.py."""
    folder = tmp_path / "run"
    more = ("--train.steps", "100000", "--train.save_every", "null", "--output_dir", str(folder))
    has_begun = lambda: (folder / "metrics.jsonl").is_file() and len(logged(folder, "step")) >= 3  # noqa: E731
    code, lines, processes = interrupted_in_a_terminal(["train", "--num_gpus", "2", *settings, *more], has_begun)
    assert (code, processes) == (130, 3)
    step = logged(folder, "step")[-1]
    assert saved_steps(folder) == [step]
    (said,) = [line for line in lines if "stop" in line and "Training" not in line]
    assert said.endswith(f"by SIGINT after step {step}, which is saved; the same command goes on from there")


@pytest.mark.slow
def test_ctrl_c_ends_a_comparison_and_its_runs(settings, tmp_path):
    folder = tmp_path / "comparison"
    more = "--methods sft --seeds 1 --learning_rates 1e-3 --train.steps 100000 --data.max_length 104"
    more += " --data.max_prompt_length 96 --data.tests.seen embedded:seen --scoring.limit 2"
    has_begun = lambda: any(folder.glob("trials/sft-*/metrics.jsonl"))  # noqa: E731
    command = ["compare", *settings, *more.split(), "--output_dir", str(folder)]
    code, lines, processes = interrupted_in_a_terminal(command, has_begun)
    assert code == 130
    assert processes >= 2, "no run was under way"
    assert " ".join(lines) == f"^C Stopped; what is finished stays in {folder}, and the same command goes on."


@pytest.mark.slow
def test_ctrl_c_ends_a_scoring(tiny_teacher, tmp_path):
    folder = tmp_path / "scores"
    # A small set, whose answers say that it has begun, and one that takes much longer.
    more = "--data embedded:seen embedded:train --max_prompt_length 96 --max_length 104 --decoding greedy"
    has_begun = lambda: (folder / "seen.jsonl").is_file()  # noqa: E731
    command = ["evaluate", "--model", str(tiny_teacher), *more.split(), "--batch_size", "1", "--output", str(folder)]
    code, lines, processes = interrupted_in_a_terminal(command, has_begun)
    assert (code, processes) == (130, 1)
    assert lines == ["^C", "error: stopped by SIGINT; the same command goes on from what is finished"]


def test_ranks_whose_launcher_is_killed_stop_after_the_step(rank_server, launch, settings, tmp_path):
    folder = tmp_path / "run"
    more = (*settings, "--train.steps", "200", "--train.log_every", "200")
    given = ("training", "launcher", "0", *more, "--output_dir", str(folder))
    job = rank_server.start(given, ranks=2, program=FAULTY_RUN)
    assert job.wait().returncode == -9
    patience = time.monotonic() + 300
    while "stopped by SIGTERM after step" not in job.errors.read_text():
        assert time.monotonic() < patience, job.errors.read_text()
        time.sleep(0.05)
    assert 2 <= saved_steps(folder)[-1] < 200
