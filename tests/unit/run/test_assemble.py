"""Epochs of a text as steps: what a plan becomes once its text is tokenized."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config
from word_models import save_tokenizer

from llmdistill.config import RunConfig
from llmdistill.config.command_line import parse_run
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.run import assemble
from llmdistill.run.describe import describe, estimate, headline
from llmdistill.run.plan import Plan, make_plan
from llmdistill.runtime.distributed import World
from llmdistill.runtime.engine import learning_rate
from llmdistill.runtime.environment import Finding

TOKENS = [f"w{number}" for number in range(20)]
WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture
def parse(tmp_path: Path) -> Callable[..., RunConfig]:
    """A configuration of a run on a text of thirty documents of 25 words, packed to 12 tokens, 10 of them words."""
    folder = tmp_path / "teacher"
    tiny_config("bert", vocab_size=25, architectures=["BertForMaskedLM"]).save_pretrained(folder)
    save_tokenizer(folder, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TOKENS])
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join((TOKENS * 2)[n % 10 :][:25]) for n in range(30)), encoding="utf-8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"teacher: {{model: {folder}}}\nmethod: sft\nstudent: {{shape: 1x4x1}}\n"
        f"data: {{kind: text, train: {text}, max_length: 12, cache_dir: {tmp_path}/cache, text: {{pairs: false}}}}\n"
        "train: {global_batch_size: 8, learning_rate: 0.5, schedule: linear}\n"
    )

    def run(*arguments: str) -> RunConfig:
        return parse_run(["--ds_config", "zero2", "--recipe", str(recipe), *arguments], METHODS)[0]

    return run


def counted(config: RunConfig) -> Plan:
    plan = make_plan(config)
    return assemble.count_steps(plan, prepared(plan))


def prepared(plan: Plan) -> Any:
    return plan.task.read(plan.models).prepared(WORLD)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_missing_kernels_of_a_gpu_are_a_warning(parse, monkeypatch, capsys, device: str) -> None:
    monkeypatch.setattr(assemble, "kernels", lambda: Finding("warning", "fused losses", "no Triton", "install it"))
    assemble.check_machine(make_plan(parse()), World(0, 1, torch.device(device)))
    assert ("fused losses: no Triton; install it" in capsys.readouterr().err) == (device == "cuda")


SEQUENCES = 78
"""30 documents of 25 words with a separator between two are 779 tokens, ten a sequence; the last has nine."""


@pytest.mark.parametrize(("epochs", "steps"), [(1, 10), (4, 39)])
def test_epochs_are_steps_rounded_up(parse, epochs: int, steps: int) -> None:
    assert steps == -(-epochs * SEQUENCES // 8)
    plan = counted(parse("--train.epochs", str(epochs)))
    train = plan.config.train
    assert (train.steps, train.epochs) == (steps, None)
    assert learning_rate(train, steps - 1) == pytest.approx(0.5 / steps), "the decay ends with the last epoch"
    assert estimate(plan)["tokens"] == steps * 8 * 12
    assert f"{epochs} epoch(s) are {steps} steps" in headline(plan, "a text")
    assert counted(parse("--train.epochs", str(epochs))).config == plan.config, "a resumed run finds its steps"
    assert plan.asked.train.epochs == epochs, "the folder knows the run by what was asked"


def test_epochs_are_those_of_the_fraction_and_the_validation_text_stays_whole(parse, tmp_path: Path) -> None:
    valid = ("--data.valid", str(tmp_path / "text.txt"))
    config = parse("--train.epochs", "2", "--data.text.fraction", "0.2", *valid)
    data = prepared(make_plan(config))
    assert data.report.startswith("20 % of it: 6 documents, 6 segments, 150 tokens")
    assert (len(data.train[""].documents) - 1, len(data.valid.documents) - 1) == (6, 30)
    # 155 tokens with the separators are 16 sequences, the last of five left out.
    assert counted(config).config.train.steps == -(-2 * 15 // 8)
    plan = counted(parse("--train.steps", "7"))
    assert (plan.config.train.steps, plan.notes) == (7, [])
    assert counted(parse("--method", "none", "--train.epochs", "2")).config.train.epochs == 2, "nothing is trained"
    # A dry run does not know the steps.
    found = describe(make_plan(parse("--train.epochs", "3")))
    assert (found["estimate"], found["config"]["train"]["steps"], found["config"]["train"]["epochs"]) == (None, None, 3)
    assert "the steps of train.epochs 3, and so the cost, are known once" in found["notes"][0]
    json.dumps(found)


def test_a_share_too_small_for_a_sequence(parse, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(["w1 w2 w3"] * 30), encoding="utf-8")
    with pytest.raises(UserError, match=r"^of data\.text\.fraction 0\.04: the text has only \d tokens; .* fraction$"):
        counted(parse("--data.text.fraction", "0.04", "--train.epochs", "2"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--train.epochs", "2", "--train.steps", "9"), "train.epochs is 2 and train.steps 9: both say how long"),
        (("--data.kind", "instructions", "--data.max_length", "512", "--train.epochs", "2"), "passes over a text"),
        (("--data.text.fraction", "0"), "data.text.fraction is 0.0: give a share over 0 and up to 1"),
    ],
)
def test_bad_settings(parse, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        parse(*arguments)
