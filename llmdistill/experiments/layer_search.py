"""Searches for the teacher's best layer with a short run per layer, and plots the losses (MiniLMv2 Figure 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from llmdistill.config import RunConfig, TrainConfig
from llmdistill.errors import UserError
from llmdistill.experiments.grid import choose
from llmdistill.experiments.launcher import InProcess
from llmdistill.experiments.trials import Result, Trial
from llmdistill.files import write_json
from llmdistill.methods.layers import parse_layers
from llmdistill.models.families import shape_of
from llmdistill.report.layers import LayerScore, plot_layers, print_layers
from llmdistill.report.metrics_log import read_metrics_log
from llmdistill.run.plan import Plan, make_plan
from llmdistill.runtime.distributed import World, on_main


def search_layer(plan: Plan, run: Callable[[Plan], object], world: World) -> Plan:
    """Search for the teacher's best layer and return the plan with this layer; every rank must call this function.

    For each candidate layer, the student learns the layer's relations for some steps, from the same weights and with
    the same batches. The relation losses of different layers cannot be compared, so each student is then trained with
    the token loss alone for the same number of steps, and its validation loss after these steps is its score. Finished
    runs are not repeated. The search writes `layer_search.json` and a plot into the run's folder.

    Args:
        plan: a run with a method whose teacher_layer is auto (`plan.searched`).
        run: executes a run from its plan, unless the run is already finished.
        world: the rank and the number of ranks.
    """
    config, folder = plan.config, plan.folder
    name = plan.searched
    assert name is not None, "there is no layer to search for"
    layers, num_layers = config.method_settings[name].search.layers, shape_of(plan.teacher_config).num_layers
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
    part, settings = folder / f"layer-{layer}", {f"{name}.teacher_layer": layer}
    probe = _probe(config, config.method_settings[name].search.probe_steps, part)
    distil = Trial(f"relations of layer {layer}", settings, config.seed, _short(config, name, layer, part / "distil"))
    return distil, Trial(f"probe of layer {layer}", settings, config.seed, probe)


def _report(probes: Sequence[Result], name: str, folder: Path) -> int:
    """Write and print the scores of all layers, and return the layer with the lowest validation loss."""
    losses = {each.trial.settings[f"{name}.teacher_layer"]: _last_valid_loss(each) for each in probes}
    choice = choose(probes, lambda result: -_last_valid_loss(result))
    assert choice is not None
    best = int(choice.settings[f"{name}.teacher_layer"])
    values = [{"layer": layer, "valid_loss": loss} for layer, loss in losses.items()]
    write_json(folder / "layer_search.json", {"chosen": best, "layers": values})
    scores = [LayerScore(layer=layer, loss=loss) for layer, loss in losses.items()]
    plot_layers(scores, folder)
    print_layers(scores, folder)
    return best


def _short(config: RunConfig, name: str, layer: int, folder: Path) -> RunConfig:
    """Return the run's configuration with the relations of one layer only and with fewer steps."""
    return replace(
        config.with_settings(name, teacher_layer=layer),
        method=name,
        also=[],
        train=_steps(config, config.method_settings[name].search.steps),
        output_dir=str(folder),
        resume="auto",
    )


def _probe(config: RunConfig, steps: int, part: Path) -> RunConfig:
    """Return the configuration of the steps with the token loss alone, which start from the candidate's student."""
    student = replace(config.student, model=str(part / "distil" / "student"), shape=None, assistants=[])
    return replace(
        config,
        method="sft",
        also=[],
        student=student,
        train=_steps(config, steps),
        output_dir=str(part / "probe"),
        resume="auto",
    )


def _steps(config: RunConfig, steps: int) -> TrainConfig:
    return replace(
        config.train,
        steps=steps,
        warmup_steps=min(config.train.warmup_steps, steps // 10),
        save_every=steps,
        validate_every=steps,
    )


def _last_valid_loss(result: Result) -> float:
    return read_metrics_log(result.trial.folder)[-1]["valid_loss"]
