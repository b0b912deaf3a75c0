"""What a comparison runs, chooses and keeps, with a launcher that stands in for the training."""

import hashlib
import json
from itertools import product
from pathlib import Path

import pytest

from llmdistill.config.command_line import parse_run
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.report.comparison import comparison_report
from llmdistill.report.trials import read_trials
from llmdistill.studies.collect import collect_comparison
from llmdistill.studies.comparison import MethodStudy
from llmdistill.studies.launcher import InProcess, Launcher
from llmdistill.studies.variants import from_starts, load_methods, load_starts
from llmdistill.training.run_folder import claim_folder, scoring_settings

COMPARED = ["none", "sft", "kd", "seqkd", "makd"]
pytestmark = pytest.mark.usefixtures("cpu_world")


class StandIn(Launcher):
    """Writes what a run would leave; its scores follow from the settings alone."""

    def __init__(self, fails=()):
        super().__init__()
        self.ran, self.fails = [], fails

    @property
    def undivided(self):
        return self

    def run(self, trials, progress=None):
        return InProcess(self.do).run(trials, progress)

    def do(self, config):
        if isinstance(config, dict):
            return self.answer(Path(config["output"]))
        self.ran.append(config)
        if config.method in self.fails:
            raise UserError("out of luck")
        with claim_folder(config):
            self.train(config)

    def answer(self, output):
        """Write a teacher's answers."""
        output.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"instruction": f"question {n}", "input": "", "output": "yes " * (n % 5)} for n in range(40)]
        output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        output.with_name(f"{output.name}.provenance.json").write_text('{"teacher": "x"}')

    def train(self, config):
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
        metrics = {"asked": scoring_settings(config), "warnings": []}
        for model in config.scoring.models:
            if (model == "student") == (method != "none"):
                scores = {"params": 1000, "rougeL": tests, "generation_tokens_per_second": 5.0}
                if config.data.valid is not None:
                    scores["valid"] = {"rougeL": valid, "chance": 10.0, "above_chance": True}
                metrics[model] = scores
        training = {"tokens": 10, "tokens_per_second": 2.0, "peak_memory_bytes": 3}
        metrics["run"] = {"training": training, "hardware": "none", "versions": {}, "decoding": "greedy"}
        (folder / "metrics.json").write_text(json.dumps(metrics))
        if config.student.factorize.weighting != "none":
            weighting = {"weighting": config.student.factorize.weighting, "tokens": 70, "seconds": 4.5}
            (folder / "weighting.json").write_text(json.dumps({**weighting, "predicted_loss": 0.5}))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, "label": 2.0}) + "\n")


def make_study(root, launcher, *arguments, methods=COMPARED, sizes=(), starts=(), seeds=(0, 1, 2)):
    recipe, _ = parse_run(["--ds_config", "ds_configs/zero2.json", *arguments], METHODS)
    variants = from_starts(load_methods(methods), load_starts(starts)) if starts else load_methods(methods)
    grid = {"train.learning_rate": [1e-3, 3e-3, 9e-3]}
    return MethodStudy(
        recipe=recipe, folder=root, variants=variants, grid=grid, seeds=seeds, sizes=sizes, launcher=launcher
    )


def reported(study, findings):
    """The results of the report, and the bytes of results.json."""
    comparison = collect_comparison(study, findings, title="t", paper={}, command="c")
    results = comparison_report(study.folder, comparison).write()
    return results, (study.folder / "results.json").read_bytes()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study, the configurations that it trained in order, and what it found."""
    study = make_study(tmp_path_factory.mktemp("done"), StandIn())
    findings = study.conduct()
    return study, [config for config in study.launcher.ran if config.method != "none"], findings


def test_every_method_gets_the_same_start_order_and_batch_and_seqkd_as_many_tokens(done):
    study, trained, _ = done
    first_seed = [config for config in trained if config.seed == 0]
    assert len({config.student.model for config in first_seed}) == 1
    assert Path(first_seed[0].student.model).is_dir()
    for key in ("global_batch_size", "warmup_steps", "schedule", "weight_decay"):
        assert len({getattr(config.train, key) for config in first_seed}) == 1
    given = [config for config in first_seed if config.method != "seqkd"]
    assert len({(config.train.steps, config.data.train) for config in given}) == 1
    rates = {(config.method, config.train.learning_rate) for config in first_seed}
    assert rates == set(product(("sft", "kd", "seqkd", "makd"), (1e-3, 3e-3, 9e-3)))
    seqkd = next(config for config in trained if config.method == "seqkd")
    assert seqkd.data.train == str(study.answers.output)
    # The stand-in's answers and prompts are shorter than the embedded ones, so that it needs more steps.
    assert seqkd.train.steps > study.recipe.train.steps


def test_settings_are_chosen_on_validation_and_tests_are_not_looked_at(done):
    _, trained, findings = done
    assert all(config.data.tests == {} and config.data.valid == "embedded:valid" for config in trained[:18])
    for outcome in (findings.rows[method] for method in COMPARED[1:]):
        runs = outcome.runs
        assert [run.trial.seed for run in runs] == [0, 1, 2]
        assert {run.trial.settings["train.learning_rate"] for run in runs} == {3e-3}
    assert {run.trial.settings["makd.logits"] for run in findings.rows["makd"].runs} == {10.0}
    assert {run.trial.settings["kd.ratio"] for run in findings.rows["kd"].runs} == {0.5}
    assert all(
        set(run.metrics["student"]["rougeL"]) == {"seen", "unseen", "skills"} for run in findings.rows["kd"].runs
    )


def test_finished_runs_are_kept_unless_the_recipe_has_changed(done):
    for arguments, runs in (
        (["--train.log_every", "7", "--train.validate_every", "9"], 0),
        (["--train.weight_decay", "0.1"], 1 + 3 + 3),  # the base, the grid, and the chosen rate with every seed
    ):
        again = StandIn()
        findings = make_study(done[0].folder, again, *arguments, methods=["none", "sft"]).conduct()
        assert len(again.ran) == runs
        assert len(findings.rows["sft"].runs) == 3


def test_one_failed_method_does_not_lose_the_others_and_is_tried_again(tmp_path):
    study = make_study(tmp_path, StandIn(fails=["kd"]), methods=["none", "kd", "sft"], seeds=(0, 1))
    findings = study.conduct()
    assert {(result.trial.config.method, result.error) for result in findings.failed} == {("kd", "out of luck")}
    results, _ = reported(study, findings)
    assert results["methods"]["kd"]["rougeL"] is None
    assert results["methods"]["sft"]["rougeL"]["average"] > results["methods"]["none"]["rougeL"]["average"]
    again = StandIn()
    assert make_study(tmp_path, again, methods=["none", "kd", "sft"], seeds=(0, 1)).conduct().failed == []
    assert {config.method for config in again.ran} == {"kd"}
    with pytest.raises(UserError, match="could not be scored: out of luck"):
        make_study(tmp_path / "other", StandIn(fails=["none"])).conduct()


def test_sizes_train_the_chosen_settings_once_more(tmp_path):
    methods = ["none", "sft", "makd"]
    study = make_study(tmp_path, StandIn(), methods=methods, sizes=["18", "60%"], seeds=(0, 1))
    findings = study.conduct()
    sizes = [sizes_of(config)[2:] for config in study.launcher.ran if config.method == "none"]
    assert sizes == [(None, "34%"), (18, None), (None, "60%")]
    comparison = collect_comparison(study, findings, title="t", paper={}, command="c")
    points = {(point.label, point.name) for point in comparison.sizes}
    assert points == set(product(("as in the table", "rank 18", "60%"), methods))
    makd = [run.metrics["student"]["rougeL"] for run in findings.rows["makd"].runs]
    (own,) = [point for point in comparison.sizes if (point.label, point.name) == ("as in the table", "makd")]
    assert own.average.mean == pytest.approx(sum(sum(each.values()) / 3 for each in makd) / 2)
    for results in findings.sizes.values():
        assert results["makd"].first.trial.settings["train.learning_rate"] == 3e-3


def test_every_trial_is_a_row_of_one_file(started):
    study, _, findings = started
    rows = read_trials(study.folder)
    assert len(rows) == len({row.folder for row in rows})
    assert {row.row for row in rows} == {"none-plain", "sft-plain", "none-loss", "sft-loss"}
    # The grid with the first seed, the chosen settings with the others, and the two further sizes.
    tuned = [row for row in rows if row.row == "sft-loss"]
    assert [row.chosen for row in tuned] == [True, False, False, True, True, True, True]
    assert {tuple(row.settings.values()) for row in tuned if row.chosen} == {(1e-3,)}
    assert {"train.learning_rate", "seed", "method"} < set(tuned[0].config)
    assert "train.steps" not in tuned[0].config
    final = findings.rows["sft-loss"].runs[1]
    (row,) = [row for row in tuned if study.folder / row.folder == final.trial.folder]
    student = row.models["student"]
    assert student.by_set("rougeL") == final.metrics["student"]["rougeL"]
    assert student.on_validation("rougeL") == final.metrics["student"]["valid"]["rougeL"]
    assert (row.seed, row.config["seed"], row.tokens, row.peak_memory_bytes) == (1, 1, 10, 3)
    assert (row.command.split()[-1], row.error) == (str(final.trial.recipe), None)
    content = json.loads((study.folder / "study.json").read_text(encoding="utf-8"))
    (study.folder / "later").mkdir()
    (study.folder / "later" / "study.json").write_text(json.dumps({**content, "version": 2}), encoding="utf-8")
    with pytest.raises(UserError, match="version 2, but this llmdistill reads up to 1"):
        read_trials(study.folder / "later")


def sizes_of(config):
    factorize = config.student.factorize
    return factorize.weighting, factorize.allocation, factorize.rank, factorize.target_params


STARTS = ["plain", "loss"]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A study of two starts and three sizes, the configurations of its untrained students, and what it found."""
    settings = {"methods": ["none", "sft"], "starts": STARTS, "sizes": ["18", "25%"]}
    study = make_study(tmp_path_factory.mktemp("started"), StandIn(), **settings)
    study.check()
    findings = study.conduct()
    return study, [config for config in study.launcher.ran if config.method == "none"], findings


def test_every_method_is_trained_from_every_start_with_settings_of_its_own(started):
    study, bases, findings = started
    assert [variant.key for variant in study.variants] == ["none-plain", "sft-plain", "none-loss", "sft-loss"]
    with pytest.raises(UserError, match="loss is there twice"):
        load_starts(["loss", "loss"])
    assert [sizes_of(config)[:2] for config in bases[:2]] == [("none", "uniform"), ("gradients", "loss")]
    assert [config.scoring.models for config in bases[:2]] == [["teacher", "untrained"], ["untrained"]]
    for start, base, rate in zip(STARTS, bases, (3e-3, 1e-3), strict=False):
        runs = findings.rows[f"sft-{start}"].runs
        assert [run.trial.seed for run in runs] == [0, 1, 2]
        assert {run.trial.settings["train.learning_rate"] for run in runs} == {rate}
        models = {run.trial.config.student.model for run in (*runs, *findings.rows[f"sft-{start}"].trials)}
        assert models == {f"{base.output_dir}/untrained"}


def test_the_report_of_starts_counts_their_calibration(started):
    study, _, findings = started
    results, _ = reported(study, findings)
    assert list(results["methods"]) == ["teacher", "none-plain", "sft-plain", "none-loss", "sft-loss"]
    costs = json.loads((study.folder / "costs.json").read_text(encoding="utf-8"))
    for row, tokens, seconds in (("sft-loss", 70, 4.5), ("none-loss", 70, 4.5), ("sft-plain", 0, 0)):
        assert (costs[row]["calibration_tokens"], costs[row]["calibration_seconds"]) == (tokens, seconds)
    sizes = ("as in the table", "rank 18", "25%")
    expected = [(start, size, tokens) for size in sizes for start, tokens in (("plain", None), ("loss", 70))]
    assert [(each["start"], each["size"], each["tokens"]) for each in results["starts"]] == expected
    page = (study.folder / "report.md").read_text(encoding="utf-8")
    assert "SFT from loss" in page
    assert "equal in parameters" in page
    assert "| SFT from plain | rank 18 |" in page


def test_the_sizes_of_a_start_share_a_calibration(tmp_path):
    starts = {"methods": ["none"], "starts": ["plain", "gradients", "loss"]}
    alone, sized = (make_study(tmp_path, StandIn(), sizes=sizes, **starts) for sizes in ((), ("20",)))
    # The folder is no part of a run's identity: base runs of an earlier study are kept.
    assert [alone.base(start).folder for start in alone.starts] == [sized.base(start).folder for start in sized.starts]
    sized.conduct()
    calibrations = [config.student.factorize.calibration.folder for config in sized.launcher.ran]
    plain, of_gradients, of_loss = (set(calibrations[n::3]) for n in range(3))
    assert plain == {None}
    assert len(of_gradients) == len(of_loss) == 1
    assert of_gradients != of_loss
    assert all(Path(*each).is_relative_to(sized.folder / "calibration") for each in (of_gradients, of_loss))
