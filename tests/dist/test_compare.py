"""A whole comparison with real runs: killed and resumed it ends with the same results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import ROOT, environment

pytestmark = pytest.mark.dist


def command(settings: list[str], folder: Path) -> list[str]:
    arguments = ["--methods", "none,sft,seqkd", "--seeds", "1", "--learning_rates", "1e-3"]
    scoring = ["--scoring.limit", "6", "--scoring.decoding", "greedy", "--data.tests.seen", "embedded:seen"]
    words = [*settings, *arguments, *scoring, "--data.max_prompt_length", "96", "--data.max_length", "104"]
    return [sys.executable, "-m", "llmdistill.cli", "compare", *words, "--output_dir", str(folder)]


def results(folder: Path) -> bytes:
    return (folder / "results.json").read_bytes()


def test_killed_comparison_goes_on_and_ends_with_the_same_results(settings, tmp_path):
    options = {"cwd": ROOT, "env": environment(), "text": True}
    folder = tmp_path / "comparison"
    whole = subprocess.run(command(settings, folder), capture_output=True, timeout=400, **options)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    expected = results(folder)
    methods = json.loads(expected)["methods"]
    assert list(methods) == ["teacher", "none", "sft", "seqkd"]
    assert all(0 <= method["rougeL"]["seen"]["mean"] <= 100 for method in methods.values())
    assert (folder / "report.html").is_file()
    assert (folder / "report.md").is_file()
    costs = json.loads((folder / "costs.json").read_text())
    # The teacher of this test is random, so its answers end late and take other lengths than the references.
    assert costs["seqkd"]["training_tokens"] == pytest.approx(costs["sft"]["training_tokens"], rel=0.15)
    provenance = next((folder / "seqkd").glob("*.provenance.json"))
    assert json.loads(provenance.read_text())["teacher_fingerprint"].startswith("sha256:")

    folder.rename(tmp_path / "whole")
    quiet = {**options, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(settings, folder), start_new_session=True, **quiet)
    patience = time.monotonic() + 300
    while not list(folder.glob("trials/sft-*/metrics.json")) and time.monotonic() < patience:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "results.json").exists(), "it was over before it could be killed"
    time.sleep(1)  # the run under way ends with its parent
    kept = next(folder.glob("trials/sft-*/student/model.safetensors")).stat().st_mtime_ns
    resumed = subprocess.run(command(settings, folder), capture_output=True, timeout=400, **options)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "(kept)" in resumed.stdout
    assert next(folder.glob("trials/sft-*/student/model.safetensors")).stat().st_mtime_ns == kept
    assert results(folder) == expected
