"""A run's second stage: fine-tunes the student on tasks with fine-tuned teachers (KroneckerBERT §3.7, Table 6).

It is planned and checked before the first stage begins, and run after it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from llmdistill.config import command_line
from llmdistill.config.tasks import FineTuningConfig
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.methods.kroneckerbert import ffn_aspect
from llmdistill.models.configs import load_config
from llmdistill.models.tokenizer import check_tokens
from llmdistill.papers.fine_tuning.protocols import BEST, fine_tuning_values, teacher_of
from llmdistill.papers.fine_tuning.results import dev_columns, shown_metrics, tuned_entries
from llmdistill.papers.fine_tuning.run import FineTuning, check_drawable, check_layer, fine_tune
from llmdistill.papers.fine_tuning.task_study import TaskStudy
from llmdistill.report.study_report import StudyReport
from llmdistill.report.tables import TitledTable, count_seeds, over_seeds, show_seeds
from llmdistill.report.trials import ModelEntry
from llmdistill.runtime.distributed import World
from llmdistill.runtime.terminal import print_main
from llmdistill.studies.launcher import InProcess
from llmdistill.studies.study import PlannedRow, Study
from llmdistill.studies.trials import Trial
from llmdistill.tasks.benchmark import find_benchmark, find_benchmarks
from llmdistill.training.plan import Plan

TEACHER = "teacher"
"""The row of the run's own teacher, which is fine-tuned if no fine-tuned teacher is given."""

ROWS = {
    TEACHER: {"title": "teacher", "pretraining": "", "finetuning": "labels"},
    "no_kd": {"title": "no KD in stage 2", "pretraining": "distilled", "finetuning": "labels"},
    "no_pretraining": {"title": "no stage 1", "pretraining": "none", "finetuning": "distilled"},
    "two_stages": {"title": "both stages", "pretraining": "distilled", "finetuning": "distilled"},
}
"""The texts of the rows, in the order of the table; the trainings are those of the first and of the second stage."""


@dataclass(frozen=True, kw_only=True)
class TasksPlan(Study):
    first: Plan
    """The first run of the first stage; its teacher is the teacher of the whole command."""
    last: Plan
    """The last run of the first stage; its student is fine-tuned."""
    tasks: list[str]
    configs: Mapping[str, FineTuningConfig]
    studies: Mapping[str, Mapping[str, TaskStudy]]
    given: Mapping[str, str]
    """Folder or hub name of each task's teacher; empty if the user named no teacher."""

    def entries(self, trial: Trial, metrics: Mapping[str, Any]) -> dict[str, ModelEntry]:
        return tuned_entries(metrics)

    def overview(self) -> dict[str, Any]:
        rows = {
            row: {
                "model": config.model,
                "teacher": config.teacher,
                "terms": dict(next(iter(self.studies[row].values())).plan.method.weights),
                "runs": sum(study.protocol.num_trials for study in self.studies[row].values()),
            }
            for row, config in self.configs.items()
        }
        copied = any(study.plan.models.copies_classifier for row in self.studies.values() for study in row.values())
        return {"names": self.tasks, "folder": str(self.folder), "copy_classifier": copied, "rows": rows}

    def check_tokens(self) -> None:
        """Raise UserError if the tokens of a teacher are not those of the student."""
        student = self.last.models.tokenizer_path
        for path in set(self.given.values()):
            check_tokens(path, student)
        if TEACHER in self.configs:
            check_tokens(self.first.models.teacher_path, student)

    def check_data(self) -> None:
        """Read all data of the second stage, so that a mistake is a UserError before the hours of the first stage.

        Every rank must call this method.
        """
        student = self.last.models.tokenizer_path
        for studies in self.studies.values():
            for study in studies.values():
                plan = study.plan
                # A teacher may not be fine-tuned yet; its tokens are the student's, see `check_tokens`.
                plan.task.read_on_all(replace(plan.models, tokenizer_path=student, teacher_path=student))

    def conduct(self) -> None:
        """Fine-tune every row on every task, and write and print the table; every rank must call this method.

        Finished runs are not repeated. Raises UserError if some have other settings, or a run fails.
        """
        world = World.current()
        gc.collect()  # the engine of the first stage has reference cycles
        prefix, results = self.last.config.tasks.prefix, {}
        runner = InProcess(lambda config: fine_tune(config, command=world.command, prefix=prefix))
        for row, config in self.configs.items():  # one after the other, because the first may be the others' teacher
            print_main(f"\nTasks       {ROWS[row]['title']}")
            trial = FineTuning(ROWS[row]["title"], {}, self.last.config.seed, config)
            ended = self.run([PlannedRow(key=row, trials=[trial])], runner)[row].first
            if ended.metrics is None:
                raise UserError(str(ended.error))
            results[row] = ended.metrics
        figures = self._draw() if self.last.config.tasks.tsne else {}
        if world.is_main:
            report = stages_report(self.folder, collect_stages(results, figures, run=str(self.last.folder)))
            report.write()
            report.print()

    def _draw(self) -> dict[str, Any]:
        """Draw one t-SNE figure per task with the teacher and each row's best model; the last row has both stages."""
        rows = sorted(self.configs, key=list(ROWS).index)
        aspect = ffn_aspect(self.last.config.method_settings)
        figures = {}
        for task, study in next(iter(self.studies.values())).items():
            models = {ROWS[TEACHER]["title"]: self.given[task]} if task in self.given else {}
            models |= {ROWS[row]["title"]: str(self.folder / row / task / BEST) for row in rows}
            figure = study.figure(models, aspect, self.folder / "tsne", task)
            figures[task] = {"file": f"tsne/{task}.png", **figure}
        return figures


def plan_tasks(plans: Sequence[Plan]) -> TasksPlan:
    """Plan the second stage of a run from configurations alone, after the plans of the first; UserError if invalid."""
    first, last = plans[0], plans[-1]
    settings = last.config.tasks
    tasks = find_benchmarks(settings.names, setting="tasks.names")
    for task in tasks:
        benchmark, key = find_benchmark(task)
        benchmark.check_folder(settings.data_dir, key, setting="tasks.data_dir")
        if settings.tsne:
            check_drawable(task, setting="tasks.tsne")
    configs = _row_configs(plans, tasks)
    has_teacher = any(config.teacher is not None for config in configs.values())
    named = settings.teacher if has_teacher else None
    given = {} if named is None else {task: teacher_of(named, task, tasks, key="tasks.teacher") for task in tasks}
    studies: dict[str, dict[str, TaskStudy]] = {row: {} for row in configs}
    for (row, config), task in product(configs.items(), tasks):
        # The row's student and teacher may not exist before the first stage has ended.
        student = first.models.teacher if config.model == str(first.models.teacher_path) else last.models.student
        if settings.tsne:
            check_layer(config.tsne_layer, student, named=config.model, key="tasks.tsne_layer")
        pending, (benchmark, key) = {config.model: student}, find_benchmark(task)
        teacher = None
        if config.teacher is not None:
            teacher = given.get(task, str(Path(config.teacher) / task / BEST))
            if task in given:
                benchmark.check_fine_tuned(load_config(given[task]), key, named=f"tasks.teacher {given[task]}")
            else:
                # The row of the teacher makes it before the others need it.
                pending[teacher] = benchmark.fine_tuned(first.models.teacher, key)
        folder = Path(str(config.output_dir)) / task
        study = TaskStudy(folder=folder, config=config, task=task, teacher=teacher, pending=pending)
        assert study.plan is not None  # resolves and checks the settings
        studies[row][task] = study
    return TasksPlan(
        folder=last.folder / "tasks",
        first=first,
        last=last,
        tasks=tasks,
        configs=configs,
        studies=studies,
        given=given,
    )


def _row_configs(plans: Sequence[Plan], tasks: list[str]) -> dict[str, FineTuningConfig]:
    """Return the fine-tuning settings of each row of Table 6 in order; the teacher is first if a row needs it.

    The second stage has the methods of the run with their settings, which `tasks` overrides.
    """
    plan, config = plans[-1], plans[-1].config
    settings, folder = config.tasks, plan.folder / "tasks"
    shared = fine_tuning_values(config, tasks)
    # Without a teacher there is no classifier to copy.
    on_labels = {**shared, "method": "sft", "copy_classifier": None}
    teacher = str(folder / TEACHER) if settings.teacher is None else settings.teacher
    trained = str(plan.folder / "student")
    given = plan.config.student.model
    untrained = str(plan.folder / "untrained") if given is None else str(locate(given))
    method = config.method if settings.method is None else settings.method
    if not METHODS[method].needs_teacher:
        raise UserError(
            f"tasks.method: the run's method {method} has no teacher; say by which one the student learns from its "
            "fine-tuned teachers, such as kroneckerbert or kd"
        )
    inherited = config.also if settings.method is None else []
    also = inherited if settings.also is None else settings.also
    unused = sorted(settings.settings.keys() - {method, *also})
    if unused:
        raise UserError(
            f"tasks.settings.{unused[0]}: that is no method of the second stage ({', '.join([method, *also])}); "
            "leave it out, or add the method as tasks.also"
        )
    sections: dict[str, Any] = {
        name: command_line.with_values(part, settings.settings.get(name, {}), key=f"tasks.settings.{name}")
        for name, part in config.method_settings.items()
        if name in (method, *also)
    }
    learning = {**shared, "teacher": teacher, "method": method, "also": also, "method_settings": sections}
    rows = {
        TEACHER: {**on_labels, "model": str(plans[0].models.teacher_path)},
        "no_kd": {**on_labels, "model": trained},
        "no_pretraining": {**learning, "model": untrained},
        "two_stages": {**learning, "model": trained},
    }
    needs_teacher = settings.teacher is None and set(settings.rows) != {"no_kd"}
    return {
        row: command_line.build_checked(FineTuningConfig, {**rows[row], "output_dir": str(folder / row)}, METHODS)
        for row in ([TEACHER] if needs_teacher else []) + list(settings.rows)
    }


def collect_stages(results: Mapping[str, Mapping[str, Any]], figures: Mapping[str, Any], *, run: str) -> dict[str, Any]:
    """Return the rows of the results and the t-SNE figure of each task as plain JSON values; `run` is a folder."""
    rows = {
        row: {
            **ROWS[row],
            "params": of_row["params"]["model"]["total"],
            "dev": dev_columns(of_row["tasks"].values()),
            "average": of_row["averages"]["model"]["plain"],
        }
        for row, of_row in results.items()
    }
    with_teacher = next((of_row for of_row in results.values() if of_row["teacher"] is not None), None)
    if TEACHER not in rows and with_teacher is not None:
        # A teacher that was already fine-tuned: one model per task, with unknown seeds.
        scores = dev_columns(task["teacher"] for task in with_teacher["tasks"].values())
        rows[TEACHER] = {
            **ROWS[TEACHER],
            "params": with_teacher["params"]["teacher"]["total"],
            "dev": {
                name: {key: over_seeds([value]) for key, value in metrics.items()} for name, metrics in scores.items()
            },
            "average": with_teacher["averages"]["teacher"]["plain"],
        }
    last = list(results.values())[-1]
    columns = [
        {"task": name, "column": column, "metric": metric, "train": task["examples"]["train"]}
        for name, task in last["tasks"].items()
        for column in task["dev"]
        for metric in shown_metrics(task, column)
    ]
    return {
        "name": run,
        "columns": columns,
        "rows": {row: rows[row] for row in ROWS if row in rows},
        "figures": dict(figures),
        "seeds": max(len(task["seeds"]) for task in last["tasks"].values()),
        "limit": last["limit"],
        "own_teacher": TEACHER in results,
        "warnings": list(dict.fromkeys(warning for of_row in results.values() for warning in of_row["warnings"])),
        "run": last["run"],
    }


def stages_report(folder: Path, table: Mapping[str, Any]) -> StudyReport:
    """Return the report of the rows of `collect_stages`: report.md and report.json."""
    columns = table["columns"]
    averaged = len({column["task"] for column in columns}) > 1
    header = ["", "stage 1", "stage 2", "params"]
    header += [f"{column['column']} {column['metric']} ({column['train']:,})" for column in columns]
    rows = []
    for row in table["rows"].values():
        cells = [row["title"], row["pretraining"], row["finetuning"], f"{row['params']:,}"]
        cells += [show_seeds(row["dev"][column["column"]][column["metric"]]) for column in columns]
        rows.append([*cells, f"{row['average']:.1f}"] if averaged else cells)
    title = f"Dev sets x 100, {count_seeds(table['seeds'])}"
    shown = TitledTable(title, [*header, "average"] if averaged else header, rows)
    return StudyReport(
        folder=folder,
        results=table,
        file="report.json",
        template="two_stages",
        values={
            **table,
            "title": f"Two stages: {table['name']}",
            "legend": shown.title,
            "table": shown,
            "record": table["run"],
        },
        table=shown,
        left=range(3),
        closing=f"The table is in {folder / 'report.md'}, each row's own report in its folder there.",
    )
