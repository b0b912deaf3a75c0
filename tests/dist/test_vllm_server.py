"""A real vLLM server: the run is that of a cache, and a server that is killed costs no step.

LLMDISTILL_VLLM_PYTHON names the interpreter of an environment with vLLM (docs/teachers.md).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from llmdistill.embedded import locate
from llmdistill.errors import TeacherLost

from support import PATIENCE, environment, free_port, largest_difference, logged

PYTHON = os.environ.get("LLMDISTILL_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="LLMDISTILL_VLLM_PYTHON names no interpreter with vLLM")
K = "20"
WAIT = 30.0
TEACHER = "embedded:teacher"
ASKED = ("--method", "kd", "--scoring.models", "[]", "--teacher.model", TEACHER, "--data.max_length", "300")
ASKED += ("--data.train", "embedded:valid", "--student.factorize.rank", "16", "--train.steps", "8")
ROUNDING = 1e-4
"""Of a weight after so many steps: the answers of fp32 differ by 1e-5 with the batches in which vLLM computes them."""


class Server:
    """vLLM's server of the embedded teacher, as a process group of its own."""

    def __init__(self, log: Path) -> None:
        self.log, self.port = log, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        words = ["--model", str(locate(TEACHER)), "--served-model-name", TEACHER, "--host", "127.0.0.1"]
        words += ["--port", str(self.port), "--dtype", "float32", "--max-logprobs", K, "--enforce-eager"]
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *words],
                env={key: value for key, value in environment().items() if key != "PYTHONPATH"} | own,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        patience = time.monotonic() + 2 * PATIENCE
        while not self._answers():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < patience, self.log.read_text()
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            return urlopen(f"{self.url}/health", timeout=5).status == 200
        except (URLError, OSError):
            return False

    def kill(self) -> None:
        """SIGKILL for it and its engine."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Server(tmp_path_factory.mktemp("vllm") / "server.log")
    running.start()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def words(server):
    return (*ASKED, "--teacher.url", server.url, "--teacher.top_k", K, "--teacher.wait", str(WAIT))


@pytest.fixture(scope="module")
def whole(trained, words):
    return trained(*words)


def test_runs_from_it_and_from_caches_are_alike(whole, trained, launch, settings, words, tmp_path):
    kept = {"vllm": words, "hf": (*ASKED, "--cache.content", "top_k", "--cache.top_k", K)}
    for name, own in kept.items():
        folder = tmp_path / name
        launch("cache", *settings, *own, "--output", str(folder), program="llmdistill.cli")
        run = trained(*ASKED, "--teacher.cache", str(folder))
        assert logged(whole, "loss") == pytest.approx(logged(run, "loss"), rel=1e-5), name
        assert largest_difference(whole, run) < ROUNDING, name


def test_what_it_refuses_is_said(launch, settings, words, server, tmp_path):
    folder = ("--output_dir", str(tmp_path / "run"))
    more = launch(*settings, *words, "--teacher.top_k", "21", *folder, code=2).stderr
    assert "greater than max allowed: 20" in more
    other = launch(*settings, *words, "--teacher.model", str(locate(TEACHER)), *folder, code=2).stderr
    assert f"error: teacher.url {server.url}: it serves {TEACHER}, and teacher.model is " in other


def test_a_server_that_is_killed_costs_no_step(server, whole, rank_server, launch, settings, words, tmp_path):
    folder = tmp_path / "run"
    given = (*settings, *words, "--output_dir", str(folder))
    job = rank_server.start(given, ranks=2)
    patience = time.monotonic() + PATIENCE
    while not (folder / "metrics.jsonl").is_file() or not logged(folder, "step"):
        assert time.monotonic() < patience
        assert not job.is_over()
        time.sleep(0.01)
    server.kill()
    killed = time.monotonic()
    try:
        done = job.wait(WAIT + 60)
    finally:
        server.start()
    assert time.monotonic() - killed > WAIT
    assert done.returncode == TeacherLost.code, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    step = logged(folder, "step")[-1]
    assert 1 <= step < 8
    assert said.endswith(f"start it again; step {step} is saved, and the same command goes on from there")
    launch(*given, ranks=2)
    assert logged(folder, "step") == [*range(1, 9)]
    assert logged(folder, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-4)
    assert largest_difference(folder, whole) < ROUNDING
