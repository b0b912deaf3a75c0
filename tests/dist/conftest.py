"""Real runs: processes talk over gloo, and what they leave on disk is compared."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tiny import save_decoder

from support import FAULTY_RUN, MAIN_JOB


@pytest.fixture(autouse=True, scope="module")
def empty_plots():
    """Runs in the tests' own process draw as little as those of the rank server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "draw", lambda figure, renderer: None)
        yield


@pytest.fixture(scope="session")
def launch(rank_server):
    """Run the main job, or another program; fails with its output unless it ends as expected."""

    def run(*arguments: str, ranks: int = 1, code: int = 0, program: str = MAIN_JOB):
        done = rank_server.run(arguments, ranks=ranks, program=program)
        assert done.returncode == code, f"{' '.join(done.args)}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def tiny_teacher(tmp_path_factory):
    """A random Llama of two layers with grouped-query attention and the embedded tokenizer."""
    return save_decoder(tmp_path_factory.mktemp("teacher"), num_hidden_layers=2)


@pytest.fixture(scope="session")
def settings(tiny_teacher, tmp_path_factory):
    """Arguments of a short run of the tiny teacher, without scoring."""
    recipe = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    recipe.write_text(
        f"teacher: {{model: {tiny_teacher}}}\n"
        "student: {factorize: {rank: 6, weighting: none}}\n"
        "data: {train: embedded:train, held_out: 0}\n"
        "train: {steps: 5, global_batch_size: 8, learning_rate: 1.0e-3, save_every: 2, log_every: 1, dtype: fp32}\n",
        encoding="utf-8",
    )
    return ["--recipe", str(recipe)]


@pytest.fixture(scope="session")
def faulty(rank_server):
    """Run the main job with a fault or a signal: its stage, kind and rank, and the arguments of the job."""
    return lambda *arguments, ranks=1: rank_server.run(arguments, ranks=ranks, program=FAULTY_RUN)


@pytest.fixture(scope="session")
def trained(launch, settings, tmp_path_factory):
    """The folder of a finished run; equal arguments run once in a session."""
    runs: dict[tuple[object, ...], Path] = {}

    def run(*arguments: str, ranks: int = 1, ds_config: str = "zero2") -> Path:
        key = (*arguments, ranks, ds_config)
        if key not in runs:
            folder = tmp_path_factory.mktemp("run") / "run"
            launch(*settings, "--ds_config", ds_config, "--output_dir", str(folder), *arguments, ranks=ranks)
            runs[key] = folder
        return runs[key]

    return run
