"""What a signal does to a command, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import ROOT, environment

BEGIN = """
import ctypes, os, signal, sys, time
from llmdistill.errors import Stopped
from llmdistill.runtime import signals
from llmdistill.runtime.terminal import exit_code
signals._BLOCKED_SECONDS = 0.3
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup ignore it, and so would a command

def send(number, times=1):
    for _ in range(times):
        os.kill(os.getpid(), number)
        time.sleep(signals._AGAIN_SECONDS * 1.2)
"""
AT_ONCE = "error: stopped by SIGTERM; the same command goes on from what is finished\n"


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BEGIN + program]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)


def test_a_command_ends_with_one_line_and_the_code_of_a_shell():
    done = run("sys.exit(exit_code(lambda: send(signal.SIGTERM)))")
    assert (done.returncode, done.stdout, done.stderr) == (143, "", AT_ONCE)


@pytest.mark.parametrize(("rank", "said"), [(0, AT_ONCE), (1, "")])
def test_before_the_ranks_have_joined_rank_0_alone_says_it(rank, said):
    place = f"os.environ |= {{'RANK': '{rank}', 'LOCAL_RANK': '{rank}', 'WORLD_SIZE': '2'}}\n"
    done = run(f"{place}sys.exit(exit_code(lambda: send(signal.SIGTERM)))")
    assert (done.returncode, done.stderr) == (143, said)


def test_a_block_that_waits_sees_the_signal_and_is_not_interrupted():
    program = """
def job():
    with signals.waiting():
        send(signal.SIGINT)
        print(signals.caught(), flush=True)
        raise Stopped(signals.caught(), "after step 7")
sys.exit(exit_code(job))
"""
    done = run(program)
    assert (done.returncode, done.stdout) == (130, "2\n")
    said = "error: stopped by SIGINT after step 7, which is saved; the same command goes on from there"
    assert done.stderr.splitlines() == [said]


def test_a_closed_terminal_is_handled_as_sigterm_and_nothing_is_written_to_it_any_more(tmp_path):
    program = """
def job():
    with signals.waiting():
        send(signal.SIGHUP)
        print("to the terminal", flush=True)
        print("to the terminal", file=sys.stderr)
        raise Stopped(signals.caught(), "after step 7")
sys.exit(exit_code(job))
"""
    done = run(program)  # its output goes to pipes, which end with the terminal as `tee` does
    assert (done.returncode, done.stdout, done.stderr) == (129, "", "")
    log = tmp_path / "log"
    with log.open("w") as file:
        subprocess.run([sys.executable, "-c", BEGIN + program], cwd=ROOT, env=environment(), stdout=file, timeout=300)
    assert log.read_text() == "to the terminal\n"


def test_nohup_keeps_a_command_from_the_end_of_its_terminal():
    done = run("""
signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.exit(exit_code(lambda: [send(signal.SIGHUP), print("went on")]))
""")
    assert (done.returncode, done.stdout) == (0, "went on\n")


def test_a_signal_that_a_waiting_block_did_not_see_stops_after_it():
    done = run("""
def job():
    with signals.waiting():
        send(signal.SIGTERM)
    print("went on", flush=True)
sys.exit(exit_code(job))
""")
    assert (done.returncode, done.stdout) == (143, "")


@pytest.mark.parametrize(("number", "code", "ends"), [("SIGINT", 130, True), ("SIGTERM", 0, False)])
def test_a_second_ctrl_c_ends_at_once_and_a_second_sigterm_does_not(number, code, ends):
    done = run(f"""
with signals.handling():
    try:
        with signals.waiting():
            send(signal.{number}, times=2)
            print("went on", flush=True)
    except Stopped:
        pass
""")
    assert (done.returncode, "went on" in done.stdout) == (code, not ends)
    assert ("stopped at once by a second SIGINT" in done.stderr) == ends


def test_a_process_that_waits_inside_a_library_ends_all_the_same():
    # system() waits for its child in C and goes on waiting after a signal.
    done = run("""
import subprocess, threading
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
sys.exit(exit_code(lambda: print(ctypes.CDLL(None).system(b"sleep 3"))))
""")
    assert (done.returncode, done.stdout, done.stderr) == (143, "", AT_ONCE)


def test_a_long_call_that_a_waiting_block_makes_is_not_cut_short():
    """Such as the writing of a large checkpoint, or the wait of one rank for that of another."""
    done = run("""
import threading
def job():
    with signals.waiting():
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        ctypes.CDLL(None).system(b"sleep 2")
        os.write(1, b"saved")
sys.exit(exit_code(job))
""")
    assert (done.returncode, done.stdout) == (143, "saved"), done.stderr


def test_a_signal_of_an_earlier_command_does_not_end_a_later_one():
    done = run("""
exit_code(lambda: send(signal.SIGTERM))
assert signals.caught() == 0
sys.exit(exit_code(lambda: time.sleep(1)))
""")
    assert done.returncode == 0


def test_without_the_main_thread_nothing_changes():
    done = run("""
import threading
before = signal.getsignal(signal.SIGTERM)
seen = []
thread = threading.Thread(target=lambda: seen.append((exit_code(lambda: None), signal.getsignal(signal.SIGTERM))))
thread.start(); thread.join()
assert seen == [(0, before)], seen
""")
    assert done.returncode == 0, done.stderr
