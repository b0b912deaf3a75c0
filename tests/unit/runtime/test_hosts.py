"""The hostfile of a launch: what is refused, and which hosts are asked, by an ssh that this test has written."""

import os

import pytest

from llmdistill.errors import UserError
from llmdistill.runtime.hosts import check_hosts, read_hosts

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
    assert "2 of 4 hosts cannot be reached" in str(failed.value)
    assert "dead1 (ssh: connect to host dead1 port 22: No route to host); dead2 (" in str(failed.value)
    assert asked() == ["dead1", "dead2", "node1", "node2"]


@pytest.mark.parametrize(("flags", "expected"), [("--num_nodes 2", ["node1", "node2"]), ("--num_nodes=1", ["node1"])])
def test_only_hosts_of_the_run_are_asked(hostfile, asked, flags, expected):
    check_hosts(["--num_gpus", "2"])
    for others in (["--no_ssh", "--node_rank", "1"], ["--include", "node1@node2"]):
        check_hosts([*others, "--hostfile", str(hostfile)])
    assert asked() == []
    check_hosts([*flags.split(), "--hostfile", str(hostfile)])
    assert asked() == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node1 slots=8\nnode2 8\n", "hosts:2: 'node2 8' is no host"),
        ("node1 slots=8\nnode1 slots=8\n", "hosts:2: node1 is there twice"),
        ("# none\n", "it names no host"),
        (None, "there is no such file"),
    ],
)
def test_bad_hostfiles(tmp_path, text, said):
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    with pytest.raises(UserError, match=said):
        read_hosts(tmp_path / "hosts")
