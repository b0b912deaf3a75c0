"""Runs a comparison of methods: base, grid, choice, seeds, sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmdistill.errors import UserError
from llmdistill.generation.answers_file import read_provenance
from llmdistill.messages import say
from llmdistill.report.score import ROUGE_L, SCORES
from llmdistill.studies.study import Planned, Study
from llmdistill.studies.trials import Progress, Result, choose
from llmdistill.studies.variants import Variant


@dataclass
class Findings:
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
        groups = [*self.trials.values(), *self.runs.values(), *(list(each.values()) for each in self.sizes.values())]
        return [result for group in groups for result in group if result.error is not None]


def describe_runs(counts: Mapping[str, int]) -> str:
    parts = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return f"{sum(counts.values())} runs: {parts}"


def conduct(study: Study) -> Findings:
    """Do all runs that are not finished yet; raises UserError if the teacher or an untrained student is not scored."""
    counts = study.runs()
    say(describe_runs(counts))
    with Progress(sum(counts.values()), describe_scores) as progress:
        trained, starts = study.trained(), study.starts
        bases = study.launcher.run([study.base(start) for start in starts], progress)
        for start, base in zip(starts, bases, strict=True):
            if base.metrics is None:
                who = start.title("the teacher and the untrained student")
                raise UserError(f"{who} could not be scored: {base.error}")
        no_answers = generate_responses(study) if any(each.method.teacher_writes for each in trained) else None

        def run(planned: Planned) -> list[tuple[Variant, Result]]:
            able = [trial for variant, trial in planned if no_answers is None or not variant.method.teacher_writes]
            results = {result.trial.folder: result for result in study.launcher.run(able, progress)}
            return [(variant, results.get(trial.folder, Result(trial, None, no_answers))) for variant, trial in planned]

        findings = Findings({start.name: base for start, base in zip(starts, bases, strict=True)})
        for variant, result in run(study.grid_trials()):
            findings.trials.setdefault(variant.key, []).append(result)
        chosen = {
            variant.key: choice.settings
            for variant in trained
            if (choice := choose(findings.trials[variant.key], study.merit)) is not None
        }
        for name, trials in findings.trials.items():
            findings.runs[name] = list(trials) if len(trials) == 1 or name not in chosen else []
        final = [
            (variant, study.trial(variant, chosen[variant.key], seed, study.untrained(variant.start), tests=True))
            for variant in trained
            if variant.key in chosen
            for seed in study.seeds[len(study.points(variant)) == 1 :]  # the only trial was the run of the first seed
        ]
        for variant, result in run(final):
            findings.runs[variant.key].append(result)
        of_sizes = [study.base(start, size) for size in study.sizes for start in starts]
        untrained = iter(study.launcher.run(of_sizes, progress))
        findings.sizes = {size: {start.key("none"): next(untrained) for start in starts} for size in study.sizes}
        planned = {size: _size_trials(study, chosen, each) for size, each in findings.sizes.items()}
        sized = iter(run([pair for pairs in planned.values() for pair in pairs]))
        for size, pairs in planned.items():
            findings.sizes[size] |= {variant.key: next(sized)[1] for variant, _ in pairs}
        return findings


def _size_trials(study: Study, chosen: Mapping[str, Mapping[str, Any]], untrained: Mapping[str, Result]) -> Planned:
    planned = []
    for variant in study.trained():
        base = untrained[variant.start.key("none")]
        if base.metrics is not None and variant.key in chosen:
            student = str(base.trial.folder / "untrained")
            point, seed = chosen[variant.key], study.seeds[0]
            planned.append((variant, study.trial(variant, point, seed, student, tests=True, valid=False)))
    return planned


def describe_scores(metrics: Mapping[str, Any]) -> str:
    parts = []
    for name, model in metrics.items():
        shown = []
        for score in SCORES.values() if isinstance(model, dict) and "params" in model else ():
            valid = score.of_validation(model)
            values = {**(score.of_sets(model) or {}), **({} if valid is None else {"validation": valid})}
            prefix = "" if score is ROUGE_L else f"{score.name} "
            shown += [f"{prefix}{key} {score.show(value)}" for key, value in values.items()]
        parts += [f"{name} {' '.join(shown)}"] if shown else []
    return "; ".join(parts)


def generate_responses(study: Study) -> str | None:
    """Generate the teacher's answers to the training prompts if they are missing; returns the reason of a failure."""
    if study.responses.is_file() and read_provenance(study.responses) is not None:
        return None
    say("The teacher answers the training prompts for SeqKD ...")
    settings = {**study.response_arguments(), "output": str(study.responses)}
    return study.launcher.work("generate", settings, study.responses.with_suffix(".yaml"))
