"""What a signal does to a command, in processes of their own."""

import os
import sys
import traceback
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

BEGIN = """
import ctypes, os, signal, subprocess, sys, threading, time
from llmdistill.errors import Stopped
from llmdistill.runtime import signals
from llmdistill.runtime.terminal import exit_code
signals._BLOCKED_SECONDS = 0.3
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup ignore it, and so would a command
sys.modules.pop("llmdistill.runtime.distributed", None)  # whose process group an earlier test has joined

def send(number, times=1):
    for _ in range(times):
        os.kill(os.getpid(), number)
        time.sleep(signals._AGAIN_SECONDS * 1.2)

def send_soon():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
"""
AT_ONCE = "error: stopped by SIGTERM; the same command goes on from what is finished\n"


def run(program: str, log=None, **environment: str) -> SimpleNamespace:
    """Run a program in a fork of this process; its output goes to pipes, or to a file."""
    (out, its_out), (err, its_err) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        if log is not None:
            its_out = os.open(log, os.O_WRONLY | os.O_CREAT)
        for number, file in ((1, its_out), (2, its_err)):
            os.dup2(file, number)
        for file in (out, its_out, err, its_err):
            os.close(file)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not those of pytest
        os.environ |= environment
        code = 0
        try:
            exec(BEGIN + program, {})
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    os.close(its_out)
    os.close(its_err)
    with os.fdopen(out) as output, os.fdopen(err) as errors:
        said = {"stdout": output.read(), "stderr": errors.read()}
    return SimpleNamespace(returncode=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), **said)


DURING = "sys.exit(exit_code(lambda: send(signal.SIGTERM)))"
BEFORE = """
from llmdistill.runtime import terminal
terminal.Activity = lambda _: send(signal.SIGTERM)
sys.exit(exit_code(print))
"""


@pytest.mark.parametrize("program", [DURING, BEFORE], ids=["during the job", "before it"])
@pytest.mark.parametrize(("place", "said"), [({}, AT_ONCE), ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "")])
def test_a_command_ends_with_one_line_of_rank_0_and_the_code_of_a_shell(place, said, program):
    done = run(program, **place)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", said)


def test_a_command_that_keeps_nothing_says_that_it_begins_anew(tmp_path):
    done = run(f"""
import llmdistill
from llmdistill import cli
from llmdistill.runtime import terminal
cli.quiet_transformers = int
llmdistill.export = lambda *_, **__: send(signal.SIGINT)
sys.exit(cli.main("export --to dense --model m --output {tmp_path / "new"}".split()))
""")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "error: stopped by SIGINT before the end; the same command begins anew\n"


def test_a_signal_that_torch_swallows_ends_the_export_of_a_graph(tmp_path):
    done = run(f"""
import contextlib
import torch
from llmdistill.serving import onnx_export
def swallow(*_, **__):
    with contextlib.suppress(BaseException):
        send(signal.SIGINT)
torch.onnx.export = swallow
onnx_export.make_traceable = lambda _: (torch.nn.Identity(), dict(), [], dict())
onnx_export.attention_implementation = onnx_export._nest_past = lambda _: ()
model = torch.nn.Identity()
model.set_attn_implementation = print
sys.exit(exit_code(lambda: onnx_export._write_graph(model, "{tmp_path / "model.onnx"}")))
""")
    assert done.returncode == 130, done.stderr
    assert "error: stopped by SIGINT" in done.stderr


def test_a_compiler_that_ctrl_c_has_ended_is_no_failure():
    done = run("""
def job():
    with signals.waiting():
        send(signal.SIGTERM)
        raise RuntimeError("C++ compile error")
sys.exit(exit_code(job))
""")
    assert (done.returncode, done.stderr) == (143, AT_ONCE)


def test_a_block_that_waits_sees_the_signal_and_is_not_interrupted():
    done = run("""
def job():
    with signals.waiting():
        send(signal.SIGINT)
        print(signals.first_signal(), flush=True)
        raise Stopped(signals.first_signal(), "after step 7")
sys.exit(exit_code(job))
""")
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
        raise Stopped(signals.first_signal(), "after step 7")
sys.exit(exit_code(job))
"""
    done = run(program)  # its output goes to pipes, which end with the terminal as `tee` does
    assert (done.returncode, done.stdout, done.stderr) == (129, "", "")
    run(program, log=tmp_path / "log")
    assert (tmp_path / "log").read_text() == "to the terminal\n"
    # nohup keeps a command from the end of its terminal.
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    done = run(f"{ignored}sys.exit(exit_code(lambda: [send(signal.SIGHUP), print('went on')]))")
    assert (done.returncode, done.stdout) == (0, "went on\n")


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
    done = run("""
# system() waits for its child in C and goes on waiting after a signal.
send_soon()
sys.exit(exit_code(lambda: print(ctypes.CDLL(None).system(b"sleep 1"))))
""")
    assert (done.returncode, done.stdout, done.stderr) == (143, "", AT_ONCE)


def test_a_long_call_that_a_waiting_block_makes_is_not_cut_short_and_the_command_stops_after_the_block():
    done = run("""
def job():
    with signals.waiting():
        send_soon()
        ctypes.CDLL(None).system(b"sleep 1")
        os.write(1, b"saved")
    os.write(1, b"went on")
sys.exit(exit_code(job))
""")
    assert (done.returncode, done.stdout) == (143, "saved"), done.stderr


def test_a_signal_of_an_earlier_command_does_not_end_a_later_one_and_without_the_main_thread_nothing_changes():
    done = run("""
exit_code(lambda: send(signal.SIGTERM))
assert signals.first_signal() == 0
assert exit_code(lambda: time.sleep(1)) == 0
before = signal.getsignal(signal.SIGTERM)
seen = []
thread = threading.Thread(target=lambda: seen.append((exit_code(lambda: None), signal.getsignal(signal.SIGTERM))))
thread.start(); thread.join()
assert seen == [(0, before)], seen
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("UserError('data.train is missing; name a file')", "data.train is missing; name a file (rank 1)"),
        ("ZeroDivisionError('broken on purpose')", "rank 1 failed: ZeroDivisionError: broken on purpose"),
        ("RankError('rank 0 failed with OSError')", None),
    ],
)
def test_torchrun_s_report_tells_why_a_rank_has_failed(tmp_path, monkeypatch, error, said):
    file = tmp_path / "error.json"
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(file)}
    program = f"""
from llmdistill.errors import RankError, UserError
from llmdistill.runtime import terminal
terminal._HEARING_SECONDS = 0
def job():
    raise {error}
sys.exit(exit_code(job))
"""
    assert run(program, **place).returncode != 0
    # What torchrun makes of the file of a rank that has failed; without a file it can only tell its exit code.
    failure = ProcessFailure(local_rank=1, pid=0, exitcode=1, error_file=str(file))
    reported = ChildFailedError("run", {1: failure}).format_msg()
    assert f"traceback : {said or 'To enable traceback see'}" in reported
