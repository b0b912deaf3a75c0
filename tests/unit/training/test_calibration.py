"""The calibration data of a weighted factorization."""

import json

import pytest
import torch
from hostile import refuses
from tiny import save_decoder
from transformers import LlamaForCausalLM

import llmdistill
from llmdistill.config.command_line import parse_run
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.runtime.distributed import World
from llmdistill.step.passes import HookSums
from llmdistill.students.start import measure
from llmdistill.training import calibration
from llmdistill.training.calibration import calibration_batches
from llmdistill.training.plan import make_plan


@pytest.mark.parametrize(("examples", "micro", "ranks"), [(24, 4, 2), (5, 8, 5)])
def test_every_rank_gets_calibration_data_and_no_two_the_same(monkeypatch, examples, micro, ranks):
    calibration = "--student.factorize.calibration."
    words = ["--recipe", "quickstart", f"{calibration}examples", str(examples), f"{calibration}held_out", "6"]
    words += [f"{calibration}micro_batch_size", str(micro), "--ds_config", "zero2"]
    config = parse_run(words, METHODS)[0]
    plan = make_plan(config)
    data = plan.task.read(plan.models).prepare()
    seen: list[int] = []
    for rank in range(ranks):
        with World(rank=rank, size=ranks, device=torch.device("cpu")).entered():
            own, held_out = calibration_batches(config, plan.models, data)
        assert own, "a rank without a batch would not join the sums over the ranks"
        ids = [name for batch in own for row in batch.sample_ids for name in row]
        held = {name for batch in held_out for row in batch.sample_ids for name in row}
        assert len(held) >= 6
        assert not held & {*ids, *seen}
        seen += ids
    assert len(set(seen)) == len(seen) >= examples
    said = f"examples is {examples}, fewer than the {examples + 1} ranks"
    with World(rank=0, size=examples + 1, device=torch.device("cpu")).entered():
        refuses(said, calibration_batches, config, plan.models)


@pytest.mark.parametrize("kind", ["instructions", "text", "weighted", "streamed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_few_examples_are_measured_once_each(tmp_path, monkeypatch, capsys, kind, ranks):
    """Also by a comparison with the teacher, and no held-out example is calibrated on."""
    monkeypatch.setenv("LLMDISTILL_CACHE", str(tmp_path / "cache"))
    rows = [{"instruction": f"Count to {n}.", "output": "a b c"} for n in range(11)]
    train, lines = tmp_path / "rows.jsonl", [json.dumps(row) + "\n" for row in rows]
    train.write_text("".join(lines))
    words = ["--recipe", "quickstart", "--ds_config", "zero2", "--data.valid", "null", "--data.tests", "{}"]
    if kind == "text":
        train = tmp_path / "text.txt"
        train.write_text("".join(f"Lake {n} lies far from lake {3 * n}.\n\n" for n in range(30)))
        words += ["--data.kind", "text", "--method", "kd", "--data.max_length", "24"]
    reference = str(train)
    if kind == "weighted":
        (tmp_path / "one.jsonl").write_text('{"instruction": "Sing.", "output": "d e"}\n')
        reference = f"{train}=1,{tmp_path / 'one.jsonl'}=9"
    words += ["--data.streaming", "true"] if kind == "streamed" else ["--data.held_out", "0"]
    words += ["--data.train", reference, "--student.factorize.calibration.examples", "40"]
    words += ["--student.factorize.calibration.held_out", "20"]
    config = parse_run(words, METHODS)[0]
    plan = make_plan(config)
    data = plan.task.read(plan.models).prepare()
    calibrated: list[int] = []
    for rank in range(ranks):
        with World(rank=rank, size=ranks, device=torch.device("cpu")).entered():
            own, held_out = calibration_batches(config, plan.models, data)
        calibrated += [name for batch in own for row in batch.sample_ids for name in row]
    held = [name for batch in held_out for row in batch.sample_ids for name in row]
    assert len({*calibrated, *held}) == len(calibrated) + len(held)
    total = {"instructions": 11, "streamed": 11, "text": len(calibrated) + len(held), "weighted": None}[kind]
    assert total is None or (len(held), len(calibrated)) == (total // 3, total - total // 3)
    assert held
    said = f"calibration data: {len(calibrated):,} example(s), {len(held):,} more held out"
    assert said in capsys.readouterr().err
    compared = [name for batch in data.comparison_batches()[0] for row in batch.sample_ids for name in row]
    assert len(set(compared)) == len(compared)


UNIFORM = {"allocation": "uniform", "target_params": None, "rank": 4}
SETTINGS = {"target_params": "85%", "weighting": "gradients", "allocation": "loss"}
ROWS = [
    {"instruction": f"Count to {number}.", "output": " ".join("abcdefgh"[: number % 8 + 1])} for number in range(40)
]


@pytest.fixture
def teacher(tmp_path) -> LlamaForCausalLM:
    """A model in memory with the embedded tokenizer."""
    return LlamaForCausalLM.from_pretrained(save_decoder(tmp_path / "teacher", num_hidden_layers=2))


def made(model, folder=None, **given):
    settings = {**SETTINGS, **given}
    calibration = {"data": ROWS, "examples": 8, "held_out": 2, "folder": folder, **settings.pop("calibration", {})}
    return llmdistill.compress(model, calibration=calibration, **settings).state_dict()


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_one_measurement_serves_every_size_without_teacher_or_data(teacher, tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    assert same(made(teacher, kept, **UNIFORM), made(teacher, **UNIFORM))
    others = ({"target_params": "78%", "embedding_rank": "auto"}, {**UNIFORM, "rank": 7})
    own = [made(teacher, **other) for other in others]

    def fails(*_args, **_more):
        raise AssertionError("nothing is left to be measured")

    monkeypatch.setattr(measure, "measure_moments", fails)
    assert same(made(teacher, kept, **others[0]), own[0])  # the check on held-out data is this size's own
    monkeypatch.setattr(calibration, "calibration_batches", fails)
    assert same(made(teacher, kept, **others[1]), own[1])
    # Pivoted factors reach higher ranks, and a weighting by the inputs alone needs less than what is there.
    monkeypatch.undo()
    others = (
        {**UNIFORM, "form": "pivoted", "rank": 12},
        {**UNIFORM, "weighting": "activations"},
        {**UNIFORM, "weighting": "activations", "embedding_rank": 5},
    )
    own = [made(teacher, **other) for other in others]
    monkeypatch.setattr(HookSums, "count", fails)
    assert [same(made(teacher, kept, **other), each) for other, each in zip(others, own, strict=True)] == [True] * 3


def test_a_measurement_that_was_interrupted_goes_on_and_ends_the_same(teacher, tmp_path, monkeypatch):
    """In passes over the data for few matrices each, as many as fit into the memory, and one for the costs."""
    small = {"micro_batch_size": 1, "memory": 40_000 / 2**30}
    both = {"embedding_rank": 12, "target_params": "60%"}
    in_one_pass = made(teacher, calibration={"micro_batch_size": 1}, **both)
    batches, kills, real = [], [], HookSums.count

    def count(sums, mask):
        batches.append(mask)
        if kills and len(batches) == kills[0]:
            del kills[0]
            raise KeyboardInterrupt
        return real(sums, mask)

    monkeypatch.setattr(HookSums, "count", count)
    monkeypatch.setattr(measure, "KEEP_SECONDS", 0.0)
    whole = made(teacher, calibration=small, **both)
    usual = len(batches)
    assert usual > 3 * 8, "there are several passes"
    assert same(whole, in_one_pass)
    batches.clear()
    kills += [4, 7, 13, usual - 8 + 3 + 3]  # two in the first pass, one in the second, and one in that for the costs
    while kills:
        with pytest.raises(KeyboardInterrupt):
            made(teacher, tmp_path / "kept", calibration=small, **both)
    assert same(made(teacher, tmp_path / "kept", calibration=small, **both), whole)
    # Each batch of the moments was counted once, but for the three that kills interrupted; the costs began again.
    assert len(batches) == usual + 3 + 3


def test_a_folder_is_only_for_what_was_measured(teacher, tmp_path):
    made(teacher, tmp_path / "kept", **UNIFORM)
    remedy = "; choose another folder, or null to keep nothing"
    for other, said in (
        ({"calibration": {"seed": 1}}, "seed was 0 and is now 1"),
        ({"calibration": {"data": ROWS[1:]}}, r"content of data\.train was sha256:\w+ and is now sha256:\w+"),
        ({"max_length": 400}, r"data\.max_length was \d+ and is now 400"),
    ):
        with pytest.raises(UserError, match=f"it holds statistics of another measurement: {said}.*{remedy}"):
            made(teacher, tmp_path / "kept", **UNIFORM, **other)
    with torch.no_grad():
        teacher.lm_head.weight[0, 0] += 1
    refuses("content of teacher was sha256", made, teacher, tmp_path / "kept", **UNIFORM)
    # The same model by its folder: it has another identity, and keeps it.
    named = str(tmp_path / "teacher")
    assert same(made(named, tmp_path / "named", **UNIFORM), made(named, tmp_path / "named", **UNIFORM))


def test_data_that_cannot_be_read_leave_the_folder_free(teacher, tmp_path):
    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"prompt": "", "completion": "a"}\n')
    refuses("is empty", made, teacher, tmp_path / "kept", calibration={"data": str(broken)}, **UNIFORM)
    assert not (tmp_path / "kept").exists()


def test_rows_that_a_run_holds_out_are_not_calibrated_on():
    words = ["--recipe", "quickstart", "--ds_config", "zero2", "--data.valid", "null", "--data.tests", "{}"]
    words += ["--data.held_out", "60", "--student.factorize.calibration.examples", "2000"]
    config = parse_run(words, METHODS)[0]
    plan = make_plan(config)
    data = plan.task.read(plan.models).prepare()
    compared, of = data.comparison_batches()
    own, checked = calibration_batches(config, plan.models, data)
    names = [
        {name for batch in batches for row in batch.sample_ids for name in row} for batches in (compared, own, checked)
    ]
    assert (of, len(names[0])) == ("held-out rows", 60)
    assert len(names[0] | names[1] | names[2]) == sum(map(len, names)) == 2000
