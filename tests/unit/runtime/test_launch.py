"""What launchers say, and which hosts are asked.

The variables of Slurm are those that a step of two nodes of Slurm 22.05 had; the ssh is one that this test has written.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
from hostile import refuses
from torch.distributed import DistNetworkError, TCPStore

from llmdistill.errors import Stopped, UserError
from llmdistill.runtime import launch
from llmdistill.runtime.hosts import check_hosts, read_hosts
from llmdistill.runtime.launch import launched_ranks, launched_ranks_of_node, prepare_joining, rank_of_task

from support import PATIENCE, ROOT, environment


def variables(text: str) -> dict[str, str]:
    return dict(each.split("=") for each in text.split())


TASK = variables(
    "SLURM_JOB_ID=31 SLURM_STEP_ID=2 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_NUM_TASKS=3 "
    "SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_STEP_NODELIST=node[0-1]"
)
BATCH_SCRIPT = variables(
    "SLURM_JOB_ID=31 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=2(x2) "
    "SLURM_JOB_NODELIST=node[0-1]"
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*names, *TASK, "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that what the code sets is taken back
        monkeypatch.delenv(name)


def given(monkeypatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_task_of_srun_is_a_rank(monkeypatch):
    given(monkeypatch, **TASK)
    assert (launched_ranks(), launched_ranks_of_node()) == (3, 1)
    assert rank_of_task(TASK) == variables(
        "RANK=2 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 LOCAL_SIZE=1 MASTER_ADDR=node0 MASTER_PORT=15033"
    )
    assert rank_of_task({**TASK, "MASTER_ADDR": "10.0.0.1"})["MASTER_ADDR"] == "10.0.0.1", "the user's is kept"
    for other in (BATCH_SCRIPT, {**TASK, "SLURM_STEP_NUM_TASKS": "1"}, {}):
        assert rank_of_task(other) == {}, "it is none of several tasks"


def test_another_launcher_within_a_task_wins(monkeypatch):
    given(monkeypatch, **TASK, WORLD_SIZE="8", RANK="5", LOCAL_SIZE="4")
    assert (launched_ranks(), launched_ranks_of_node()) == (8, 4)


def test_lists_of_nodes_and_tasks():
    for variable, value, name, expected in (
        ("NODELIST", "gpu[01-04,07],login1", "MASTER_ADDR", "gpu01"),
        ("NODELIST", "rack[2,5]n[10-12]-ib", "MASTER_ADDR", "rack2n10-ib"),
        ("TASKS_PER_NODE", "8,3(x2),1", "LOCAL_WORLD_SIZE", "3"),
    ):
        assert rank_of_task({**TASK, f"SLURM_STEP_{variable}": value})[name] == expected


def test_a_rank_without_a_gpu_or_without_the_address_of_rank_0_is_refused(monkeypatch):
    given(monkeypatch, RANK="9", LOCAL_RANK="1", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8", MASTER_ADDR="127.0.0.1")
    with pytest.raises(UserError, match=r"LOCAL_RANK is 1, but rank 9 on \S+ sees 1 GPU\(s\)"):
        prepare_joining(1)
    prepare_joining(2)
    given(monkeypatch, MASTER_ADDR="no-such-node.invalid")
    with pytest.raises(UserError, match=r"MASTER_ADDR is 'no-such-node.invalid', which rank 9 on \S+ does not know"):
        prepare_joining(None)


def test_nodes_talk_on_the_interface_towards_rank_0(monkeypatch):
    class Probe:
        """A socket that the system routes to the network of the other address."""

        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, other: str) -> None:
            self.own = {"wan": "198.51.100.7", "ib": "10.0.0.3", launch._ELSEWHERE: "198.51.100.7"}.get(other, other)

        def getsockname(self) -> tuple[str, int]:
            return self.own, 1

    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(socket, "getaddrinfo", lambda other, *_, **__: [(0, 0, 0, "", other)])
    links = {"lo": "127.0.0.1", "eth0": "198.51.100.7", "ib0": "10.0.0.3"}
    held = {name: [SimpleNamespace(address=address)] for name, address in links.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: held)
    given(monkeypatch, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_SIZE="1")
    # On many systems a node's own name is the loopback on that node: then the default route decides.
    for master, interface in (("ib", "ib0"), ("wan", "eth0"), ("127.0.1.1", "eth0")):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        given(monkeypatch, MASTER_ADDR=master)
        prepare_joining(None)
        assert os.environ["GLOO_SOCKET_IFNAME"] == interface
    given(monkeypatch, GLOO_SOCKET_IFNAME="mine")
    prepare_joining(None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    given(monkeypatch, LOCAL_SIZE="2")  # one node
    prepare_joining(None)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def fail_to_join(error: Exception) -> None:
    with launch.joining(timedelta(minutes=15)):
        while any(isinstance(thread, threading.Timer) for thread in threading.enumerate()):
            time.sleep(0.01)  # the notice is being written
        raise error


def test_missing_ranks_are_said_while_and_after_waiting(monkeypatch, capsys):
    given(monkeypatch, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="node0", MASTER_PORT="29500")
    monkeypatch.setattr(launch, "_NOTICE_SECONDS", 0.01)
    said = r"could not join 2 ranks at node0:29500 within 15 minutes \(timed out\): start"
    with pytest.raises(UserError, match=said):
        fail_to_join(DistNetworkError("timed out"))
    assert "has not found all 2 ranks at node0:29500 yet" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="no compiler"):
        fail_to_join(RuntimeError("no compiler"))


def test_a_busy_port_is_named(monkeypatch):
    with socket.create_server(("", 0)) as server:
        busy = server.getsockname()[1]
        given(monkeypatch, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(busy))
        said = rf"MASTER_PORT is {busy}, on which another process .* --master_port N"
        with pytest.raises(UserError, match=said), launch.joining(timedelta(minutes=15)):
            TCPStore("127.0.0.1", busy, 2, is_master=True)


RANKS = """
import sys
from llmdistill.runtime import launch
from llmdistill.runtime.terminal import exit_code
launch._KILL_SECONDS = {patience}
rank = "import os, signal, sys, time; rank = int(os.environ['RANK'])\\n" + {rank!r}
sys.exit(exit_code(lambda: launch.run_ranks([sys.executable, "-c", rank], 2)))
"""
FOREVER = "time.sleep(1e6)\n"


def start_ranks(rank: str, patience: float = 300) -> subprocess.Popen[str]:
    program = RANKS.format(rank=rank, patience=patience)
    options = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | {"text": True, "cwd": ROOT, "env": environment()}
    # Tests that run under nohup ignore SIGHUP, and so would the program.
    options["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, "-c", program], **options)


def test_ranks_know_their_places_and_their_end_is_the_launcher_s():
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR")
    job = start_ranks(f"time.sleep(rank)\nprint(rank, *(os.environ[each] for each in {names}))")
    assert job.communicate(timeout=PATIENCE) == ("0 2 0 2 127.0.0.1\n1 2 1 2 127.0.0.1\n", "")
    assert job.returncode == 0


@pytest.mark.parametrize("ignores", [False, True])
def test_the_failure_of_a_rank_ends_the_others(ignores):
    stays = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if ignores else ""
    job = start_ranks(f"sys.exit(3) if rank else None\n{stays}{FOREVER}", patience=1 if ignores else 300)
    job.communicate(timeout=PATIENCE)
    assert job.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_ranks_that_are_not_ready_for_it(number):
    job = start_ranks(f"print('ready\\n', end='', flush=True)\n{FOREVER}")
    assert [job.stdout.readline(), job.stdout.readline()] == ["ready\n", "ready\n"]
    job.send_signal(number)
    _, said = job.communicate(timeout=PATIENCE)
    assert (job.returncode, said) == (128 + number, f"error: {Stopped(number)}\n")


def test_ranks_of_one_machine_need_no_launcher_of_deepspeed(monkeypatch):
    monkeypatch.setattr(launch, "has_gpu_device", lambda: False)
    for flags, count in (("", 1), ("--num_gpus 3", 3), ("--num_gpus=2 --log_level info", 2)):
        assert launch.local_ranks(flags.split()) == count
    for flags in ("--num_gpus 2 --num_nodes 2", "--include=localhost:1", "--no_ssh --node_rank 0"):
        assert launch.local_ranks(flags.split()) is None
    for flags in ("--num_gpus=0", "--num_gpus two", "--num_gpus"):
        with pytest.raises(UserError, match=r"--num_gpus \S*: give the number of ranks, 1 or more"):
            launch.split_launcher_flags(flags.split())


SSH = """#!/bin/sh
for word; do host=$last; last=$word; done
echo "$host" >> "$ASKED"
case $host in dead*) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255;; esac
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    return lambda: sorted((tmp_path / "asked").read_text().split()) if (tmp_path / "asked").exists() else []


@pytest.fixture
def hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(
        "# two that live, two that do not\nnode1 slots=8\n\nnode2  slots=8 # rack 3\ndead1 slots=8\ndead2 slots=8\n"
    )
    return file


def test_hosts_that_do_not_answer_are_named(hostfile, asked):
    with pytest.raises(UserError) as failed:
        check_hosts(["--num_gpus", "8", f"--hostfile={hostfile}"])
    for said in (
        "2 of 4 hosts cannot be reached",
        "dead1 (ssh: connect to host dead1 port 22: No route to host); dead2 (",
    ):
        assert said in str(failed.value)
    assert asked() == ["dead1", "dead2", "node1", "node2"]


@pytest.mark.parametrize(("flags", "expected"), [("--num_nodes 2", ["node1", "node2"]), ("--num_nodes=1", ["node1"])])
def test_only_hosts_of_the_run_are_asked(hostfile, asked, flags, expected):
    check_hosts(["--num_gpus", "2"])
    for others in (["--no_ssh", "--node_rank", "1"], ["--include", "node1@node2"]):
        check_hosts([*others, "--hostfile", str(hostfile)])
    assert asked() == []
    check_hosts([*flags.split(), "--hostfile", str(hostfile)])
    assert asked() == expected


def test_bad_hostfiles(tmp_path):
    refuses("there is no such file", read_hosts, tmp_path / "hosts")
    for text, said in (
        ("node1 slots=8\nnode2 8\n", "hosts: Hostfile contains a bad entry: node2 8; write a line such as"),
        ("node1 slots=8\nnode1 slots=8\n", "hosts: Hostfile contains multiple entries for node1; write"),
        ("# none\n", "hosts: Hostfile is empty or not formatted correctly; write"),
    ):
        (tmp_path / "hosts").write_text(text)
        refuses(said, read_hosts, tmp_path / "hosts")
