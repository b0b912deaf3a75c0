"""Runs a comparison of methods: base, grid, choice, seeds, sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmdistill.config import RunConfig
from llmdistill.errors import UserError
from llmdistill.experiments.equal_params import check_starts, equal_size, is_rank
from llmdistill.experiments.equal_tokens import steps_for_equal_tokens
from llmdistill.experiments.grid import choose, points
from llmdistill.experiments.launcher import Launcher, shown_command
from llmdistill.experiments.trials import Progress, Result, Trial, make_trial
from llmdistill.experiments.variants import Start, Variant
from llmdistill.files import write_text
from llmdistill.fingerprints import digest
from llmdistill.generation.answers_file import read_provenance
from llmdistill.messages import say
from llmdistill.methods import METHODS
from llmdistill.report.results import check_sets
from llmdistill.run.plan import make_plan
from llmdistill.tasks.perplexity import show_perplexity
from llmdistill.tasks.windows import text_tests

Planned = list[tuple[Variant, Trial]]
"""Trials with their variants."""


@dataclass(frozen=True)
class Study:
    """The settings of a comparison.

    Every trained variant of a start begins with the same student, sees the examples in the same order in batches of the
    same size, and trains on the same number of tokens. The settings of a variant's grid are tried with the first seed,
    and the best settings are chosen on the validation set.
    """

    recipe: RunConfig
    root: Path
    variants: Sequence[Variant]
    grid: Mapping[str, Sequence[Any]]
    """The values that every method tries, by dotted key."""
    seeds: Sequence[int]
    sizes: Sequence[str]
    """Further sizes of the student: a rank, or a number of parameters as in target_params."""
    launcher: Launcher

    def trained(self) -> list[Variant]:
        """Return the variants that train a student."""
        return [variant for variant in self.variants if variant.trains]

    def points(self, variant: Variant) -> list[dict[str, Any]]:
        """Return every combination of the values in the common grid and in the variant's own grid."""
        return points({**self.grid, **variant.grid})

    def final_runs(self) -> int:
        """Return the number of runs after the trials; a variant's only trial is also the first seed's final run."""
        return sum(len(self.seeds) - (len(self.points(variant)) == 1) for variant in self.trained())

    def runs(self) -> dict[str, int]:
        """Return the number of runs of each kind, in the order in which they are done."""
        trained, starts, sizes = self.trained(), len(self.starts), len(self.sizes)
        chosen = sum(len(self.points(variant)) > 1 for variant in trained)
        return {
            "scoring the teacher and untrained students": starts,
            "training": sum(len(self.points(variant)) for variant in trained),
            "scoring a student on the test sets that an earlier run has trained": chosen,
            "training the chosen settings with other seeds": self.final_runs() - chosen,
            "scoring untrained students of other sizes": sizes * starts,
            "training students of other sizes": sizes * len(trained),
        }

    @property
    def starts(self) -> list[Start]:
        """The starts of the variants; without a choice of starts only that of the recipe."""
        return list({variant.start.name: variant.start for variant in self.variants}.values())

    def base(self, start: Start) -> Trial:
        """Return the run that scores the untrained student of a start, and at the first start the teacher."""
        first = start.name == self.starts[0].name
        changes = {
            **start.settings,
            **(equal_size(self.recipe) if start.name else {}),
            "scoring.models": ["teacher", "untrained"] if first else ["untrained"],
        }
        title = f"{'teacher and ' if first else ''}untrained student"
        trial = self._base(start, title, changes)
        return self._base(start, title, {**changes, **self._kept(start, trial)})

    def size_base(self, start: Start, size: str) -> Trial:
        """Return the run that scores the untrained student of a start and of another size."""
        changes = {
            **start.settings,
            **(equal_size(self.recipe, size) if start.name else _other_size(size)),
            **self._kept(start, self.base(start)),
            "data.valid": None,
            "scoring.models": ["untrained"],
        }
        return self._base(start, f"untrained student of {size_label(size)}", changes)

    def _base(self, start: Start, title: str, changes: Mapping[str, Any]) -> Trial:
        changes = {"method": "none", "seed": self.seeds[0], **changes}
        return make_trial(self.root, self.recipe, start.key("base"), changes, title=start.title(title))

    def _kept(self, start: Start, base: Trial) -> dict[str, Any]:
        """Return the setting with which all sizes of a start share a calibration, by dotted key."""
        given = self.recipe.student.factorize.calibration.folder
        needed = bool(self.sizes) if given is None else bool(start.name)  # a given folder holds one calibration
        if not needed or base.config.student.factorize.weighting == "none":
            return {}
        # The name of the run says what was measured, on which data.
        folder = Path(self.root / "calibration" if given is None else given) / base.folder.name
        return {"student.factorize.calibration.folder": str(folder)}

    @property
    def responses(self) -> Path:
        """The file with the teacher's answers to the training prompts, for SeqKD."""
        return self.root / "seqkd" / f"responses-{digest(self.response_arguments())[:8]}.jsonl"

    def response_arguments(self) -> dict[str, Any]:
        """Return the arguments that generate the teacher's answers, with the decoding of the scored answers."""
        data, scoring = self.recipe.data, self.recipe.scoring
        return {
            "model": self.recipe.teacher.model,
            "data": data.train,
            "decoding": scoring.decoding,
            "seed": self.seeds[0],
            "batch_size": scoring.batch_size,
            "prompt": data.prompt,
            "max_prompt_length": data.max_prompt_length,
            "max_length": data.max_length,
            "long_prompts": data.long_prompts,
        }

    def trial(
        self, variant: Variant, point: Mapping[str, Any], seed: int, student: str, *, tests: bool, valid: bool = True
    ) -> Trial:
        """Return a training run from a student; `tests`, `valid`: whether the run is scored on these sets."""
        changes = {
            **variant.settings,
            "seed": seed,
            "student.model": student,
            "student.factorize.weighting": "none",  # the student is made already
            "student.factorize.allocation": "uniform",
            "scoring.models": ["student"],
            **({} if tests else {"data.tests": {}}),
            **({} if valid else {"data.valid": None}),
        }
        if learns_answers(variant):
            changes["data.train"] = str(self.responses)
            changes["train.steps"] = steps_for_equal_tokens(self.recipe, self.responses, seed)
        return make_trial(self.root, self.recipe, variant.key, changes, point, title=variant.title)

    def grid_trials(self) -> Planned:
        """Return the trials of every grid point of every variant with the first seed."""
        return [
            # A single grid point needs no choice, so its run with the first seed is also a final run.
            (
                variant,
                self.trial(variant, point, self.seeds[0], student, tests=len(self.points(variant)) == 1),
            )
            for variant in self.trained()
            for student in [self.untrained(variant.start)]
            for point in self.points(variant)
        ]

    def untrained(self, start: Start) -> str:
        """Return the folder or name of the student with which all variants of a start begin."""
        given = self.recipe.student.model
        return str(self.base(start).folder / "untrained") if given is None else given

    def check(self) -> None:
        """Check all settings, so that a mistake does not stop the comparison after hours.

        Raises:
            UserError: a setting is invalid; the message names the setting and the remedy.
        """
        tests = self.recipe.data.tests
        check_sets([name for name in tests if name not in text_tests(tests)])
        if self.recipe.data.valid is None and any(len(self.points(each)) > 1 for each in self.trained()):
            raise UserError(
                "data.valid is missing: settings are chosen on the validation set, never on a test set; give one, or "
                "--learning_rates with a single value and methods that have no grid of their own"
            )
        if self.sizes and self.recipe.student.model is not None:
            raise UserError("--sizes cuts the teacher to several sizes, but student.model gives one: leave one out")
        if any(start.name for start in self.starts):
            check_starts(self.recipe)
        for variant in self.trained():
            changes = {**variant.settings, "seed": self.seeds[0]}
            make_plan(make_trial(self.root, self.recipe, variant.key, changes).config)
        for start in self.starts:
            for trial in (self.base(start), *(self.size_base(start, size) for size in self.sizes)):
                make_plan(trial.config)


def describe_runs(counts: Mapping[str, int]) -> str:
    """Return the runs of `Study.runs` in one line."""
    parts = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return f"{sum(counts.values())} runs: {parts}"


def size_label(size: str) -> str:
    """Return the text of a further size, which is a rank or a number of parameters."""
    return f"rank {size}" if is_rank(size) else size


def _other_size(size: str) -> dict[str, Any]:
    """Return the settings of a further size for the recipe's own start, by dotted key."""
    return {
        "student.factorize.rank": int(size) if is_rank(size) else None,
        "student.factorize.target_params": None if is_rank(size) else size,
        "student.factorize.ranks": None,
        # A rank for all matrices leaves no ranks to choose.
        **({"student.factorize.allocation": "uniform"} if is_rank(size) else {}),
    }


def learns_answers(variant: Variant) -> bool:
    """Return whether a variant trains on answers that the teacher generates."""
    return METHODS[variant.settings["method"]].teacher_writes


@dataclass
class Findings:
    """The results of a comparison."""

    bases: dict[str, Result]
    """By start: the result of the untrained student; that of the first start has the teacher's, too."""
    trials: dict[str, list[Result]] = field(default_factory=dict)
    """By variant: the results of every grid point with the first seed."""
    runs: dict[str, list[Result]] = field(default_factory=dict)
    """By variant: the results of the chosen grid point, one per seed."""
    sizes: dict[str, dict[str, Result]] = field(default_factory=dict)
    """By size: the results of the untrained students under the keys of "none", and the result of each variant."""

    @property
    def base(self) -> dict[str, Any]:
        """The metrics of the teacher and of the first start's untrained student."""
        metrics = next(iter(self.bases.values())).metrics
        assert metrics is not None
        return metrics

    @property
    def failed(self) -> list[Result]:
        """All runs that failed."""
        groups = [*self.trials.values(), *self.runs.values(), *(list(each.values()) for each in self.sizes.values())]
        return [result for group in groups for result in group if result.error is not None]


def conduct(study: Study) -> Findings:
    """Run all runs of the comparison that are not finished yet.

    Raises:
        UserError: the teacher or an untrained student could not be scored.
    """
    counts = study.runs()
    say(describe_runs(counts))
    with Progress(sum(counts.values()), describe_scores) as progress:
        return _conduct(study, progress)


def _conduct(study: Study, progress: Progress) -> Findings:
    trained, starts = study.trained(), study.starts
    bases = study.launcher.run([study.base(start) for start in starts], progress)
    for start, base in zip(starts, bases, strict=True):
        if base.metrics is None:
            who = start.title("the teacher and the untrained student")
            raise UserError(f"{who} could not be scored: {base.error}")
    no_answers = generate_responses(study) if any(map(learns_answers, trained)) else None

    def run(planned: Planned) -> list[tuple[Variant, Result]]:
        able = [trial for variant, trial in planned if no_answers is None or not learns_answers(variant)]
        results = {result.trial.folder: result for result in study.launcher.run(able, progress)}
        return [(variant, results.get(trial.folder, Result(trial, None, no_answers))) for variant, trial in planned]

    findings = Findings({start.name: base for start, base in zip(starts, bases, strict=True)})
    for variant, result in run(study.grid_trials()):
        findings.trials.setdefault(variant.key, []).append(result)
    chosen = {
        variant.key: choice.settings
        for variant in trained
        if (choice := choose(findings.trials[variant.key], validation_score)) is not None
    }
    for name, trials in findings.trials.items():
        findings.runs[name] = list(trials) if len(trials) == 1 or name not in chosen else []
    for variant, result in run(_final_trials(study, chosen)):
        findings.runs[variant.key].append(result)
    untrained = iter(
        study.launcher.run([study.size_base(start, size) for size in study.sizes for start in starts], progress)
    )
    findings.sizes = {size: {start.key("none"): next(untrained) for start in starts} for size in study.sizes}
    planned = {size: _size_trials(study, chosen, each) for size, each in findings.sizes.items()}
    sized = iter(run([pair for pairs in planned.values() for pair in pairs]))
    for size, pairs in planned.items():
        findings.sizes[size] |= {variant.key: next(sized)[1] for variant, _ in pairs}
    return findings


def _final_trials(study: Study, chosen: Mapping[str, Mapping[str, Any]]) -> Planned:
    """Return the runs of the chosen grid points with every seed that has no run yet."""
    return [
        (variant, study.trial(variant, chosen[variant.key], seed, study.untrained(variant.start), tests=True))
        for variant in study.trained()
        if variant.key in chosen
        for seed in study.seeds[len(study.points(variant)) == 1 :]
    ]


def _size_trials(study: Study, chosen: Mapping[str, Mapping[str, Any]], untrained: Mapping[str, Result]) -> Planned:
    """Return the runs of the chosen grid points from the untrained students of another size."""
    planned = []
    for variant in study.trained():
        base = untrained[variant.start.key("none")]
        if base.metrics is not None and variant.key in chosen:
            student = str(base.trial.folder / "untrained")
            point, seed = chosen[variant.key], study.seeds[0]
            planned.append((variant, study.trial(variant, point, seed, student, tests=True, valid=False)))
    return planned


def validation_score(result: Result) -> float:
    """Return the ROUGE-L of a run's student on the validation set."""
    assert result.metrics is not None
    return float(result.metrics["student"]["valid"]["rougeL"])


def describe_scores(metrics: Mapping[str, Any]) -> str:
    """Return the scores of a run in one line."""
    parts = []
    for name, scores in metrics.items():
        if isinstance(scores, dict) and "rougeL" in scores:
            values = {**scores["rougeL"], **({"validation": scores["valid"]["rougeL"]} if "valid" in scores else {})}
            shown = [f"{key} {value:.1f}" for key, value in values.items()]
            texts = scores.get("texts", {})
            shown += [f"perplexity {text} {show_perplexity(each['perplexity'])}" for text, each in texts.items()]
            parts.append(f"{name} {' '.join(shown)}")
    return "; ".join(parts)


def generate_responses(study: Study) -> str | None:
    """Generate the teacher's answers to the training prompts if they are missing; returns the reason of a failure."""
    if study.responses.is_file() and read_provenance(study.responses) is not None:
        return None
    arguments = {**study.response_arguments(), "output": str(study.responses)}
    words = [word for key, value in arguments.items() if value is not None for word in (f"--{key}", str(value))]
    say("The teacher answers the training prompts for SeqKD ...")
    command = study.launcher.command("llmdistill.cli", "generate", *words)
    log = study.responses.with_suffix(".log")
    write_text(study.responses.with_suffix(".command"), shown_command(command) + "\n")
    return study.launcher.call(command, log)
