"""A whole comparison with real runs: killed and resumed it ends with the same results."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist


def command(settings: list[str], folder: Path) -> list[str]:
    arguments = ["--methods", "none,sft,seqkd", "--seeds", "1", "--learning_rates", "1e-3"]
    scoring = ["--scoring.limit", "6", "--scoring.decoding", "greedy", "--data.tests.seen", "embedded:seen"]
    text = folder.with_name("towns.txt")
    text.write_text("Town 1 lies by a lake. " * 100)
    scoring += ["--data.tests.towns", str(text), "--scoring.window", "64"]
    words = [*settings, *arguments, *scoring, "--data.max_prompt_length", "96", "--data.max_length", "104"]
    return ["compare", *words, "--output_dir", str(folder)]


def results(folder: Path) -> bytes:
    return (folder / "results.json").read_bytes()


def test_killed_comparison_goes_on_and_ends_with_the_same_results(rank_server, launch, settings, tmp_path):
    cli = {"program": "llmdistill.cli", "ranks": 0}
    folder = tmp_path / "comparison"
    launch(*command(settings, folder), **cli)
    expected = results(folder)
    methods = json.loads(expected)["methods"]
    assert list(methods) == ["teacher", "none", "sft", "seqkd"]
    assert all(0 <= method["rougeL"]["seen"]["mean"] <= 100 for method in methods.values())
    for name, model in (("teacher", "teacher"), ("none", "untrained"), ("sft", "student")):
        run = json.loads((folder / methods[name]["runs"][0] / "metrics.json").read_text())
        assert methods[name]["texts"]["towns"]["mean"] == run[model]["texts"]["towns"]["perplexity"]
    assert (folder / "report.html").is_file()
    assert "towns (perplexity, 6 of" in (folder / "report.md").read_text()
    costs = json.loads((folder / "costs.json").read_text())
    # The teacher of this test is random, so its answers end late and take other lengths than the references.
    assert costs["seqkd"]["training_tokens"] == pytest.approx(costs["sft"]["training_tokens"], rel=0.15)
    provenance = next((folder / "seqkd").glob("*.provenance.json"))
    assert json.loads(provenance.read_text())["teacher_fingerprint"].startswith("sha256:")

    folder.rename(tmp_path / "whole")
    job = rank_server.start(command(settings, folder), **cli)
    patience = time.monotonic() + 300
    while not list(folder.glob("trials/sft-*/metrics.json")) and time.monotonic() < patience:
        time.sleep(0.05)
    job.kill()
    assert not (folder / "results.json").exists(), "it was over before it could be killed"
    time.sleep(1)  # the run under way ends with its parent
    kept = next(folder.glob("trials/sft-*/student/model.safetensors")).stat().st_mtime_ns
    resumed = launch(*command(settings, folder), **cli)
    assert "(kept)" in resumed.stdout
    assert next(folder.glob("trials/sft-*/student/model.safetensors")).stat().st_mtime_ns == kept
    assert results(folder) == expected
