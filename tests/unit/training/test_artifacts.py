"""The run's folder: ours, another's, or none's; finished or not."""

import functools
import json
import multiprocessing
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hostile import refuses
from transformers import LlamaConfig

from llmdistill.config import FactorizeConfig, StudentConfig
from llmdistill.config.command_line import parse_run, to_dict
from llmdistill.errors import UserError
from llmdistill.files import temporary_folder
from llmdistill.methods import METHODS
from llmdistill.runtime.distributed import World
from llmdistill.training.defaults import settle
from llmdistill.training.plan import make_plan
from llmdistill.training.run_folder import (
    claim_folder,
    finished_metrics,
    input_fingerprints,
    scoring_settings,
    shaping_settings,
)

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture
def parse(tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (tmp_path / "rows.jsonl").write_text("{}")

    @functools.cache
    def parse(*arguments, folder="run"):
        given = ["--ds_config", str(tmp_path / "zero.json"), "--output_dir", str(tmp_path / folder)]
        given = ["--recipe", "quickstart", *given, "--data.train", str(tmp_path / "rows.jsonl")]
        return parse_run([*given, *arguments], METHODS)[0]

    return parse


def claim(config, size=1):
    with replace(WORLD, size=size).entered(), claim_folder(config):
        pass


def finish(config):
    metrics = {"asked": scoring_settings(config), "student": {"params": 1}}
    (Path(config.output_dir) / "metrics.json").write_text(json.dumps(metrics))
    return json.loads(json.dumps(metrics))


def test_another_configuration_a_second_start_and_other_folders_are_refused_and_nothing_lost(parse, tmp_path):
    claim(parse())
    before = (tmp_path / "run" / "run.json").read_bytes()
    another = parse("--train.learning_rate", "1.0")
    refuses("train.learning_rate was 0.0015 and is now 1.0; choose another", claim, another)
    refuses("holds a run already", claim, parse("--resume", "never"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    refuses("not empty and holds no run", claim, parse(folder="other"))
    # Contents of files count beside their names.
    ds_config = (tmp_path / "zero.json").read_text()
    (tmp_path / "zero.json").write_text(json.dumps({**json.loads(ds_config), "optimizer": {"type": "Lion"}}))
    refuses("ds_config.optimizer was None and is now", claim, parse())
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    (tmp_path / "zero.json").write_text(ds_config)
    claim(parse())
    (tmp_path / "rows.jsonl").write_text("{ }")
    with pytest.raises(UserError, match=r"content of data\.train was sha256:\w+ and is now sha256:"):
        claim(parse())


def test_what_a_run_makes_itself_is_no_input(parse, tmp_path):
    values = to_dict(parse("--teacher.model", str(tmp_path / "run" / "assistant-1" / "student")))
    assert set(input_fingerprints(values, made_below=None)) == {"teacher.model", "data.train"}
    assert set(input_fingerprints(values, made_below=tmp_path / "run")) == {"data.train"}


def test_what_does_not_shape_the_student_may_change(parse, tmp_path):
    claim(parse(), size=2)
    claim(parse("--train.micro_batch_size", "1", "--teacher.sharding", "zero3"))
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "reduce_bucket_size": 9}}))
    claim(parse())
    finish(parse())
    claim(parse("--train.micro_batch_size", "1"), size=2)
    refuses("seed was 0 and is now 1", claim, parse("--seed", "1"), size=2)
    words = ("--method", "kd", "--teacher.others.a.model", "embedded:teacher", "--teacher.others.a.sharding")
    one, other = (shaping_settings(to_dict(parse(*words, each))) for each in ("replicated", "zero3"))
    assert one == other


def test_two_processes_do_not_share_a_run_and_the_lock_ends_with_it(parse):
    with multiprocessing.get_context("fork").Pool(1) as other:  # a lock is held against other processes alone
        with claim_folder(parse()):
            refuses("another process is at this run", other.apply, claim, [parse()])
        other.apply(claim, [parse()])


def test_metrics_are_those_of_a_finished_run_of_the_same_settings_and_scores(parse):
    trial, final = parse("--data.tests", "{}"), parse("--data.tests", '{"seen": "embedded:seen"}')
    assert finished_metrics(trial) is None
    claim(trial)
    assert finished_metrics(trial) is None
    record = Path(trial.output_dir) / "metrics.json"
    record.write_text("[]")
    with pytest.raises(UserError, match=r"metrics\.json: .*; remove the file, and the run is finished again$"):
        finished_metrics(trial)
    metrics = finish(trial)
    assert finished_metrics(trial) == metrics
    assert finished_metrics(final) is None, "its test set was not scored"
    metrics = finish(final)
    assert finished_metrics(final) == finished_metrics(trial) == metrics
    assert finished_metrics(parse("--scoring.batch_size", "3")) is None
    assert finished_metrics(parse("--data.tests", "{}", "--train.micro_batch_size", "1")) == metrics
    refuses("seed was 0 and is now 1", finished_metrics, parse("--seed", "1"))


@pytest.mark.parametrize(
    ("by", "free", "said"),
    [
        (None, ("--train.validate_every", "7"), None),
        ("loss", ("--train.validate_every", "7"), r"train\.validate_every was 20 and is now 7"),
        ("loss", ("--scoring.decoding", "sample"), None),
        ("score", ("--scoring.decoding", "sample"), r"scoring\.decoding was greedy and is now sample"),
        ("loss", ("--data.valid", "embedded:seen"), r"data\.valid was \S+ and is now"),
    ],
)
def test_what_validates_belongs_to_a_run_that_keeps_its_best_student(parse, by, free, said):
    keep = () if by is None else ("--train.keep_best", by)
    claim(parse(*keep))
    with nullcontext() if said is None else pytest.raises(UserError, match=said):
        claim(parse(*keep, *free))


def test_temporary_folders_of_killed_processes_are_removed(parse, tmp_path):
    run = tmp_path / "run"
    claim(parse())
    (run / "run.json.part").write_text('{"con')
    for left in (run / ".student.abcdefgh.part", run / "inputs/.teacher.01234567.part"):
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"half")
    with temporary_folder(run / "inputs" / "student") as living:  # of a call from Python that prepares the same run
        claim(parse())
        assert [each.name for each in run.rglob("*.part")] == [living.name]


@pytest.mark.parametrize("recorded", [{"rank_multiple": 1}, {}], ids=["default", "unknown"])
def test_a_run_of_a_version_with_other_defaults_goes_on_with_them(parse, tmp_path, recorded):
    config, file = make_plan(parse()).recorded, tmp_path / "run" / "run.json"
    assert config.student.factorize.rank_multiple == "auto"
    claim(config)
    record = json.loads(file.read_text())
    factorize = record["config"]["student"]["factorize"]
    del factorize["rank_multiple"]
    factorize |= recorded
    file.write_text(json.dumps(record))
    refuses("rank_multiple was 1 and is now auto", claim, config)
    metrics = finish(config)
    assert finished_metrics(config) == metrics
    as_before = make_plan(parse()).recorded
    assert as_before.student.factorize.rank_multiple == 1
    claim(as_before)
    assert make_plan(parse("--student.factorize.rank_multiple", "8")).config.student.factorize.rank_multiple == 8
    assert make_plan(parse(folder="other")).config.student.factorize.rank_multiple == "auto"


def test_metrics_are_found_of_a_run_that_chose_its_start_and_its_held_out_rows_itself(parse):
    given = parse("--data.tests", "{}")
    factorize = FactorizeConfig(target_params="60%")
    trial = replace(given, student=StudentConfig(factorize=factorize), data=replace(given.data, valid=None))
    run = settle(trial, LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64)).config
    assert (run.student.factorize.form, run.data.held_out) == ("pivoted", 0.02)
    claim(run)
    metrics = finish(run)
    assert finished_metrics(trial) == metrics
