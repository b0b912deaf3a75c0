"""The first lines that a run shows: models, method, data and batch."""

from __future__ import annotations

from llmdistill.data.prompts import describe_prompt
from llmdistill.models.forms import describe
from llmdistill.students.sizes import describe_params, describe_ranks
from llmdistill.training.batches import batch_source
from llmdistill.training.plan import Plan


def about(plan: Plan, data_report: str) -> dict[str, str]:
    """Say in a line each which models, method and data a run has."""
    sizes = plan.models.sizes
    teacher = plan.config.teacher.model
    teacher_line = "none" if teacher is None else f"{teacher}, {sizes['teacher_params']:,} parameters"
    teacher_line += "" if plan.models.teacher_origin is None else f", {plan.models.teacher_origin}"
    teacher_line += "" if plan.source is None else plan.source.describe(plan.config.teacher)
    task = plan.config.data.train if plan.config.data.kind != "task" else plan.config.data.task.name
    form, ranks = describe(plan.config.student), describe_ranks(sizes)
    return {
        "Teacher": teacher_line,
        "Student": f"{sizes['method']}, {describe_params(sizes)} parameters ({sizes['ratio']:.0%})"
        f"{ranks and f', rank {ranks}'}{form}",
        "Method": f"{' + '.join(plan.config.methods())}: {', '.join(plan.method.weights)}",
        "Data": f"{task}, {data_report.rstrip('.')}{batch_source(plan).describe()}",
    }


def headline(plan: Plan, data_report: str) -> str:
    """Describe the run in a few lines for the terminal."""
    train, split, prompt = plan.config.train, plan.split, plan.config.data.prompt
    lines = {"Run folder": str(plan.folder), **about(plan, data_report)}
    if prompt is not None:
        lines["Prompt"] = describe_prompt(prompt)
    lines["Batch"] = (
        f"{train.global_batch_size} = {split.micro_batch_size} x {plan.world_size} rank(s) x "
        f"{split.accumulation_steps} accumulation step(s); {train.steps} steps in "
        f"{str(plan.models.dtype).removeprefix('torch.')}, ZeRO-{plan.zero_stage}, "
        f"learning rate {train.peak_learning_rate:g}"
    )
    return "\n".join(f"{name:12}{text}" for name, text in [*lines.items(), *(("Note", note) for note in plan.notes)])
