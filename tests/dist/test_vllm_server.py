"""A real vLLM server as teacher, and as what writes the student's answers; one that is killed costs no step.

LLMDISTILL_VLLM_PYTHON names the interpreter of an environment with vLLM and llmdistill (docs/teachers.md).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from scipy import stats

from llmdistill.config import FactorizeConfig, StudentConfig
from llmdistill.embedded import locate
from llmdistill.errors import ServerLost
from llmdistill.models.companions import save_model
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.report.metrics_log import WRITER_GAP
from llmdistill.students.convert import compress_folder
from llmdistill.training.own_answers import Prompt, RolloutServer

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
    """vLLM's server of a model, by default the embedded teacher, as a process group of its own."""

    def __init__(self, log: Path, model: str | Path = TEACHER, *options: str) -> None:
        self.log, self.model, self.options, self.port = log, model, options, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        words = ["--model", str(locate(str(self.model))), "--served-model-name", str(self.model), *self.options]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--max-logprobs", K]
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        own |= {"VLLM_SERVER_DEV_MODE": "1"}
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
    running = Server(tmp_path_factory.mktemp("vllm") / "server.log", TEACHER, "--enforce-eager")
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
    assert done.returncode == ServerLost.code, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    step = logged(folder, "step")[-1]
    assert 1 <= step < 8
    assert said.endswith(f"start it again; step {step} is saved, and the same command goes on from there")
    launch(*given, ranks=2)
    assert logged(folder, "step") == [*range(1, 9)]
    assert logged(folder, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-4)
    assert largest_difference(folder, whole) < ROUNDING


WEIGHTS = ("--worker-extension-cls", "llmdistill.generation.vllm_worker.StudentWeights")
OWN = ("--method", "kd", "--kd.ratio", "1", "--data.on_policy", "1", "--train.steps", "4", "--scoring.models", "[]")
OWN += ("--teacher.model", TEACHER, "--data.max_length", "280", "--train.log_every", "1")


@pytest.fixture(scope="module", params=["dense", "factorized"])
def student(request, tmp_path_factory):
    """A server of an untrained student, compiled or not."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "dense":
        shutil.copytree(locate(TEACHER), folder / "student")
    else:
        compress_folder(locate(TEACHER), folder / "student", StudentConfig(factorize=FactorizeConfig(rank=24)))
    eager = ("--enforce-eager",) if request.param == "dense" else ()
    running = Server(folder / "server.log", folder / "student", *WEIGHTS, *eager)
    running.start()
    yield running
    running.kill()


def test_it_samples_from_the_students_distribution(student, tmp_path):
    """2,000 samples of one token, before and after it is handed over other weights, by the chi-square test."""
    model = load_model(student.model, dtype=torch.float32).eval()
    server = RolloutServer(student.url, vocabulary=2000, max_new_tokens=1, end_token_ids=[1], wait=60)
    prompt = load_tokenizer(student.model).encode("Describe the red house.")
    for changed in (False, True):
        if changed:
            torch.manual_seed(0)
            with torch.no_grad():
                for each in model.parameters():
                    each.add_(0.3 * each.std() * torch.randn_like(each))
            save_model(model, tmp_path / "other", student.model)
            server.take_weights(tmp_path / "other", "other")
            assert server.stamp() == "other"
        with torch.no_grad():
            expected = 2000 * model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        asked = [server.request(Prompt(prompt, seed)) for seed in range(2000)]
        counts = torch.bincount(torch.tensor([each.result().ids[0] for each in asked]), minlength=len(expected))
        likely = expected >= 5
        found = [*counts[likely].tolist(), int(counts[~likely].sum())]
        wanted = [*expected[likely].tolist(), float(expected[~likely].sum())]
        assert len(found) > 5
        assert stats.chisquare(found, wanted).pvalue > 1e-4, changed


def test_a_run_hands_over_its_student(student, launch, settings, tmp_path):
    words = (*settings, *OWN, "--student.model", str(student.model), "--data.rollout.url", student.url)
    launch(*words, "--output_dir", str(tmp_path / "run"), ranks=2)
    assert len(logged(tmp_path / "run", WRITER_GAP)) == 3
    assert max(logged(tmp_path / "run", WRITER_GAP)) < 1e-4
