"""Runs a whole distillation: the assistants' runs, the search for the teacher's layer, and the run itself.

The search has a short run for each layer, and plots the losses (MiniLMv2 Figure 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from llmdistill.config import RunConfig
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.methods.layers import parse_layers
from llmdistill.models.families import shape_of
from llmdistill.report.metrics_log import read_metrics_log
from llmdistill.report.plots import curve_of, method_styles, plot_curves, save_plot
from llmdistill.report.tables import print_table
from llmdistill.runtime.distributed import on_main
from llmdistill.runtime.terminal import print_main
from llmdistill.studies.launcher import InProcess
from llmdistill.studies.trials import Result, Trial
from llmdistill.tasks.base import TaskData
from llmdistill.training import assemble
from llmdistill.training.cache import check_cache
from llmdistill.training.calibration import check_calibration
from llmdistill.training.job import execute, run_plan
from llmdistill.training.plan import Plan, make_plan, searched_by
from llmdistill.training.run_folder import claim_folder


def distill_plans(plans: Sequence[Plan], data: TaskData, *, then: Callable[[], None] | None = None) -> None:
    """Execute the runs of a configuration in an existing process group; every rank must call this function.

    Finished runs are not repeated. `then` is called after the runs, while the folder is claimed, such as for the second
    stage on tasks. Raises UserError for bad input, a folder of another run, or a loss that is not finite.
    """
    for plan in plans:
        assemble.check_machine(plan)
        check_calibration(plan)
    data = data.prepared()
    for plan in plans:
        check_cache(plan, data.of(plan.models))
    *assistants, last = (assemble.count_steps(plan, data) for plan in plans)
    searching = searched_by(last.config)
    # What was made of an earlier student, or of an assistant with fewer steps, would not be made again.
    alone = not assistants and then is None and searching is None
    with claim_folder(last.asked, may_go_on=alone):
        for plan in assistants:
            print_main(f"The assistant {plan.config.student.shape} learns from {plan.config.teacher.model}")
            run_plan(plan, data.of(plan.models))
        if searching is not None:
            last = _search_layer(last, searching, lambda part: run_plan(part, data.of(part.models)))
        execute(last, data.of(last.models))
        if then is not None:
            then()


def _search_layer(plan: Plan, name: str, run: Callable[[Plan], object]) -> Plan:
    """Search for the teacher's best layer for a method, and return the plan with this layer; every rank must call it.

    For each candidate layer, the student learns the layer's relations for some steps, from the same weights and with
    the same batches. The relation losses of different layers cannot be compared, so each student is then trained with
    the token loss alone for the same number of steps, and its validation loss after these steps is its score. Finished
    runs are not repeated. The search writes `layer_search.json` and a plot into the run's folder.
    """
    config, folder = plan.config, plan.folder
    layers, num_layers = config.method_settings[name].search.layers, shape_of(plan.models.teacher).num_layers
    candidates = parse_layers(layers, num_layers, key=f"{name}.search.layers")
    pairs = [_trials(config, name, folder / "layer-search", layer + 1) for layer in candidates]
    # A probe can be planned only when the trial before it has ended, because that trial writes the probe's student.
    runner = InProcess(lambda each: run(make_plan(each, plan.before)))
    results = runner.run([trial for pair in pairs for trial in pair])
    for result in results:
        if result.error is not None:
            raise UserError(f"the search for the teacher's layer failed at the {result.trial.title}: {result.error}")
    chosen = on_main(lambda: _report(results[1::2], name, folder))
    return make_plan(config.with_settings(name, teacher_layer=chosen), plan.before)


def _trials(config: RunConfig, name: str, folder: Path, layer: int) -> tuple[Trial, Trial]:
    """Return the trial that learns a layer's relations and the trial that scores its student; layers count from 1."""
    part, search = folder / f"layer-{layer}", config.method_settings[name].search
    student = config.student.made_otherwise(model=str(part / "distil" / "student"))

    def trial(title: str, base: RunConfig, method: str, steps: int, output: Path) -> Trial:
        warmup = min(config.train.warmup_steps, steps // 10)
        train = replace(
            config.train, steps=steps, warmup_steps=warmup, save_every=steps, validate_every=steps, keep_best=None
        )
        run = replace(base, method=method, also=[], train=train, output_dir=str(output), resume="auto")
        return Trial(f"{title} of layer {layer}", {f"{name}.teacher_layer": layer}, config.seed, run)

    relations = config.with_settings(name, teacher_layer=layer)
    return (
        trial("relations", relations, name, search.steps, part / "distil"),
        trial("probe", replace(config, student=student), "sft", search.probe_steps, part / "probe"),
    )


def _report(probes: Sequence[Result], name: str, folder: Path) -> int:
    """Write, plot and print the scores of all layers, and return the layer with the lowest validation loss."""
    losses = {
        each.trial.settings[f"{name}.teacher_layer"]: read_metrics_log(each.trial.folder)[-1]["valid_loss"]
        for each in probes
    }
    best = min(losses, key=losses.__getitem__)
    values = [{"layer": layer, "valid_loss": loss} for layer, loss in losses.items()]
    write_json(folder / "layer_search.json", {"chosen": best, "layers": values})
    style = method_styles(["student"])["student"]
    curve = curve_of({float(layer): [loss] for layer, loss in losses.items()})
    figure = plot_curves([("student", style, curve)], "validation loss (lower is better)")
    axes = figure.axes[0]
    axes.set_xlabel("layer of the teacher, from 1")
    figure.legends[0].remove()  # of a single line
    axes.plot(best, losses[best], marker="o", markersize=11, fillstyle="none", color=style.color)
    save_plot(figure, folder, "layer_search")

    lowest, highest = losses[best], max(losses.values())
    rows = []
    for layer, loss in losses.items():
        bar = "█" * round(30 * (highest - loss) / (highest - lowest)) if highest > lowest else ""
        chosen = " chosen" if loss == lowest else ""
        rows.append([str(layer), f"{loss:.4f}", f"{bar} {highest - loss:.4f}{chosen}".strip()])
    header = ["layer", "validation loss", "better than the worst by"]
    print_table("Which layer of the teacher to learn from", header, rows, left=(2,))
    Console().print(f"The curve is in {folder / 'layer_search.png'}", soft_wrap=True)
    return best
