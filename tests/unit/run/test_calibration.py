"""The calibration data of a weighted factorization."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import save_decoder
from transformers import LlamaForCausalLM

import llmdistill
from llmdistill.config.command_line import parse_run
from llmdistill.errors import UserError
from llmdistill.factorize import measure
from llmdistill.factorize.counting import layer_linears
from llmdistill.methods import METHODS
from llmdistill.models.passes import HookSums
from llmdistill.run import calibration
from llmdistill.run.calibration import calibration_batches
from llmdistill.run.plan import make_plan
from llmdistill.runtime.distributed import World

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("examples", "micro", "ranks"), [(24, 4, 2), (5, 8, 5)])
def test_every_rank_gets_calibration_data_and_no_two_the_same(monkeypatch, examples, micro, ranks):
    calibration = "--student.factorize.calibration."
    words = ["--recipe", "quickstart", f"{calibration}examples", str(examples), f"{calibration}held_out", "6"]
    words += [f"{calibration}micro_batch_size", str(micro), "--ds_config", str(ROOT / "ds_configs/zero2.json")]
    config = parse_run(words, METHODS)[0]
    plan = make_plan(config)
    data = plan.task.read(plan.models).prepared(World.alone())
    seen: list[int] = []
    for rank in range(ranks):
        world = World(rank=rank, size=ranks, device=torch.device("cpu"))
        own, held_out = calibration_batches(config, plan.models, world, data)
        assert own, "a rank without a batch would not join the sums over the ranks"
        ids = [name for batch in own for row in batch.sample_ids for name in row]
        held = {name for batch in held_out for row in batch.sample_ids for name in row}
        assert len(held) >= 6
        assert not held & {*ids, *seen}
        seen += ids
    assert len(set(seen)) == len(seen) >= examples
    many = World(rank=0, size=examples + 1, device=torch.device("cpu"))
    with pytest.raises(UserError, match=f"examples is {examples}, fewer than the {examples + 1} ranks"):
        calibration_batches(config, plan.models, many)


SETTINGS = {"target_params": "85%", "weighting": "gradients", "allocation": "loss"}
ROWS = [
    {"instruction": f"Count to {number}.", "output": " ".join("abcdefgh"[: number % 8 + 1])} for number in range(40)
]


@pytest.fixture
def teacher(tmp_path) -> LlamaForCausalLM:
    """A model in memory with the embedded tokenizer."""
    return LlamaForCausalLM.from_pretrained(save_decoder(tmp_path / "teacher", num_hidden_layers=2))


ONE_BY_ONE = {"micro_batch_size": 1}


def made(model, folder=None, **given):
    settings = {**SETTINGS, **given}
    calibration = {"data": ROWS, "examples": 8, "held_out": 2, "folder": folder, **settings.pop("calibration", {})}
    return llmdistill.compress(model, calibration=calibration, **settings).state_dict()


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_one_measurement_serves_every_size_without_teacher_or_data(teacher, tmp_path, monkeypatch):
    kept, one_rank = tmp_path / "kept", {"allocation": "uniform", "target_params": None, "rank": 4}
    assert same(made(teacher, kept, **one_rank), made(teacher, **one_rank))
    others = ({"target_params": "78%"}, {**one_rank, "rank": 7})
    own = [made(teacher, **other) for other in others]

    def fails(*_args, **_more):
        raise AssertionError("nothing is left to be measured")

    monkeypatch.setattr(measure, "measure_moments", fails)
    assert same(made(teacher, kept, **others[0]), own[0])  # the check on held-out data is this size's own
    monkeypatch.setattr(calibration, "calibration_batches", fails)
    assert same(made(teacher, kept, **others[1]), own[1])
    # Pivoted factors reach higher ranks, and a weighting by the inputs alone needs less than what is there.
    monkeypatch.undo()
    others = ({"form": "pivoted", "rank": 28, **one_rank}, {"weighting": "activations", **one_rank})
    own = [made(teacher, **other) for other in others]
    monkeypatch.setattr(HookSums, "count", fails)
    assert [same(made(teacher, kept, **other), each) for other, each in zip(others, own, strict=True)] == [True] * 2


def test_a_pass_that_was_interrupted_goes_on_and_ends_the_same(teacher, tmp_path, monkeypatch):
    whole, passes = made(teacher, calibration=ONE_BY_ONE), []
    monkeypatch.setattr(measure, "KEEP_SECONDS", 0.0)
    real = HookSums.count

    def killed(sums, mask):
        passes.append(mask)
        if len(passes) in (4, 7, 13):  # twice in the pass for the moments, and once in that for the costs
            raise KeyboardInterrupt
        return real(sums, mask)

    monkeypatch.setattr(HookSums, "count", killed)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            made(teacher, tmp_path / "kept", calibration=ONE_BY_ONE)
    assert same(made(teacher, tmp_path / "kept", calibration=ONE_BY_ONE), whole)
    # Each batch of the moments was counted once, but for the two that kills interrupted; the costs began again.
    assert len(passes) == 8 + 2 + 3 + 8


def test_a_measurement_goes_on_where_it_was_killed(teacher, tmp_path, monkeypatch):
    kept, whole, passes = tmp_path / "kept", made(teacher), []
    small = {"calibration": {"memory": 40_000 / 2**30}}
    real = measure.measure_moments

    def killed(model, names, *args, **more):
        if len(passes) == 2:
            raise KeyboardInterrupt
        passes.append(names)
        return real(model, names, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(measure, "measure_moments", killed)
        with pytest.raises(KeyboardInterrupt):
            made(teacher, kept, **small)
    done = {f"model.{file.name.removesuffix('.safetensors')}" for file in (kept / "gradients").glob("*.safetensors")}
    assert done == {name for names in passes for name in names}
    measured = []
    monkeypatch.setattr(
        measure, "measure_moments", lambda model, names, *a, **m: measured.extend(names) or real(model, names, *a, **m)
    )
    assert same(made(teacher, kept, **small), whole)
    assert set(measured) == set(layer_linears(teacher)) - done


def test_a_folder_is_only_for_what_was_measured(teacher, tmp_path):
    made(teacher, tmp_path / "kept")
    remedy = "; choose another folder, or null to keep nothing"
    for other, said in (
        ({"calibration": {"seed": 1}}, "seed was 0 and is now 1"),
        ({"calibration": {"data": ROWS[1:]}}, r"content of data\.train was sha256:\w+ and is now sha256:\w+"),
        ({"max_length": 400}, r"data\.max_length was \d+ and is now 400"),
    ):
        with pytest.raises(UserError, match=f"it holds statistics of another measurement: {said}.*{remedy}"):
            made(teacher, tmp_path / "kept", **other)
    with torch.no_grad():
        teacher.lm_head.weight[0, 0] += 1
    with pytest.raises(UserError, match="content of teacher was sha256"):
        made(teacher, tmp_path / "kept")
    # The same model by its folder: it has another identity, and keeps it.
    named = str(tmp_path / "teacher")
    assert same(made(named, tmp_path / "named"), made(named, tmp_path / "named"))
