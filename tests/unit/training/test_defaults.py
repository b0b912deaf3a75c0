"""A run settles the start of its student: the best one that it can have, or what its folder has recorded."""

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig, ReformerConfig

from llmdistill.config import CalibrationConfig, DataConfig, FactorizeConfig, RunConfig, StudentConfig, TrainConfig
from llmdistill.config.command_line import parse_run
from llmdistill.config.student import QuantizeConfig
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.training.defaults import RUN_FILE, choose_start, settle, settle_compress
from llmdistill.training.plan import make_plan
from llmdistill.training.run_folder import with_earlier_defaults

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = LlamaConfig(**SIZES)
BEST = ("gradients", "loss", "pivoted", "auto", 128)
PLAIN = ("none", "uniform", "plain", None, 512)


def start_of(settings: FactorizeConfig) -> tuple[object, ...]:
    of_matrices = (settings.weighting, settings.allocation, settings.form)
    return *of_matrices, settings.embedding_rank, settings.calibration.examples


def config_of(folder=None, **student) -> RunConfig:
    output_dir = None if folder is None else str(folder)
    return RunConfig(student=StudentConfig(**student), data=DataConfig(max_length=512), output_dir=output_dir)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"target_params": "60%"}, BEST),
        ({"rank": 4}, ("gradients", "uniform", "plain", None, 128)),
        ({"target_params": "60%", "sigma": "balanced"}, ("gradients", "loss", "plain", "auto", 128)),
        ({"target_params": "60%", "form": "plain"}, ("gradients", "loss", "plain", "auto", 128)),
        ({"target_params": "60%", "allocation": "uniform"}, ("gradients", "uniform", "pivoted", None, 128)),
        ({"target_params": "60%", "embedding_rank": "dense"}, (*BEST[:3], "dense", 128)),
        ({"target_params": "60%", "embedding_rank": 9}, (*BEST[:3], 9, 128)),
        ({"target_params": "60%", "calibration": CalibrationConfig(examples=8)}, (*BEST[:4], 8)),
        # Without held-out examples nothing can check a narrower embedding.
        ({"target_params": "60%", "calibration": CalibrationConfig(examples=7)}, (*BEST[:3], None, 7)),
        # Who names a weighting gets that one, and nothing else that is not named.
        ({"target_params": "60%", "weighting": "none"}, PLAIN),
        ({"target_params": "60%", "weighting": "gradients"}, ("gradients", "uniform", "plain", None, 512)),
        (
            {"target_params": "60%", "weighting": "gradients", "allocation": "loss"},
            ("gradients", "loss", "plain", None, 512),
        ),
    ],
)
def test_what_is_left_open_becomes_the_best_start(settings, expected):
    factorize = settle(config_of(factorize=FactorizeConfig(**settings)), LLAMA).config.student.factorize
    assert start_of(factorize) == expected


def test_a_rank_of_the_embedding_by_predicted_losses_needs_them():
    for given in (
        {"rank": 4},
        {"target_params": "60%", "allocation": "uniform"},
        {"target_params": "60%", "weighting": "gradients"},
    ):
        with pytest.raises(ValueError, match="embedding_rank auto takes its share of target_params"):
            FactorizeConfig(embedding_rank="auto", **given)
    for data in ({"held_out": 0}, {"examples": 7}):
        with pytest.raises(ValueError, match="embedding_rank auto is chosen on held-out calibration examples"):
            FactorizeConfig(target_params="60%", embedding_rank="auto", calibration=CalibrationConfig(**data))
    auto = FactorizeConfig(target_params="60%", embedding_rank="auto")
    with pytest.raises(UserError, match="embedding_rank auto needs predicted losses, but no gradient"):
        choose_start(auto, ReformerConfig(), 512)
    with pytest.raises(UserError, match="needs calibration data"):
        settle_compress(auto, "svd", LLAMA, has_data=False, max_length=512)


@pytest.mark.parametrize(("weights", "form"), [("int4", "plain"), ("int8", "pivoted")])
def test_factors_of_four_bits_are_plain(weights, form):
    config = config_of(factorize=FactorizeConfig(target_params="60%"), quantize=QuantizeConfig(weights=weights))
    assert settle(config, LLAMA).config.student.factorize.form == form


@pytest.mark.parametrize("student", [{"model": "some/where"}, {"shape": "1x32x4"}, {"method": "kronecker"}], ids=str)
def test_other_students_have_the_plain_settings(student):
    assert start_of(settle(config_of(**student), LLAMA).config.student.factorize) == PLAIN


@pytest.mark.parametrize(
    ("student", "rate"),
    [
        ({}, 5e-5),
        ({"model": "some/where"}, 5e-5),
        ({"factorize": FactorizeConfig(weighting="activations")}, 5e-5),
        ({"shape": "1x32x4", "init": "important"}, 5e-5),
        ({"factorize": FactorizeConfig(weighting="none")}, 5e-4),
        ({"method": "kronecker"}, 5e-4),
        ({"shape": "1x32x4"}, 5e-4),
    ],
    ids=str,
)
def test_a_student_that_starts_near_its_teacher_learns_at_a_lower_rate(student, rate):
    config = config_of(**student)
    assert config.with_learning_rate().train.learning_rate == rate
    given = replace(config, train=TrainConfig(learning_rate=0.3))
    assert given.with_learning_rate() == given


def test_the_optimizer_and_the_record_of_a_run_have_its_default_learning_rate():
    words = [
        "--teacher.model",
        "embedded:teacher",
        "--data.train",
        "rows.jsonl",
        "--student.factorize.target_params",
        "34%",
    ]
    plan = make_plan(parse_run(words, METHODS)[0])
    assert plan.recorded.train.learning_rate == plan.ds_config["optimizer"]["params"]["lr"] == 5e-5


def test_the_number_of_examples_follows_their_length():
    settings = FactorizeConfig(target_params="60%")
    counts = [choose_start(settings, LLAMA, length)[0].calibration.examples for length in (64, 256, 512, 8192)]
    assert counts == [512, 256, 128, 64]


def test_a_model_that_cannot_have_it_gets_the_next_best_and_the_run_says_why():
    moe = Qwen3MoeConfig(**SIZES, num_experts=2, moe_intermediate_size=16, num_experts_per_tok=1)
    factorize = FactorizeConfig(target_params="60%")
    settled = settle(config_of(factorize=factorize), moe)
    assert start_of(settled.config.student.factorize) == ("gradients", "uniform", "plain", None, 128)
    assert "stacks of matrices" in settled.notes[0]
    chosen, why = choose_start(factorize, ReformerConfig(), 512)
    assert start_of(chosen) == ("activations", "uniform", "plain", None, 128)
    assert "no gradient" in why


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({"weighting": "none", "allocation": "uniform", "form": "plain", "calibration": {"examples": 512}}, PLAIN),
        ({}, PLAIN),  # of a version before these settings
        (
            {"weighting": "gradients", "allocation": "loss", "form": "pivoted", "embedding_rank": None},
            (*BEST[:3], None, 512),  # of a version that left the embedding dense
        ),
        ({"weighting": "gradients", "allocation": "loss"}, ("gradients", "loss", "plain", None, 512)),
    ],
)
def test_a_run_goes_on_with_the_start_that_it_has_recorded(tmp_path, recorded, expected):
    (tmp_path / RUN_FILE).write_text(json.dumps({"config": {"student": {"factorize": recorded}}}))
    settled = settle(config_of(tmp_path, factorize=FactorizeConfig(target_params="60%")), LLAMA)
    assert start_of(settled.config.student.factorize) == expected
    assert settled.notes == []


@pytest.mark.parametrize("recorded", [5e-4, 5e-5])
def test_a_run_of_an_earlier_version_goes_on_with_its_learning_rate(tmp_path, recorded):
    record = {"config": {"train": {"learning_rate": recorded}}, "inputs": {}, "ds_config": {}}
    (tmp_path / RUN_FILE).write_text(json.dumps(record))
    config = with_earlier_defaults(config_of(tmp_path, model="some/where"))
    assert config.with_learning_rate().train.learning_rate == recorded


def test_compress_weights_only_by_data():
    settings, more = FactorizeConfig(target_params="60%"), {"max_length": 512}
    assert start_of(settle_compress(settings, "svd", LLAMA, has_data=True, **more)) == BEST
    assert start_of(settle_compress(settings, "svd", LLAMA, has_data=False, **more)) == PLAIN
    named = FactorizeConfig(target_params="60%", weighting="gradients")
    weighted = settle_compress(named, "svd", LLAMA, has_data=True, **more)
    assert start_of(weighted) == ("gradients", "uniform", "plain", None, 512)
    by_loss = FactorizeConfig(target_params="60%", allocation="loss")
    with pytest.raises(UserError, match="needs calibration data"):
        settle_compress(by_loss, "svd", LLAMA, has_data=False, **more)


def test_rows_that_a_folder_has_held_out_are_none_of_a_text(tmp_path):
    record = {"config": {"data": {"held_out": 0.5}}}
    (tmp_path / RUN_FILE).write_text(json.dumps(record))
    config = config_of(tmp_path)
    assert settle(config, LLAMA).config.data.held_out == 0.5
    text = replace(config, data=replace(config.data, kind="text", train="a.txt"))
    assert settle(text, LLAMA).config.data.held_out == 0
