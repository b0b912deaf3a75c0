"""Which of the teacher's layers to learn from: a short run for each, and their curve (MiniLMv2 Figure 2)."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llmdistill.config import RunConfig, TrainConfig
from llmdistill.files import write_json
from llmdistill.methods.partition import parse_layers
from llmdistill.models.families import shape_of
from llmdistill.report.layers import LayerScore, plot_layers, print_layers
from llmdistill.run.plan import Plan, make_plan
from llmdistill.runtime.distributed import World, on_main


def search_layer(plan: Plan, run: Callable[[Plan], None], world: World) -> Plan:
    """The plan with the teacher's layer found; every rank must call it.

    For each candidate the student learns its relations for some steps, from the same weights and the same batches.
    Relations of different layers cannot be compared by their loss, so each student then learns the words alone for some
    steps, the same for all, and the loss on the validation text after these is its score. What is finished already is
    not run again. The folder gets `layer_search.json` and a plot.

    Args:
        plan: a run whose minilmv2.teacher_layer is auto.
        run: does a run from its plan, unless it is finished already.
        world: this process.
    """
    config, folder = plan.config, plan.folder
    search = config.minilmv2.search
    candidates = parse_layers(search.layers, shape_of(plan.teacher_config).num_layers, key="minilmv2.search.layers")
    scores: list[LayerScore] = []
    for layer in candidates:
        part = folder / "layer-search" / f"layer-{layer + 1}"
        distil = make_plan(_short(config, layer + 1, part / "distil"), plan.before)
        run(distil)
        probe = make_plan(_probe(config, part), plan.before)  # only now is its student there
        run(probe)
        gc.collect()  # an engine is a knot of references; dozens of them would not fit
        loss = on_main(lambda folder=probe.folder: _last_valid_loss(folder), world)  # type: ignore[misc]
        scores.append(LayerScore(layer=layer + 1, loss=loss))
    best = min(scores, key=lambda score: score.loss)
    if world.is_main:
        values = [{"layer": score.layer, "valid_loss": score.loss} for score in scores]
        write_json(folder / "layer_search.json", {"chosen": best.layer, "layers": values})
        plot_layers(scores, folder)
        print_layers(scores, folder)
    chosen = replace(config, minilmv2=replace(config.minilmv2, teacher_layer=best.layer))
    return make_plan(chosen, plan.before)


def _short(config: RunConfig, layer: int, folder: Path) -> RunConfig:
    """The run itself, but with the relations of one layer alone and for fewer steps."""
    steps = config.minilmv2.search.steps
    return replace(
        config,
        method="minilmv2",
        also=[],
        minilmv2=replace(config.minilmv2, teacher_layer=layer),
        train=_steps(config, steps),
        output_dir=str(folder),
        resume="auto",
    )


def _probe(config: RunConfig, part: Path) -> RunConfig:
    """The steps on the words alone, from where the candidate's student stands."""
    student = replace(config.student, model=str(part / "distil" / "student"), shape=None, assistants=[])
    return replace(
        config,
        method="sft",
        also=[],
        student=student,
        train=_steps(config, config.minilmv2.search.probe_steps),
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


def _last_valid_loss(folder: Path) -> float:
    rows = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(rows[-1])["valid_loss"])
