"""A signal to a training: it finishes its step, saves, and ends with one line; the same command goes on."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

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


@pytest.mark.slow
def test_ctrl_c_gives_one_line_and_the_prompt_after_the_last_rank(settings, tmp_path):
    """A closed terminal is in tests/unit/runtime/test_signals.py."""
    folder = tmp_path / "run"
    more = ("--train.steps", "100000", "--train.save_every", "null", "--output_dir", str(folder))
    command = [sys.executable, "-m", "llmdistill.cli", "train", "--num_gpus", "2", *settings, *more]
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
        preexec_fn=take_terminal,
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
    )
    os.close(theirs)
    shown, patience = bytearray(), time.monotonic() + PATIENCE
    try:
        while not (folder / "metrics.jsonl").is_file() or len(logged(folder, "step")) < 3:
            assert job.poll() is None, shown.decode()
            assert time.monotonic() < patience, shown.decode()
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 65536)
        children = psutil.Process(job.pid).children(recursive=True)
        assert len(children) == 2
        os.write(ours, b"\x03")
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while more_shown := os.read(ours, 65536):
                shown += more_shown
        assert job.wait(PATIENCE) == 130
        assert not any(each.is_running() for each in children)
    finally:
        for each in (*psutil.Process(job.pid).children(recursive=True), job) if job.poll() is None else ():
            each.kill()
    step = logged(folder, "step")[-1]
    assert saved_steps(folder) == [step]
    lines = shown.decode().splitlines()
    assert not any("Traceback" in line for line in lines), shown.decode()
    (said,) = [line for line in lines if "stop" in line and "Training" not in line]
    assert said.endswith(f"by SIGINT after step {step}, which is saved; the same command goes on from there")


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
