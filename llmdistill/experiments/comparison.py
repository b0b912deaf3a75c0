"""A comparison from beginning to end: base, grid, choice, seeds, sizes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmdistill.config import RunConfig
from llmdistill.errors import UserError
from llmdistill.experiments.equal_tokens import steps_for_equal_tokens
from llmdistill.experiments.launcher import Launcher, shown_command
from llmdistill.experiments.trials import Result, Trial, make_trial, run_trial
from llmdistill.experiments.variants import Variant
from llmdistill.files import write_text
from llmdistill.generation.provenance import read_provenance
from llmdistill.report.results import check_sets
from llmdistill.run.plan import make_plan

BASE = Variant("base", "teacher and untrained student", {"method": "none"})


@dataclass(frozen=True)
class Study:
    """What to compare, and how.

    Every trained variant starts from the same student, sees the examples in the same order in batches of the same
    size, and learns as many tokens. Its grid is tried with the first seed and chosen on the validation set.
    """

    recipe: RunConfig
    root: Path
    variants: Sequence[Variant]
    grid: Mapping[str, Sequence[Any]]
    """Values that every method tries, by dotted key."""
    seeds: Sequence[int]
    sizes: Sequence[str]
    """Further sizes of the student: a rank, or parameters as in target_params."""
    launcher: Launcher

    def trained(self) -> list[Variant]:
        """The variants that train."""
        return [variant for variant in self.variants if variant.trains]

    def final_runs(self) -> int:
        """Runs beyond the trials; where there is nothing to choose, the one trial is the first seed's final run."""
        return sum(len(self.seeds) - (len(variant.points(self.grid)) == 1) for variant in self.trained())

    def base(self) -> Trial:
        """Teacher and untrained student, on all sets."""
        return make_trial(self.root, self.recipe, BASE, {}, self.seeds[0], scoring__models=["teacher", "untrained"])

    def size_base(self, size: str) -> Trial:
        """The untrained student of another size."""
        ranks = {"student__factorize__rank": int(size) if size.isdigit() else None}
        target = {"student__factorize__target_params": None if size.isdigit() else size}
        cleared = {"student__factorize__ranks": None, "data__valid": None}
        more = {**ranks, **target, **cleared, "scoring__models": ["untrained"]}
        untrained = replace(BASE, label=f"untrained student of {f'rank {size}' if size.isdigit() else size}")
        return make_trial(self.root, self.recipe, untrained, {}, self.seeds[0], **more)

    @property
    def responses(self) -> Path:
        """The teacher's answers to the training prompts, for SeqKD."""
        words = json.dumps(self.response_arguments(), sort_keys=True)
        return self.root / "seqkd" / f"responses-{hashlib.sha256(words.encode()).hexdigest()[:8]}.jsonl"

    def response_arguments(self) -> dict[str, Any]:
        """What the teacher answers, and how: decoded as the answers are that are scored."""
        data, scoring = self.recipe.data, self.recipe.scoring
        return {
            "model": self.recipe.teacher.model,
            "data": data.train,
            "decoding": scoring.decoding,
            "seed": self.seeds[0],
            "batch_size": scoring.batch_size,
            "max_prompt_length": data.max_prompt_length,
            "max_length": data.max_length,
            "long_prompts": data.long_prompts,
        }

    def trial(
        self, variant: Variant, point: Mapping[str, Any], seed: int, student: str, *, tests: bool, valid: bool = True
    ) -> Trial:
        """A training run from that student; `tests`: whether it is scored on the test sets too."""
        more: dict[str, Any] = {"student__model": student, "scoring__models": ["student"]}
        if not tests:
            more["data__tests"] = {}
        if not valid:
            more["data__valid"] = None
        if variant.settings["method"] == "seqkd":
            more["data__train"] = str(self.responses)
            more["train__steps"] = steps_for_equal_tokens(self.recipe, self.responses, seed)
        return make_trial(self.root, self.recipe, variant, point, seed, **more)

    def untrained(self) -> str:
        """The student that all variants start from."""
        given = self.recipe.student.model
        return str(self.base().folder / "untrained") if given is None else given

    def check(self) -> None:
        """Refuse what would fail after hours.

        Raises:
            UserError: with the setting and the remedy.
        """
        check_sets(list(self.recipe.data.tests))
        if self.recipe.data.valid is None and any(len(each.points(self.grid)) > 1 for each in self.trained()):
            raise UserError(
                "data.valid is missing: settings are chosen on the validation set, never on a test set; give one, or "
                "--learning_rates with a single value and methods that have no grid of their own"
            )
        if self.sizes and self.recipe.student.model is not None:
            raise UserError("--sizes cuts the teacher to several sizes, but student.model gives one: leave one out")
        for variant in self.trained():
            make_plan(make_trial(self.root, self.recipe, variant, {}, self.seeds[0]).config)
        for size in self.sizes:
            make_plan(self.size_base(size).config)


@dataclass
class Findings:
    """What a comparison found."""

    base: dict[str, Any]
    """The metrics of teacher and untrained student."""
    trials: dict[str, list[Result]] = field(default_factory=dict)
    """Every point of a variant's grid at the first seed."""
    runs: dict[str, list[Result]] = field(default_factory=dict)
    """The chosen point, one result a seed."""
    sizes: dict[str, dict[str, Result]] = field(default_factory=dict)
    """By size: the untrained student under "none", and each variant."""

    @property
    def failed(self) -> list[Result]:
        """Every run that failed."""
        groups = [*self.trials.values(), *self.runs.values(), *(list(each.values()) for each in self.sizes.values())]
        return [result for group in groups for result in group if result.error is not None]


class Progress:
    """Says what is running, and how far the comparison is."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def run(self, trial: Trial, launcher: Launcher) -> Result:
        """Run a trial and say how it went."""
        self._done += 1
        head = f"[{self._done}/{self._total}] {trial.title}"
        finished = trial.metrics() is not None
        if not finished:
            print(f"{head} ...", flush=True)
        result = run_trial(trial, launcher)
        kept = " (kept)" if finished else ""
        print(f"{head}: {_said(result)}{kept}", flush=True)
        return result


def _said(result: Result) -> str:
    if result.metrics is None:
        return f"FAILED: {result.error}"
    parts = []
    for name, scores in result.metrics.items():
        if isinstance(scores, dict) and "rougeL" in scores:
            values = {**scores["rougeL"], **({"validation": scores["valid"]["rougeL"]} if "valid" in scores else {})}
            parts.append(f"{name} " + " ".join(f"{key} {value:.1f}" for key, value in values.items()))
    return "; ".join(parts)


def conduct(study: Study) -> Findings:
    """Run whatever is not finished yet.

    Raises:
        UserError: the base failed, without which nothing can be compared.
    """
    trained = study.trained()
    tried = sum(len(variant.points(study.grid)) for variant in trained)
    progress = Progress(1 + tried + study.final_runs() + len(study.sizes) * (1 + len(trained)))
    base = progress.run(study.base(), study.launcher)
    if base.metrics is None:
        raise UserError(f"the teacher and the untrained student could not be scored: {base.error}")
    findings = Findings(base.metrics)
    student = study.untrained()
    no_responses = generate_responses(study) if any(v.settings["method"] == "seqkd" for v in trained) else None

    def run(variant: Variant, point: Mapping[str, Any], seed: int, start: str, **scores: bool) -> Result:
        if variant.settings["method"] == "seqkd" and no_responses is not None:
            return Result(make_trial(study.root, study.recipe, variant, point, seed), None, no_responses)
        return progress.run(study.trial(variant, point, seed, start, **scores), study.launcher)

    for variant in trained:
        points = variant.points(study.grid)
        # With one point there is nothing to choose, and its first seed is a final run at once.
        tests = len(points) == 1
        findings.trials[variant.name] = [run(variant, point, study.seeds[0], student, tests=tests) for point in points]
    chosen = {name: result.trial.point for name, trials in findings.trials.items() if (result := choose(trials))}
    for variant in trained:
        trials = findings.trials[variant.name]
        if variant.name not in chosen:
            findings.runs[variant.name] = trials
            continue
        kept = trials if len(trials) == 1 else []
        seeds = study.seeds[len(kept) :]
        findings.runs[variant.name] = [
            *kept,
            *(run(variant, chosen[variant.name], seed, student, tests=True) for seed in seeds),
        ]
    for size in study.sizes:
        trial = study.size_base(size)
        findings.sizes[size] = {"none": progress.run(trial, study.launcher)}
        if findings.sizes[size]["none"].metrics is None:
            continue
        for variant in (each for each in trained if each.name in chosen):
            findings.sizes[size][variant.name] = run(
                variant, chosen[variant.name], study.seeds[0], str(trial.folder / "untrained"), tests=True, valid=False
            )
    return findings


def choose(trials: Sequence[Result]) -> Result | None:
    """The trial with the best ROUGE-L on the validation set; of equal ones the first. None where all failed."""
    ended = [trial for trial in trials if trial.metrics is not None]
    if len(ended) < 2:
        return ended[0] if ended else None
    return max(ended, key=lambda trial: trial.valid["rougeL"] if trial.valid is not None else 0.0)


def generate_responses(study: Study) -> str | None:
    """Let the teacher answer the training prompts, unless it has; returns why it could not."""
    if study.responses.is_file() and read_provenance(study.responses) is not None:
        return None
    arguments = {**study.response_arguments(), "output": str(study.responses)}
    words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    print("The teacher answers the training prompts for SeqKD ...", flush=True)
    command = study.launcher.command("llmdistill.cli", "generate", *words)
    log = study.responses.with_suffix(".log")
    write_text(study.responses.with_suffix(".command"), shown_command(command) + "\n")
    return study.launcher.run(command, log)
