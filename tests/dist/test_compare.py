"""A whole comparison with real runs: killed and resumed it ends with the same results."""

import json
import shlex
import time
from pathlib import Path

ASKED = shlex.split("""--methods none,seqkd --seeds 1 --learning_rates 1e-3 --scoring.limit 2 --scoring.decoding greedy
--data.tests.seen embedded:seen --data.train embedded:valid --data.max_prompt_length 96 --data.max_length 104""")


def command(settings: list[str], folder: Path) -> list[str]:
    return ["compare", *settings, *ASKED, "--output_dir", str(folder)]


def results(folder: Path) -> bytes:
    return (folder / "results.json").read_bytes()


def test_killed_comparison_goes_on_and_ends_with_the_same_results(rank_server, launch, settings, tmp_path):
    cli = {"program": "llmdistill.cli", "ranks": 0}
    folder = tmp_path / "comparison"
    launch(*command(settings, folder), **cli)
    expected = results(folder)
    methods = json.loads(expected)["methods"]
    assert list(methods) == ["teacher", "none", "seqkd"]
    for name, model in (("teacher", "teacher"), ("none", "untrained"), ("seqkd", "student")):
        run = json.loads((folder / methods[name]["runs"][0] / "metrics.json").read_text())
        assert methods[name]["rougeL"]["seen"]["mean"] == run[model]["rougeL"]["seen"]
    assert (folder / "report.html").is_file()
    provenance = next((folder / "seqkd").glob("*.provenance.json"))
    assert json.loads(provenance.read_text())["teacher_fingerprint"].startswith("sha256:")

    folder.rename(tmp_path / "whole")
    job = rank_server.start(command(settings, folder), **cli)
    job.kill_when(lambda: any(folder.glob("trials/seqkd-*/checkpoints/step-*/manifest.json")))
    assert not (folder / "results.json").exists(), "it was over before it could be killed"
    time.sleep(1)  # the run under way ends with its parent
    resumed = launch(*command(settings, folder), **cli)
    assert "(kept)" in resumed.stdout
    assert results(folder) == expected
