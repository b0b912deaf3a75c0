"""Runs a whole distillation: the assistants' runs, the search for the teacher's layer, and the run itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmdistill.runtime.terminal import print_main
from llmdistill.studies.layer_search import LayerSearch
from llmdistill.tasks.base import TaskData
from llmdistill.training.job import MakeCallback, prepare_runs, run_claimed, run_plan
from llmdistill.training.plan import Plan, find_searching_method, make_plan
from llmdistill.training.run_folder import claim_folder


def run_chain(
    plans: Sequence[Plan],
    data: TaskData,
    *,
    then: Callable[[], None] | None = None,
    callbacks: Sequence[MakeCallback] = (),
) -> None:
    """Execute the runs of a configuration in an existing process group; every rank must call this function.

    Finished runs are not repeated. `then` is called after the runs, while the folder is claimed, such as for the second
    stage on tasks; `callbacks` are further ones of the run itself. Raises UserError for bad input, a folder of another
    run, or a loss that is not finite.
    """
    data, (*assistants, last) = prepare_runs(plans, data)
    searching = find_searching_method(last.config)
    # What was made of an earlier student, or of an assistant with fewer steps, would not be made again.
    is_only_run = not assistants and then is None and searching is None
    with claim_folder(last.recorded, may_go_on=is_only_run):
        # A chain and no study: each assistant is the next one's teacher, and nothing is chosen among them.
        for plan in assistants:
            print_main(f"The assistant {plan.config.student.shape} learns from {plan.config.teacher.model}")
            run_plan(plan, data.for_models(plan.models))
        if searching is not None:
            search = LayerSearch(folder=last.folder / "layer-search", plan=last, name=searching)
            chosen = search.conduct(lambda part: run_plan(part, data.for_models(part.models)))
            last = make_plan(last.config.with_settings(searching, teacher_layer=chosen), last.teacher_plan)
        run_claimed(last, data.for_models(last.models), callbacks)
        if then is not None:
            then()
