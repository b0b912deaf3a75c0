"""``llmdistill compare --suite minilm-table2``: runs the rows of a published table of encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdistill.commands.conclude import conclude
from llmdistill.config import RunConfig
from llmdistill.config.command_line import parse_run
from llmdistill.config.overrides import flags, given_flags
from llmdistill.errors import UserError
from llmdistill.messages import print_result
from llmdistill.methods import METHODS
from llmdistill.runtime.terminal import quiet_transformers

_ANY_RECIPE = "minilm/6x384"
"""The recipe whose teacher and settings of fine-tuning hold for a table that trains no student."""

if TYPE_CHECKING:
    from llmdistill.papers.table_study import TableStudy
    from llmdistill.report.paper import PublishedTable, TableRow
    from llmdistill.report.study_report import StudyReport


def compare_table(
    parsed: Any, settings: Sequence[str], launcher_flags: Sequence[str], *, rows: Sequence[str] | None, command: str
) -> int:
    """Run the rows of a table and write the report; return 1 if a row failed, 130 or 143 after a signal, else 0.

    Args:
        parsed: the arguments of the comparison (`compare.build_parser`), with the name of the suite.
        settings: the settings of a run as the user typed them; they hold for every row.
        launcher_flags: flags of the deepspeed launcher for every run.
        rows: the keys of the rows to run; None for all that can be run.
        command: the command as the user typed it.
    """
    quiet_transformers()
    # Imported here so that --help and errors in the arguments do not wait for torch.
    from llmdistill.papers.published import PublishedReport, published_report
    from llmdistill.papers.table_study import TableStudy, rows_to_run
    from llmdistill.report.paper import load_table
    from llmdistill.report.record import describe_versions, make_record
    from llmdistill.studies.launcher import Launcher

    table = load_table(parsed.suite)
    chosen = rows_to_run(table, rows)
    configs, models = configs_of(table, chosen, settings)
    launcher = Launcher(tuple(launcher_flags), parsed.trials_at_once)
    launcher.check()
    folder = Path(parsed.output_dir or f"runs/{table.name}")
    study = TableStudy(table=table, configs=configs, models=models, folder=folder, launcher=launcher, command=command)
    if table.suite is not None and study.names:
        raise UserError(f"tasks.names is {study.names}: nothing is fine-tuned for {table.name}; leave it out")
    if parsed.dry_run:
        _print_plan(study, as_json=parsed.json)
        return 0
    study.check()

    def report(measured: Mapping[str, Any]) -> StudyReport:
        record, limit = make_record(command, 1), study.tasks.limit
        protocol = f"protocol {study.tasks.protocol}" + ("" if limit is None else f", {limit:,} training examples")
        facts = {
            "Command": command,
            "Hardware": record["hardware"],
            "Versions": describe_versions(record),
            **({"Fine-tuning": protocol} if table.suite is None else {"Scores": _suite_command(study)}),
            "Finished": record["finished"],
        }
        return published_report(folder, PublishedReport(table=table, measured=measured, facts=facts))

    return conclude(study, report, as_json=parsed.json)


def configs_of(
    table: PublishedTable, rows: Mapping[str, TableRow], settings: Sequence[str]
) -> tuple[dict[str, RunConfig], dict[str, str]]:
    """Return the complete configuration of each row, and the model of the rows that are only fine-tuned.

    The user's settings come after the table's own, and win. A row of the recipes' own teacher becomes one of the user's
    teacher, if there is one.
    """
    if "recipe" in given_flags(settings):
        raise UserError("--recipe: each row of a published table has its own; leave it out, or take --rows")
    usual_recipe = next((row.recipe for row in table.rows if row.recipe is not None), _ANY_RECIPE)
    configs, models = {}, {}
    for key, row in rows.items():
        configs[key] = _make_config(table, row.recipe or usual_recipe, row.settings, settings)
        if row.model is not None:
            own_teacher = _make_config(table, usual_recipe, {}, []).teacher.model
            models[key] = str(configs[key].teacher.model) if row.model == own_teacher else row.model
    return configs, models


def _make_config(table: PublishedTable, recipe: str, changes: Mapping[str, Any], settings: Sequence[str]) -> RunConfig:
    own = ["--recipe", recipe]
    if table.tasks:
        own += ["--tasks.names", ",".join(table.tasks), "--tasks.protocol", str(table.protocol)]
    own += flags({"tasks.out_of_domain": dict(table.out_of_domain), **changes})
    return parse_run([*own, *settings], METHODS)[0]


def _print_plan(study: TableStudy, *, as_json: bool) -> None:
    """Print the rows with what they run, and what is missing, without running anything."""
    trials = {name: protocol.num_trials for name, protocol in study.protocols().items()}
    rows: dict[str, dict[str, Any]] = {}
    for key in study.configs:
        row = study.row(key)
        rows[key] = {"label": row.label, "recipe": row.recipe, "model": study.model(key)}
    not_run = {row.label: row.missing for row in study.table.rows if row.missing is not None}
    missing, further = study.missing(), list(study.tasks.out_of_domain)
    if as_json:
        others = {"fine_tunings": trials, "out_of_domain": further, "suite": study.table.suite}
        print_result({"rows": rows, **others, "not_run": not_run, "missing": missing})
        return
    for key, planned in rows.items():
        verb = "fine-tunes" if study.table.suite is None else "scores"
        job = f"{verb} {planned['model']}" if planned["recipe"] is None else planned["recipe"]
        print_result(f"{key:24} {planned['label']}: {job}")
    counted = ", ".join(f"{name} {count}" for name, count in trials.items())
    fine_tunings = f"{sum(trials.values())} fine-tunings of each row: {counted}"
    print_result(
        f"then {fine_tunings if study.table.suite is None else 'all rows side by side by ' + _suite_command(study)}"
    )
    if further:
        print_result(f"Scored too on {', '.join(further)}, by the models of the task that each belongs to")
    for label, reason in not_run.items():
        print_result(f"Not run     {label}: {reason}")
    for sentence in missing:
        print_result(f"Missing     {sentence}")


def _suite_command(study: TableStudy) -> str:
    return f"llmdistill evaluate --suite {study.table.suite}"
