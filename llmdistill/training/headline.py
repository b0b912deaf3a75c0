"""The first lines that a run shows: models, method, data and batch."""

from __future__ import annotations

from llmdistill.data.prompts import describe_prompt
from llmdistill.models.forms import describe
from llmdistill.students.sizes import describe_ranks
from llmdistill.training.plan import Plan
from llmdistill.training.rollouts import describe_share


def headline(plan: Plan, data_report: str) -> str:
    """Describe the run in a few lines for the terminal."""
    sizes, train, split = plan.models.sizes, plan.config.train, plan.split
    teacher = plan.config.teacher.model
    teacher_line = "none" if teacher is None else f"{teacher}, {sizes['teacher_params']:,} parameters"
    teacher_line += "" if plan.models.teacher_origin is None else f", {plan.models.teacher_origin}"
    teacher_line += "" if plan.source is None else plan.source.describe(plan.config.teacher)
    task = plan.config.data.train if plan.config.data.kind != "task" else plan.config.data.task.name
    form, ranks = describe(plan.config.student), describe_ranks(sizes)
    dtype = str(plan.models.dtype).removeprefix("torch.")
    prompt = plan.config.data.prompt
    stage = plan.zero_stage
    return (
        f"Run folder  {plan.folder}\n"
        f"Teacher     {teacher_line}\n"
        f"Student     {sizes['method']}, {sizes['student_params']:,} parameters ({sizes['ratio']:.0%})"
        f"{ranks and f', rank {ranks}'}{form}\n"
        f"Method      {' + '.join(plan.config.methods())}: {', '.join(plan.method.weights)}\n"
        f"Data        {task}, {data_report.rstrip('.')}{describe_share(plan)}\n"
        # chr(10) is the line feed: before Python 3.12 an f-string takes no backslash.
        f"{'' if prompt is None else f'Prompt      {describe_prompt(prompt)}' + chr(10)}"
        f"Batch       {train.global_batch_size} = {split.micro_batch_size} x {plan.world_size} rank(s) x "
        f"{split.accumulation_steps} accumulation step(s); {train.steps} steps in {dtype}, ZeRO-{stage}"
        + "".join(f"\nNote        {note}" for note in plan.notes)
    )
