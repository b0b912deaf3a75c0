"""What a comparison runs, chooses and keeps, with a launcher that stands in for the training."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from llmdistill.config import RunConfig
from llmdistill.config.command_line import build, parse_run, scores_asked
from llmdistill.errors import UserError
from llmdistill.experiments.collect import collect
from llmdistill.experiments.comparison import conduct
from llmdistill.experiments.launcher import InProcess
from llmdistill.experiments.study import Study
from llmdistill.experiments.variants import from_starts, load_methods, load_starts
from llmdistill.methods import METHODS
from llmdistill.report.comparison import write_comparison
from llmdistill.run.artifacts import claim_folder
from llmdistill.runtime.distributed import World

COMPARED = ["none", "sft", "kd", "seqkd", "makd"]


WORLD = World(rank=0, size=1, device=torch.device("cpu"))


class StandIn:
    """Writes what a run would leave; its scores follow from the settings alone."""

    def __init__(self, fails=(), stops_after=None):
        self.ran, self.fails, self.stops_after = [], fails, stops_after

    def train_command(self, recipe):
        return ["deepspeed", "--module", "llmdistill.train", "--recipe", str(recipe)]

    def command(self, module, *arguments):
        return ["deepspeed", "--module", module, *arguments]

    def call(self, command, log):
        self.interrupt()
        self.generate(Path(command[command.index("--output") + 1]))

    def run(self, trials, progress=None):
        return InProcess(WORLD, self.do).run(trials, progress)

    def interrupt(self):
        if self.stops_after is not None and len(self.ran) == self.stops_after:
            raise KeyboardInterrupt

    def do(self, config):
        self.interrupt()
        self.ran.append(config)
        if config.method in self.fails:
            raise UserError("out of luck")
        with claim_folder(config, WORLD):
            self.train(config)

    def generate(self, output):
        output.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"instruction": f"question {n}", "input": "", "output": "yes " * (n % 5)} for n in range(40)]
        output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        output.with_name(f"{output.name}.provenance.json").write_text('{"teacher": "x"}', encoding="utf-8")

    def train(self, config: RunConfig):
        folder = Path(config.output_dir)
        (folder / "untrained").mkdir(parents=True, exist_ok=True)
        rate, method = config.train.learning_rate, config.method
        # Best at the middle rate on the validation set, but at the highest on the tests: only a cheat takes that one.
        bonus = {"sft": 0, "kd": 5, "seqkd": 4, "makd": 9, "none": -40}[method]
        weights = {name: config.method_settings[name] for name in ("makd", "kd")}
        best = 1e-3 if "base-loss" in str(config.student.model) else 3e-3
        valid = 50 + bonus - 1e3 * abs(rate - best) - (weights["makd"].logits == 1.0) - (weights["kd"].ratio == 1.0)
        digest = int(hashlib.sha256(str(config.seed).encode()).hexdigest(), 16) % 5
        tests = {name: 40 + bonus + 1e3 * rate + digest + len(name) for name in config.data.tests}
        metrics = {"asked": scores_asked(config), "warnings": []}
        for model in config.scoring.models:
            if (model == "student") == (method != "none"):
                scores = {"params": 1000, "rougeL": tests, "generation_tokens_per_second": 5.0}
                if config.data.valid is not None:
                    scores["valid"] = {"rougeL": valid, "chance": 10.0, "above_chance": True}
                metrics[model] = scores
                for name in tests:
                    file = folder / "predictions" / model / f"{name}.jsonl"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    row = {"instruction": "a", "input": "", "references": ["b"], "predictions": {"greedy": model}}
                    file.write_text((json.dumps(row) + "\n") * 8, encoding="utf-8")
        training = {"tokens": 10, "tokens_per_second": 2.0, "peak_memory_bytes": 3}
        metrics["run"] = {"training": training, "hardware": "none", "versions": {}, "decoding": "greedy"}
        (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
        if config.student.factorize.weighting != "none":
            weighting = {
                "weighting": config.student.factorize.weighting,
                "tokens": 70,
                "seconds": 4.5,
                "predicted_loss": 0.5,
            }
            (folder / "weighting.json").write_text(json.dumps(weighting), encoding="utf-8")
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, "label": 2.0}) + "\n")


@pytest.fixture
def make_study(tmp_path):
    def make(launcher, name="study", *arguments, methods=COMPARED, sizes=(), starts=()):
        recipe, _ = parse_run(["--ds_config", "ds_configs/zero2.json", *arguments], METHODS)
        variants = load_methods(methods)
        return Study(
            recipe=recipe,
            root=tmp_path / name,
            variants=from_starts(variants, load_starts(starts)) if starts else variants,
            grid={"train.learning_rate": [1e-3, 3e-3, 9e-3]},
            seeds=[0, 1, 2],
            sizes=sizes,
            launcher=launcher,
        )

    return make


def trained(launcher):
    return [config for config in launcher.ran if config.method != "none"]


def test_every_method_gets_the_same_start_order_and_batch(make_study):
    launcher = StandIn()
    conduct(make_study(launcher))
    first_seed = [config for config in trained(launcher) if config.seed == 0]
    assert len({config.student.model for config in first_seed}) == 1
    assert Path(first_seed[0].student.model).is_dir()
    for key in ("global_batch_size", "warmup_steps", "schedule", "weight_decay"):
        assert len({getattr(config.train, key) for config in first_seed}) == 1
    given = [config for config in first_seed if config.method != "seqkd"]
    assert len({(config.train.steps, config.data.train) for config in given}) == 1
    rates = {config.method: [] for config in first_seed}
    for config in first_seed:
        rates[config.method].append(config.train.learning_rate)
    assert set(rates) == {"sft", "kd", "seqkd", "makd"}
    assert all(set(values) == {1e-3, 3e-3, 9e-3} for values in rates.values())


def test_seqkd_learns_as_many_tokens_from_the_teachers_answers(make_study):
    launcher = StandIn()
    study = make_study(launcher)
    conduct(study)
    run = next(config for config in launcher.ran if config.method == "seqkd")
    assert run.data.train == str(study.responses)
    # The stand-in's answers and prompts are shorter than the embedded ones, so that it needs more steps.
    assert run.train.steps > study.recipe.train.steps


def test_settings_are_chosen_on_validation_and_tests_are_not_looked_at(make_study):
    launcher = StandIn()
    findings = conduct(make_study(launcher))
    trials = [config for config in trained(launcher)[:18]]
    assert all(config.data.tests == {} and config.data.valid == "embedded:valid" for config in trials)
    for runs in findings.runs.values():
        assert [run.trial.seed for run in runs] == [0, 1, 2]
        assert {run.trial.settings["train.learning_rate"] for run in runs} == {3e-3}
    assert {run.trial.settings["makd.logits"] for run in findings.runs["makd"]} == {10.0}
    assert {run.trial.settings["kd.ratio"] for run in findings.runs["kd"]} == {0.5}
    assert all(set(run.metrics["student"]["rougeL"]) == {"seen", "unseen", "skills"} for run in findings.runs["kd"])


def test_finished_runs_are_not_run_again(make_study):
    conduct(make_study(StandIn()))
    again = StandIn()
    findings = conduct(make_study(again))
    assert again.ran == []
    assert len(findings.runs["makd"]) == 3


def test_a_changed_recipe_makes_new_runs(make_study):
    conduct(make_study(StandIn()))
    again = StandIn()
    conduct(make_study(again, "study", "--train.weight_decay", "0.1"))
    assert len(again.ran) > 10
    more_log = StandIn()
    conduct(make_study(more_log, "study", "--train.log_every", "7", "--train.validate_every", "9"))
    assert more_log.ran == []


def test_one_failed_method_does_not_lose_the_others_and_is_tried_again(make_study, tmp_path):
    study = make_study(StandIn(fails=["kd"]))
    findings = conduct(study)
    assert {result.trial.config.method for result in findings.failed} == {"kd"}
    assert all(result.error == "out of luck" for result in findings.failed)
    write_comparison(study.root, collect(study, findings, title="t", paper={}, command="c"))
    results = json.loads((study.root / "results.json").read_text(encoding="utf-8"))["methods"]
    assert results["kd"]["rougeL"] is None
    assert results["makd"]["rougeL"]["average"] > results["sft"]["rougeL"]["average"]
    again = StandIn()
    assert conduct(make_study(again)).failed == []
    assert {config.method for config in again.ran} == {"kd"}


@pytest.mark.parametrize("stops_after", [0, 1, 7, 20])
def test_interrupted_and_resumed_it_gives_the_same_results(make_study, stops_after, tmp_path):
    files = {}
    for name, launchers in {
        "whole": [StandIn()],
        "stopped": [StandIn(stops_after=stops_after), StandIn()],
    }.items():
        for launcher in launchers:
            # Both under the same name, as the folder is part of what the results link to.
            study = make_study(launcher)
            try:
                findings = conduct(study)
            except KeyboardInterrupt:
                continue
        write_comparison(study.root, collect(study, findings, title="t", paper={}, command="c"))
        files[name] = (study.root / "results.json").read_bytes()
        study.root.rename(tmp_path / name)
    assert files["whole"] == files["stopped"]


def test_a_base_that_fails_stops_it(make_study):
    with pytest.raises(UserError, match="could not be scored: out of luck"):
        conduct(make_study(StandIn(fails=["none"])))


def test_sizes_train_the_chosen_settings_once_more(make_study):
    launcher = StandIn()
    findings = conduct(make_study(launcher, sizes=["18", "60%"]))
    assert list(findings.sizes) == ["18", "60%"]
    ranks = [config.student.factorize.rank for config in launcher.ran if config.method == "none"]
    targets = [config.student.factorize.target_params for config in launcher.ran if config.method == "none"]
    assert ranks == [None, 18, None]
    assert targets == ["34%", None, "60%"]
    comparison = collect(make_study(launcher, sizes=["18", "60%"]), findings, title="t", paper={}, command="c")
    assert {(point.label, point.name) for point in comparison.sizes} == {
        (setting, method) for setting in ("as in the table", "rank 18", "60%") for method in COMPARED
    }
    makd = [run.metrics["student"]["rougeL"] for run in findings.runs["makd"]]
    (own,) = [point for point in comparison.sizes if (point.label, point.name) == ("as in the table", "makd")]
    assert own.average.mean == pytest.approx(sum(sum(each.values()) / 3 for each in makd) / 3)
    for results in findings.sizes.values():
        assert set(results) == set(COMPARED)
        assert results["makd"].trial.settings["train.learning_rate"] == 3e-3


def sizes_of(config):
    factorize = config.student.factorize
    return factorize.weighting, factorize.allocation, factorize.rank, factorize.target_params


def test_every_method_is_trained_from_every_start_with_settings_of_its_own(make_study):
    launcher, starts = StandIn(), ["plain", "loss"]
    study = make_study(launcher, methods=["none", "sft", "makd"], starts=starts)
    study.check()
    findings = conduct(study)
    bases = [config for config in launcher.ran if config.method == "none"]
    assert [sizes_of(config)[:2] for config in bases] == [("none", "uniform"), ("gradients", "loss")]
    assert [config.scoring.models for config in bases] == [["teacher", "untrained"], ["untrained"]]
    for start, base, rate in zip(starts, bases, (3e-3, 1e-3), strict=True):
        for name in ("sft", "makd"):
            runs = findings.runs[f"{name}-{start}"]
            assert [run.trial.seed for run in runs] == [0, 1, 2]
            assert {run.trial.settings["train.learning_rate"] for run in runs} == {rate}
            models = {run.trial.config.student.model for run in (*runs, *findings.trials[f"{name}-{start}"])}
            assert models == {f"{base.output_dir}/untrained"}
    again = StandIn()
    conduct(make_study(again, methods=["none", "sft", "makd"], starts=starts))
    assert again.ran == []


def test_starts_have_equally_many_parameters_at_every_size(make_study):
    launcher, starts = StandIn(), ["plain", "activations", "loss"]
    study = make_study(launcher, methods=["none", "kd"], starts=starts, sizes=["18", "25%"])
    study.check()
    findings = conduct(study)
    found = [sizes_of(config) for config in launcher.ran if config.method == "none"]
    targets = [target for _, _, _, target in found]
    assert [rank for _, _, rank, _ in found] == [None] * 9
    assert [targets[n : n + 3] for n in (0, 3, 6)] == [[targets[0]] * 3, [targets[3]] * 3, [targets[6]] * 3]
    assert targets[0] > targets[3] > targets[6] > 1
    for results in findings.sizes.values():
        for start in starts:
            model = results[f"kd-{start}"].trial.config.student.model
            assert model == str(results[f"none-{start}"].trial.folder / "untrained")


def test_the_sizes_of_a_start_share_a_calibration(make_study):
    folders = {}
    for sizes in ((), ("20", "25%")):
        launcher = StandIn()
        study = make_study(launcher, methods=["none"], starts=["plain", "gradients", "loss"], sizes=sizes)
        conduct(study)
        calibrations = [config.student.factorize.calibration.folder for config in launcher.ran]
        folders[sizes] = [study.base(start).folder for start in study.starts]
        if not sizes:
            assert calibrations == [None] * 3
    # The folder is no part of a run's identity: the base runs of the first study were kept.
    assert folders[()] == folders[sizes]
    plain, of_gradients, of_loss = ({calibrations[n], calibrations[n + 3]} for n in range(3))
    assert plain == {None}
    assert len(of_gradients) == len(of_loss) == 1
    assert of_gradients != of_loss
    assert all(Path(*each).is_relative_to(study.root / "calibration") for each in (of_gradients, of_loss))


def test_a_given_folder_of_calibration_has_a_part_for_each_start(make_study, tmp_path):
    given = ["--student.factorize.calibration.folder", str(tmp_path / "given")]
    study = make_study(StandIn(), "study", *given, methods=["none"], starts=["gradients", "loss"])
    parts = [Path(study.base(start).config.student.factorize.calibration.folder) for start in study.starts]
    assert {part.parent for part in parts} == {tmp_path / "given"}
    assert len(set(parts)) == 2


def test_the_report_of_starts_counts_their_calibration(make_study):
    study = make_study(StandIn(), methods=["none", "kd"], starts=["plain", "activations"], sizes=["20"])
    comparison = collect(study, conduct(study), title="t", paper={}, command="c")
    results = write_comparison(study.root, comparison)
    assert list(results["methods"]) == ["teacher", "none-plain", "kd-plain", "none-activations", "kd-activations"]
    costs = json.loads((study.root / "costs.json").read_text(encoding="utf-8"))
    calibration = {
        key: (cost.get("calibration_tokens"), cost.get("calibration_seconds")) for key, cost in costs.items()
    }
    assert calibration["kd-activations"] == calibration["none-activations"] == (70, 4.5)
    assert calibration["kd-plain"] == (0, 0)
    assert [(each["start"], each["size"], each["tokens"]) for each in results["starts"]] == [
        ("plain", "as in the table", None),
        ("activations", "as in the table", 70),
        ("plain", "rank 20", None),
        ("activations", "rank 20", 70),
    ]
    page = (study.root / "report.md").read_text(encoding="utf-8")
    assert "KD from activations" in page
    assert "equal in parameters" in page
    assert {(row.key, row.label) for row in comparison.sizes} >= {
        ("kd-plain", "rank 20"),
        ("none-activations", "rank 20"),
    }


def test_choice_needs_validation(make_study):
    study = make_study(StandIn())
    recipe = build(
        {**json.loads(json.dumps(_plain(study.recipe))), "data": {**_plain(study.recipe)["data"], "valid": None}},
        RunConfig,
        METHODS,
    )
    with pytest.raises(UserError, match=r"data\.valid is missing"):
        Study(**{**vars(study), "recipe": recipe}).check()


def _plain(config):
    from llmdistill.config.command_line import to_dict

    return to_dict(config)
