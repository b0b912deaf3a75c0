"""A comparison of methods: its settings, the runs that it consists of, and what is checked before the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from llmdistill.config import RunConfig
from llmdistill.config.data import LIMITS, STUDENT_WRITES
from llmdistill.data.sources import kind_of
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.fingerprints import digest
from llmdistill.generation.response_file import read_provenance
from llmdistill.messages import say
from llmdistill.models.configs import load_config
from llmdistill.models.families import is_causal
from llmdistill.report.score import PERPLEXITY, ROUGE_L, SCORES, Score
from llmdistill.report.trials import run_entries
from llmdistill.studies.equal import check_starts, equal_size, other_size, size_label, steps_for_equal_tokens
from llmdistill.studies.launcher import Launcher
from llmdistill.studies.study import Outcome, PlannedRow, Study
from llmdistill.studies.trials import Choice, Progress, Result, Trial, grid_points, make_trial
from llmdistill.studies.variants import Start, Variant
from llmdistill.tasks.base import VALID
from llmdistill.tasks.text_windows import find_text_tests
from llmdistill.training.plan import Plan, make_plan


@dataclass(frozen=True, kw_only=True)
class Findings:
    rows: Mapping[str, Outcome]
    """The untrained student of each start, the first of which has the teacher's scores too, and each variant."""
    sizes: Mapping[str, Mapping[str, Outcome]]
    """By size: the untrained students and the variants with their chosen settings, under the keys of `rows`."""

    @property
    def base(self) -> dict[str, Any]:
        """The metrics of the teacher and of the first start's untrained student."""
        metrics = next(iter(self.rows.values())).first.metrics
        assert metrics is not None
        return metrics

    @property
    def failed(self) -> list[Result]:
        outcomes = [*self.rows.values(), *(outcome for size in self.sizes.values() for outcome in size.values())]
        return [result for outcome in outcomes for result in outcome.failed]


def describe_runs(counts: Mapping[str, int]) -> str:
    parts = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return f"{sum(counts.values())} runs: {parts}"


@dataclass(frozen=True)
class Answers(Trial):
    """A teacher's answers to the prompts of a training set."""

    work: ClassVar[str | None] = "generate"

    @property
    def output(self) -> Path:
        return Path(self.config["output"])

    @property
    def folder(self) -> Path:
        return self.output.parent

    @property
    def recipe(self) -> Path:
        return self.output.with_suffix(".yaml")

    def values(self) -> dict[str, Any]:
        return dict(self.config)

    def read_scores(self) -> dict[str, Any] | None:
        return read_provenance(self.output) if self.output.is_file() else None


@dataclass(frozen=True)
class MethodStudy(Study):
    """A comparison of methods.

    Every trained variant of a start begins with the same student, sees the examples in the same order in batches of the
    same size, and trains on the same number of tokens. The settings of a variant's grid are tried with the first seed,
    and the best settings are chosen on the validation set.
    """

    recipe: RunConfig
    variants: Sequence[Variant]
    grid: Mapping[str, Sequence[Any]]
    """The values that every method tries, by dotted key."""
    seeds: Sequence[int]
    sizes: Sequence[str]
    """Further sizes of the student: a rank, or a number of parameters as in target_params."""
    launcher: Launcher

    @property
    def score(self) -> Score:
        return PERPLEXITY if self.recipe.data.kind == "text" else ROUGE_L

    def trained(self) -> list[Variant]:
        return [variant for variant in self.variants if variant.method.trains]

    def points(self, variant: Variant) -> list[dict[str, Any]]:
        return grid_points({**self.grid, **variant.grid})

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

    def base(self, start: Start, size: str | None = None) -> Trial:
        """Return the run that scores the untrained student of a start, or its student of a further size.

        That of the first start scores the teacher too.
        """
        first = size is None and start.name == self.starts[0].name
        sizes = {} if size is None else other_size(size)
        changes = {
            "method": "none",
            "seed": self.seeds[0],
            **start.settings,
            **(equal_size(self.recipe, size) if start.name else sizes),
            # Nothing is chosen at a further size, which takes the settings of the table.
            **self._scored_on(tests=True, valid=size is None),
            "scoring.models": ["teacher", "untrained"] if first else ["untrained"],
        }
        of_size = "" if size is None else f" of {size_label(size)}"
        title = start.title(f"{'teacher and ' if first else ''}untrained student{of_size}")
        make = partial(make_trial, self.folder, self.recipe, start.key("base"), title=title)
        base = make(changes) if size is None else self.base(start)
        given = self.recipe.student.factorize.calibration.folder
        # All sizes of a start share a calibration; a folder that is given holds only one.
        is_shared = bool(self.sizes) if given is None else bool(start.name)
        if is_shared and base.config.student.factorize.is_weighted:
            # The name of the run says what was measured, on which data.
            folder = Path(self.folder / "calibration" if given is None else given) / base.folder.name
            changes["student.factorize.calibration.folder"] = str(folder)
        return make(changes)

    def _scored_on(self, *, tests: bool, valid: bool) -> dict[str, Any]:
        """Return the settings of the sets that a run is scored on, by dotted key.

        The loss on a validation text in the log is a sum of the method's terms, which changes with their weights. So
        the perplexity of this text is measured too, as that of a test set.
        """
        data = self.recipe.data
        is_measured = self.score is PERPLEXITY and data.valid is not None and kind_of(data.valid) == "text"
        return {
            "data.tests": {**(data.tests if tests else {}), **({VALID: data.valid} if valid and is_measured else {})},
            "data.valid": data.valid if valid else None,
        }

    @property
    def answers(self) -> Answers:
        """The teacher's answers to the training prompts for SeqKD, with the decoding of the scored answers."""
        data, scoring = self.recipe.data, self.recipe.scoring
        settings = {
            "model": self.recipe.teacher.model,
            "data": data.train,
            "decoding": scoring.decoding,
            "seed": self.seeds[0],
            "batch_size": scoring.batch_size,
            **{key: getattr(data, key) for key in LIMITS},
        }
        output = self.folder / "seqkd" / f"responses-{digest(settings)[:8]}.jsonl"
        title = "the teacher's answers to the training prompts"
        return Answers(title, {}, self.seeds[0], {**settings, "output": str(output)})

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
            **self._scored_on(tests=tests, valid=valid),
        }
        if variant.method.teacher_writes:
            changes["data.train"] = str(self.answers.output)
            changes["train.steps"] = steps_for_equal_tokens(self.recipe, self.answers.output, seed)
        return make_trial(self.folder, self.recipe, variant.key, changes, point, title=variant.title)

    def row(self, variant: Variant, error: str | None = None) -> PlannedRow:
        """Return the trials of every grid point with the first seed, and the other seeds of the chosen one."""
        student, tried = self.untrained(variant.start), self.points(variant)
        # A single grid point needs no choice, so its run with the first seed is also a final run.
        single = len(tried) == 1

        def final(choice: Choice) -> list[Trial]:
            return [self.trial(variant, choice.settings, seed, student, tests=True) for seed in self.seeds[single:]]

        # What is tried is not scored on the test sets, only what is chosen.
        trials = [self.trial(variant, point, self.seeds[0], student, tests=single) for point in tried]
        return PlannedRow(key=variant.key, trials=trials, further=final, error=error)

    def untrained(self, start: Start) -> str:
        """Return the folder or name of the student with which all variants of a start begin."""
        given = self.recipe.student.model
        return str(self.base(start).folder / "untrained") if given is None else given

    def merit(self, result: Result) -> float:
        assert result.metrics is not None
        value = run_entries(result.metrics)["student"].on_validation(self.score.key)
        assert value is not None
        return self.score.merit(value)

    def describe(self, metrics: Mapping[str, Any]) -> str:
        parts = []
        for name, entry in run_entries(metrics).items():
            shown = []
            for score in SCORES.values():
                valid = entry.on_validation(score.key)
                values = {**entry.by_set(score.key), **({} if valid is None else {"validation": valid})}
                prefix = "" if score is ROUGE_L else f"{score.name} "
                shown += [f"{prefix}{key} {score.show(value)}" for key, value in values.items()]
            parts += [f"{name} {' '.join(shown)}"] if shown else []
        return "; ".join(parts)

    def conduct(self) -> Findings:
        """Do all runs that are not finished yet; UserError if the teacher or an untrained student is not scored."""
        counts, trained, starts = self.runs(), self.trained(), self.starts
        say(describe_runs(counts))
        with Progress(sum(counts.values()), self.describe) as progress:
            run = partial(self.run, runner=self.launcher, progress=progress)
            rows = run([PlannedRow(key=start.key("none"), trials=[self.base(start)]) for start in starts])
            for start in starts:
                base = rows[start.key("none")].first
                if base.metrics is None:
                    who = start.title("the teacher and the untrained student")
                    raise UserError(f"{who} could not be scored: {base.error}")
            error = None
            if any(variant.method.teacher_writes for variant in trained):
                if self.answers.read_scores() is None:
                    say("The teacher answers the training prompts for SeqKD ...")
                with Progress() as silent:
                    (answers,) = self.launcher.undivided.run([self.answers], silent)
                error = answers.error
            rows |= run([self.row(variant, error if variant.method.teacher_writes else None) for variant in trained])
            untrained = {(size, start.key("none")): self.base(start, size) for size in self.sizes for start in starts}
            # First the untrained students of all sizes, because their runs leave what the trainings begin with.
            sizes = run([PlannedRow(key=key, name=key[1], trials=[trial]) for key, trial in untrained.items()])
            planned = {}
            for size, variant in product(self.sizes, trained):
                base, choice = sizes[size, variant.start.key("none")].first, rows[variant.key].choice
                if base.metrics is not None and choice is not None:
                    student = str(base.trial.folder / "untrained")
                    of_size = partial(self.trial, variant, choice.settings, self.seeds[0], student)
                    planned[size, variant.key] = of_size(tests=True, valid=False)
            sizes |= run([PlannedRow(key=key, name=key[1], trials=[trial]) for key, trial in planned.items()])
        by_size = {size: {key: outcome for (of, key), outcome in sizes.items() if of == size} for size in self.sizes}
        return Findings(rows=rows, sizes=by_size)

    def check(self) -> None:
        """Raises UserError if a setting is invalid, so that a mistake does not stop the comparison after hours."""
        tests, valid = self.recipe.data.tests, self.recipe.data.valid
        chooses = any(len(self.points(variant)) > 1 for variant in self.trained())
        if self.score is PERPLEXITY:
            teacher = str(self.recipe.teacher.model)
            config = load_config(locate(teacher))
            if not is_causal(config):
                raise UserError(
                    f"teacher.model {teacher} is an encoder ({config.model_type}), which has no perplexity: take a "
                    "decoder, a table of encoders (--suite minilm-table2), or `llmdistill evaluate --suite glue`"
                )
            for variant in self.trained():
                if variant.method.teacher_writes or STUDENT_WRITES in {**variant.settings, **variant.grid}:
                    raise UserError(
                        f"{variant.name} learns from answers that a model writes to instructions, but data.kind is "
                        "text: give --methods without it"
                    )
            if VALID in tests:
                raise UserError(
                    f"data.tests.{VALID}: that name is the validation text's (data.{VALID}); give another one"
                )
            if chooses and valid is not None and kind_of(valid) != "text":
                raise UserError(
                    f"data.valid {valid} is no plain text (.txt), whose perplexity chooses the settings: give one, or "
                    "--learning_rates with a single value and methods that have no grid of their own"
                )
        sets = [name for name in tests if self.score is PERPLEXITY or name not in find_text_tests(tests)]
        if not sets:
            raise UserError("data.tests is empty: a comparison needs at least one test set; give some as {name: path}")
        if "average" in sets:
            raise UserError(
                "data.tests has a set of the name average, which is the mean of all sets: call it otherwise"
            )
        if valid is None and chooses:
            raise UserError(
                "data.valid is missing: settings are chosen on the validation set, never on a test set; give one, or "
                "--learning_rates with a single value and methods that have no grid of their own"
            )
        if self.sizes and self.recipe.student.model is not None:
            raise UserError("--sizes cuts the teacher to several sizes, but student.model gives one: leave one out")
        repeated = next((size for size in self.sizes if self.sizes.count(size) > 1), None)
        if repeated is not None:
            raise UserError(f"--sizes: {repeated} is there twice; name it once")
        if any(start.name for start in self.starts):
            check_starts(self.recipe.student)
        for variant in self.trained():
            for point in grid_points(variant.grid):
                self._plan(variant, point)
        for start in self.starts:
            for size in (None, *self.sizes):
                make_plan(self.base(start, size).config)

    def check_files(self) -> None:
        """Raise a UserError if data of the trainings cannot be read, as far as that takes no time."""
        for variant in self.trained()[:1]:  # all of them have the same data
            self._plan(variant, {}).task.check_files()

    def _plan(self, variant: Variant, point: Mapping[str, Any]) -> Plan:
        changes = {**variant.settings, **point, "seed": self.seeds[0]}
        return make_plan(make_trial(self.folder, self.recipe, variant.key, changes).config)
