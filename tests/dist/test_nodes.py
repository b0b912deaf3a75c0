"""Two nodes: a launcher on each, in network namespaces with addresses of their own that one cable connects.

Where namespaces are not allowed (they need root), both launchers run on this machine's own address.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import MAIN_JOB, PATIENCE, ROOT, environment, free_port, largest_difference, logged

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Node:
    """A place where a launcher is started."""

    address: str
    enter: Sequence[str] = ()
    """What enters it, in front of a command."""


@pytest.fixture(scope="module")
def nodes():
    with ExitStack() as stack:
        try:
            yield [*connected(stack)]
        except (OSError, subprocess.CalledProcessError):
            yield [Node("127.0.0.1")] * 2


def connected(stack: ExitStack) -> list[Node]:
    """Make two namespaces that end with the stack."""
    found, enter = [], []
    for _ in range(2):
        held = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", "echo made; exec sleep 900"], stdout=-1)
        stack.callback(held.wait)
        stack.callback(held.kill)
        assert held.stdout is not None
        if held.stdout.readline() != b"made\n":
            raise PermissionError
        enter.append(["nsenter", "--target", str(held.pid), "--net", "--uts"])
    first, second = (words[2] for words in enter)
    call("ip", "link", "add", "cable0", "netns", first, "type", "veth", "peer", "name", "cable1", "netns", second)
    for number, words in enumerate(enter):
        # The name has no address, so that gloo's own choice would be the loopback.
        found.append(Node(f"10.77.0.{number + 1}", words))
        call(*words, "hostname", f"node{number}")
        call(*words, "ip", "addr", "add", f"{found[-1].address}/24", "dev", f"cable{number}")
        for link in ("lo", f"cable{number}"):
            call(*words, "ip", "link", "set", link, "up")
    return found


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def run(
    nodes: Sequence[Node], folder: Path, launcher: Callable[[int], Sequence[str]], *arguments: str
) -> list[subprocess.CompletedProcess[str]]:
    """Start a launcher with the arguments on each node, and wait for both."""
    ranks = []
    with ExitStack() as stack:
        for number, node in enumerate(nodes):
            output, errors = (stack.enter_context((folder / f"{number}.{name}").open("w+")) for name in ("out", "err"))
            command = [*node.enter, *launcher(number), *arguments]
            process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=errors)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            ranks.append((process, output, errors))
        codes = [process.wait(PATIENCE) for process, _, _ in ranks]
        texts = [[(file.seek(0), file.read())[1] for file in files] for _, *files in ranks]
    return [subprocess.CompletedProcess([], code, *both) for code, both in zip(codes, texts, strict=True)]


def test_two_launchers_of_deepspeed_train_the_student_of_one(nodes, settings, trained, tmp_path):
    one, two = trained(ranks=2), tmp_path / "run"
    hosts = tmp_path / "hosts"
    hosts.write_text("node0 slots=1\nnode1 slots=1\n")
    port = str(free_port())

    def launcher(number: int) -> list[str]:
        node = ("--hostfile", str(hosts), "--no_ssh", "--node_rank", str(number))
        return [str(BIN / "deepspeed"), *node, "--master_addr", nodes[0].address, "--master_port", port]

    folder = ("--ds_config", "zero2", "--output_dir", str(two))
    first, second = run(nodes, tmp_path, launcher, MAIN_JOB, *settings, *folder)
    assert (first.returncode, second.returncode) == (0, 0), f"{first.stderr}\n{second.stderr}"
    assert largest_difference(one, two) == 0
    assert logged(one, "step") == logged(two, "step") == [1, 2, 3, 4, 5], "the metrics are not those of one rank"
    assert "The student is in" in first.stdout
    assert "loss" not in second.stdout


def test_two_launchers_of_torchrun_end_with_the_rank_that_fails(nodes, settings, tmp_path):
    port = str(free_port())

    def launcher(number: int) -> list[str]:
        node = ("--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(number))
        return [str(BIN / "torchrun"), *node, "--master_addr", nodes[0].address, "--master_port", port]

    fault = (str(Path(__file__).parents[1] / "faulty_run.py"), "training", "error", "1")
    folder = ("--ds_config", "zero2", "--output_dir", str(tmp_path / "run"))
    first, second = run(nodes, tmp_path, launcher, *fault, *settings, *folder)
    assert first.returncode != 0
    assert second.returncode != 0
    assert "error: rank 1 failed: ZeroDivisionError: broken on purpose" in second.stderr
    assert "traceback : rank 1 failed: ZeroDivisionError: broken on purpose" in second.stderr, "torchrun's own report"
    # Without namespaces both ranks are on one node, where rank 0 knows that rank 1 says why.
    assert ("error: rank 0 lost its connection to a rank of another node" in first.stderr) == bool(nodes[0].enter)
