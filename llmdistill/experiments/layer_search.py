"""Searches for the teacher's best layer with a short run per layer, and plots the losses (MiniLMv2 Figure 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from llmdistill.config import RunConfig
from llmdistill.errors import UserError
from llmdistill.experiments.launcher import InProcess
from llmdistill.experiments.trials import Result, Trial
from llmdistill.files import write_json
from llmdistill.methods.layers import parse_layers
from llmdistill.models.families import shape_of
from llmdistill.report.metrics_log import read_metrics_log
from llmdistill.report.plots import curve_of, method_styles, plot_curves, save_plot
from llmdistill.report.tables import print_table
from llmdistill.run.plan import Plan, make_plan, searched_by
from llmdistill.runtime.distributed import World, on_main


def search_layer(plan: Plan, run: Callable[[Plan], object], world: World) -> Plan:
    """Search for the teacher's best layer and return the plan with this layer; every rank must call this function.

    For each candidate layer, the student learns the layer's relations for some steps, from the same weights and with
    the same batches. The relation losses of different layers cannot be compared, so each student is then trained with
    the token loss alone for the same number of steps, and its validation loss after these steps is its score. Finished
    runs are not repeated. The search writes `layer_search.json` and a plot into the run's folder.
    """
    config, folder = plan.config, plan.folder
    name = searched_by(config)
    assert name is not None, "there is no layer to search for"
    layers, num_layers = config.method_settings[name].search.layers, shape_of(plan.models.teacher).num_layers
    candidates = parse_layers(layers, num_layers, key=f"{name}.search.layers")
    pairs = [_trials(config, name, folder / "layer-search", layer + 1) for layer in candidates]
    # A probe can be planned only when the trial before it has ended, because that trial writes the probe's student.
    runner = InProcess(world, lambda each: run(make_plan(each, plan.before)))
    results = runner.run([trial for pair in pairs for trial in pair])
    failed = next((result for result in results if result.error is not None), None)
    if failed is not None:
        raise UserError(f"the search for the teacher's layer failed at the {failed.trial.title}: {failed.error}")
    chosen = on_main(lambda: _report(results[1::2], name, folder), world)
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
    """Write and print the scores of all layers, and return the layer with the lowest validation loss."""
    losses = {
        each.trial.settings[f"{name}.teacher_layer"]: read_metrics_log(each.trial.folder)[-1]["valid_loss"]
        for each in probes
    }
    best = min(losses, key=losses.__getitem__)
    values = [{"layer": layer, "valid_loss": loss} for layer, loss in losses.items()]
    write_json(folder / "layer_search.json", {"chosen": best, "layers": values})
    _plot_layers(losses, folder)
    _print_layers(losses, folder)
    return best


def _plot_layers(losses: Mapping[int, float], folder: Path) -> None:
    """Write layer_search.png and layer_search.svg; `losses`: validation loss by layer, counted from 1."""
    style = method_styles(["student"])["student"]
    curve = curve_of({float(layer): [loss] for layer, loss in losses.items()})
    figure = plot_curves([("student", style, curve)], "validation loss (lower is better)")
    axes = figure.axes[0]
    axes.set_xlabel("layer of the teacher, from 1")
    figure.legends[0].remove()  # of a single line
    best = min(losses, key=losses.__getitem__)
    axes.plot(best, losses[best], marker="o", markersize=11, fillstyle="none", color=style.color)
    save_plot(figure, folder, "layer_search")


def _print_layers(losses: Mapping[int, float], folder: Path) -> None:
    """Print the losses as a table with one bar per layer and a mark at the best layer."""
    best, worst = min(losses.values()), max(losses.values())
    rows = []
    for layer, loss in losses.items():
        bar = "█" * round(30 * (worst - loss) / (worst - best)) if worst > best else ""
        chosen = " chosen" if loss == best else ""
        rows.append([str(layer), f"{loss:.4f}", f"{bar} {worst - loss:.4f}{chosen}".strip()])
    header = ["layer", "validation loss", "better than the worst by"]
    print_table("Which layer of the teacher to learn from", header, rows, left=(2,))
    Console().print(f"The curve is in {folder / 'layer_search.png'}", soft_wrap=True)
