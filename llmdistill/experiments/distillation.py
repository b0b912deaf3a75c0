"""Runs a whole distillation: the assistants' runs, the search for the teacher's layer, and the run itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmdistill.experiments.layer_search import search_layer
from llmdistill.run import assemble
from llmdistill.run.artifacts import claim_folder
from llmdistill.run.cache import check_cache
from llmdistill.run.calibration import check_calibration
from llmdistill.run.job import execute, run_plan
from llmdistill.run.plan import Plan, searched_by
from llmdistill.runtime.distributed import World
from llmdistill.runtime.terminal import print_main
from llmdistill.tasks.base import TaskData


def distill_plans(
    plans: Sequence[Plan], data: TaskData, world: World, *, then: Callable[[World], None] | None = None
) -> None:
    """Execute the runs of a configuration in an existing process group; every rank must call this function.

    Finished runs are not repeated. `then` is called after the runs, while the folder is claimed, such as for the second
    stage on tasks. Raises UserError for bad input, a folder of another run, or a loss that is not finite.
    """
    for plan in plans:
        assemble.check_machine(plan, world)
        check_calibration(plan, world)
    data = data.prepared(world)
    for plan in plans:
        check_cache(plan, data.of(plan.models), world)
    *assistants, last = (assemble.count_steps(plan, data) for plan in plans)
    # What was made of an earlier student, or of an assistant with fewer steps, would not be made again.
    alone = not assistants and then is None and searched_by(last.config) is None
    with claim_folder(last.asked, world, may_go_on=alone):
        for plan in assistants:
            print_main(f"The assistant {plan.config.student.shape} learns from {plan.config.teacher.model}", world)
            run_plan(plan, data.of(plan.models), world)
        if searched_by(last.config) is not None:
            last = search_layer(last, lambda part: run_plan(part, data.of(part.models), world), world)
        execute(last, data.of(last.models), world)
        if then is not None:
            then(world)
