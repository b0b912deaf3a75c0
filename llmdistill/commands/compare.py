"""``llmdistill compare``: trains with a recipe and a list of methods and writes a report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from llmdistill.commands.conclude import conclude
from llmdistill.commands.published_table import compare_table
from llmdistill.config.command_line import build, parse_own, parse_run, recipe_names
from llmdistill.config.marks import at_least
from llmdistill.config.training import LEARNING_RATES
from llmdistill.errors import UserError
from llmdistill.messages import print_result
from llmdistill.methods import METHODS
from llmdistill.report.paper import table_names
from llmdistill.runtime.launch import split_launcher_flags
from llmdistill.studies.variants import (
    MethodTable,
    from_starts,
    load_method_table,
    load_methods,
    load_starts,
    method_names,
    method_table_names,
)


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """The settings of a comparison."""

    methods: str | None = None
    """Methods to compare, separated by commas; default: none,sft,kd,seqkd,makd, on text without seqkd."""
    suite: str | None = None
    """A table of the papers, given instead of methods; llmdistill evaluate has other suites. makd-table3-decoder,
    makd-table4-decoder and makd-table5 are lists of methods for decoders. The tables of encoders (such as
    minilm-table2) bring recipes of their own, and every model is fine-tuned on the table's tasks, with the settings
    under tasks."""
    rows: str | None = None
    """Rows of a table of encoders to run, by their keys, separated by commas; default: all that can be run here."""
    starts: str | None = None
    """Ways to make the untrained student, separated by commas: plain (plain SVD, one rank), activations or gradients
    (weighted by them, one rank), loss (weighted by gradients, ranks by predicted loss). Every method is trained from
    every start, all of them with equally many parameters; default: only the recipe's own."""
    seeds: int = field(default=3, metadata=at_least(1))
    """Number of seeds with which the chosen settings of each method are trained; the first seed also tries the grid."""
    learning_rates: list[float] | None = field(default=None, metadata=LEARNING_RATES)
    """Peak learning rates that every method tries; default: half, once and twice the recipe's."""
    sizes: list[str | int] = field(default_factory=list)
    """Further sizes of the student for the plot of quality against size: ranks (20) or parameters (0.69B, 40%)."""
    trials_at_once: int = field(default=1, metadata=at_least(1))
    """Number of runs at the same time. The runs share the GPUs of the machine evenly (8 at once on 8 GPUs: one each),
    or its CPU cores if it has no GPU."""
    output_dir: str | None = None
    """Folder of the comparison; default: runs/compare-RECIPE, followed by the suite's name if a suite is given."""

    def __post_init__(self) -> None:
        if self.suite is not None and self.methods is not None:
            raise ValueError("--suite and --methods both say what is compared: leave one out")
        if self.rows is not None and self.suite not in table_names():
            raise ValueError("--rows names rows of a table of encoders: name that table with --suite, or leave it out")
        if self.suite not in table_names():
            return
        # A setting that differs from its default was given by the user.
        defaults = CompareConfig()
        for name in ("starts", "seeds", "learning_rates", "sizes"):
            if getattr(self, name) != getattr(defaults, name):
                raise ValueError(
                    f"--{name} is for comparisons of decoders, and {self.suite} is a table of encoders: leave it "
                    "out; the settings of its fine-tunings are under --tasks"
                )


def build_parser() -> ArgumentParser:
    """Return the parser of the comparison's own arguments."""
    parser = ArgumentParser(
        prog="llmdistill compare",
        usage="llmdistill compare [--methods A,B | --suite NAME] [--KEY VALUE ...]",
        exit_on_error=False,
        description="Train a student by several methods under equal conditions and report how they compare. All "
        "settings of a run (llmdistill train --help all) can be given too; --num_gpus and similar flags are passed to "
        "the launcher. Finished runs are kept, so the same command continues an interrupted comparison.",
        epilog=f"Methods: {', '.join(method_names())}. Suites of decoders: {', '.join(method_table_names())}; of "
        f"encoders: {', '.join(table_names())}.",
    )
    parser.add_argument("--dry_run", action="store_true", help="Only list the runs.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_class_arguments(CompareConfig, None)
    return parser


def compare(arguments: Sequence[str]) -> int:
    """Run the command and return 1 if a run failed, 130 or 143 if a signal stopped it, else 0."""
    launcher_flags, arguments = split_launcher_flags(arguments)
    command = shlex.join(["llmdistill", "compare", *arguments, *launcher_flags])
    parsed, rest = parse_own(build_parser(), arguments)
    settings = build(parsed, CompareConfig, prefix="--")
    if settings.suite in table_names():
        rows = None if settings.rows is None else _split_list(settings.rows)
        return compare_table(parsed, rest, launcher_flags, rows=rows, command=command)
    recipe, flags = parse_run(rest, METHODS)
    if recipe.data.kind not in ("instructions", "text"):
        prefix = "data.kind is" if flags.recipe is None else f"--recipe {flags.recipe} has data.kind"
        raise UserError(
            f"{prefix} {recipe.data.kind}, and a comparison scores answers to instructions or the perplexity of texts: "
            "take a table of encoders (--suite minilm-table2), or `llmdistill evaluate --suite glue`"
        )
    table = choose_methods(settings, recipe.data.kind)
    usual = recipe.with_learning_rate().train.peak_learning_rate
    rates = settings.learning_rates or [factor * usual for factor in (0.5, 1.0, 2.0)]
    # Imported here so that --help and errors in the arguments do not wait for torch.
    from llmdistill.report.comparison import comparison_report
    from llmdistill.studies.collect import collect_comparison
    from llmdistill.studies.comparison import MethodStudy
    from llmdistill.studies.launcher import Launcher
    from llmdistill.training.plan import with_prompt
    from llmdistill.training.written_data import with_written_data

    name = flags.recipe or "own"
    name = name.replace("/", "-") if name in recipe_names() else Path(name).stem
    default = f"runs/compare-{name}" + ("" if settings.suite is None else f"-{settings.suite}")
    launcher = Launcher(tuple(launcher_flags), settings.trials_at_once)
    launcher.check()
    study = MethodStudy(
        recipe=with_prompt(recipe),  # fixed by the teacher, so that students of earlier runs get it too
        folder=Path(settings.output_dir or default),
        variants=table.variants,
        grid={"train.learning_rate": rates},
        seeds=[recipe.seed + offset for offset in range(settings.seeds)],
        sizes=[str(size) for size in settings.sizes],
        launcher=launcher,
    )
    study.check()
    if not parsed.dry_run:
        # Here, before all runs, so that each of them reads the same file.
        study = replace(study, recipe=with_written_data(study.recipe))
    if parsed.dry_run:
        print_plan(study, as_json=parsed.json)
        return 0
    study.check_files()
    return conclude(
        study,
        lambda findings: comparison_report(
            study.folder, collect_comparison(study, findings, title=table.title, paper=table.paper, command=command)
        ),
        as_json=parsed.json,
    )


def choose_methods(settings: CompareConfig, kind: str) -> MethodTable:
    """Return the named table, or one of the named methods (by default those for the kind of data), from every start."""
    if settings.suite is not None:
        table = load_method_table(settings.suite)
    else:
        usual = ("none", "sft", "kd", "seqkd", "makd")
        default = [name for name in usual if kind != "text" or not METHODS[name].teacher_writes]
        names = default if settings.methods is None else _split_list(settings.methods)
        table = MethodTable("Did it help? Methods under equal conditions", load_methods(names))
    if settings.starts is None:
        return table
    return replace(table, variants=from_starts(table.variants, load_starts(_split_list(settings.starts))))


def _split_list(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def print_plan(study: Any, *, as_json: bool) -> None:
    """Print the runs of a comparison without running them."""
    from llmdistill.studies.comparison import describe_runs

    trials = [
        *map(study.base, study.starts),
        *(trial for variant in study.trained() for trial in study.row(variant).trials),
    ]
    counts = study.runs()
    if as_json:
        runs = [{"title": trial.title, "folder": str(trial.folder)} for trial in trials]
        further = {"final_runs": study.final_runs(), "sizes": list(study.sizes), "counts": counts}
        print_result({"runs": runs, **further})
        return
    print_result(describe_runs(counts))
    for trial in trials:
        print_result(f"{trial.title:60} {trial.folder}")
    print_result("The other runs depend on the settings that the validation set chooses.")
