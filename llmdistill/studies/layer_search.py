"""The study of the teacher's best layer for a method: a short run for each layer, and the curve of the losses.

MiniLMv2 Figure 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmdistill.config import RunConfig
from llmdistill.errors import UserError
from llmdistill.methods.layers import parse_layers
from llmdistill.models.families import shape_of
from llmdistill.report.metrics_log import read_metrics_log
from llmdistill.report.plots import Drawing, curve_of, method_styles, plot_curves
from llmdistill.report.study_report import StudyReport
from llmdistill.report.tables import TitledTable
from llmdistill.report.trials import ModelEntry, entry_of
from llmdistill.runtime.distributed import on_main
from llmdistill.studies.launcher import InProcess
from llmdistill.studies.study import Outcome, PlannedRow, Study
from llmdistill.studies.trials import Result, Trial
from llmdistill.tasks.base import VALID
from llmdistill.training.plan import Plan, make_plan


@dataclass(frozen=True)
class LayerTrial(Trial):
    """A run of one layer, whose score is the validation loss after its last step."""

    def read_scores(self) -> dict[str, Any] | None:
        metrics = super().read_scores()
        return metrics and {**metrics, "valid_loss": read_metrics_log(self.folder)[-1]["valid_loss"]}


@dataclass(frozen=True, kw_only=True)
class LayerSearch(Study):
    """For each candidate layer, the student learns the layer's relations for some steps, and a probe scores it.

    All students begin with the same weights and see the same batches. The relation losses of different layers cannot be
    compared, so each student is then trained with the token loss alone for the same number of steps, and its validation
    loss after these steps is its score.
    """

    plan: Plan
    """The run that needs the layer."""
    name: str
    """Its method that learns from one layer."""

    def merit(self, result: Result) -> float:
        assert result.metrics is not None
        return -float(result.metrics["valid_loss"])

    def entries(self, trial: Trial, metrics: Mapping[str, Any]) -> dict[str, ModelEntry]:
        return {"student": entry_of({(VALID, "loss"): metrics["valid_loss"]})}

    def conduct(self, run: Callable[[Plan], object]) -> int:
        """Return the best layer, from 1, and write layer_search.json and a plot into the run's folder.

        Every rank must call it. Finished runs are not repeated; UserError if one fails.
        """
        config, search = self.plan.config, self.plan.config.method_settings[self.name].search

        def trial(layer: int, title: str, base: RunConfig, method: str, steps: int, name: str) -> Trial:
            # The run's own warm-up may be longer than these few steps.
            warmup = min(config.train.warmup_steps, steps // 10)
            # One checkpoint and one validation, both after the last step.
            train = replace(
                config.train, steps=steps, warmup_steps=warmup, save_every=steps, validate_every=steps, keep_best=None
            )
            folder = str(self.folder / f"layer-{layer}" / name)
            run = replace(base, method=method, also=[], train=train, output_dir=folder, resume="auto")
            return LayerTrial(f"{title} of layer {layer}", {"teacher_layer": layer}, config.seed, run)

        relations, probes = list[Trial](), list[Trial]()
        num_layers = shape_of(self.plan.models.teacher).num_layers
        for index in parse_layers(search.layers, num_layers, key=f"{self.name}.search.layers"):
            layer = index + 1
            of_layer = config.with_settings(self.name, teacher_layer=layer)
            relations.append(trial(layer, "relations", of_layer, self.name, search.steps, "distil"))
            made = str(self.folder / f"layer-{layer}" / "distil" / "student")
            of_probe = replace(config, student=config.student.without_factorization(model=made))
            probes.append(trial(layer, "probe", of_probe, "sft", search.probe_steps, "probe"))
        # A probe can be planned only when the relations are learned, because that trial writes the probe's student.
        runner = InProcess(lambda config: run(make_plan(config, self.plan.teacher_plan)))
        for kind, trials in (("relations", relations), ("probes", probes)):
            outcome = self.run([PlannedRow(key=kind, trials=trials)], runner)[kind]
            for result in outcome.failed:
                raise UserError(
                    f"the search for the teacher's layer failed at the {result.trial.title}: {result.error}"
                )
        return on_main(lambda: self._report(outcome))

    def _report(self, probes: Outcome) -> int:
        """Write, plot and print the scores of all layers, and return the chosen layer."""
        losses = {result.trial.settings["teacher_layer"]: -self.merit(result) for result in probes.trials}
        best, folder = probes.runs[0].trial.settings["teacher_layer"], self.plan.folder
        values = [{"layer": layer, "valid_loss": loss} for layer, loss in losses.items()]
        style = method_styles(["student"])["student"]
        curve = curve_of({float(layer): [loss] for layer, loss in losses.items()})
        figure = plot_curves([("student", style, curve)], "validation loss (lower is better)")
        axes = figure.axes[0]
        axes.set_xlabel("layer of the teacher, from 1")
        figure.legends[0].remove()  # of a single line
        axes.plot(best, losses[best], marker="o", markersize=11, fillstyle="none", color=style.color)
        lowest, highest = losses[best], max(losses.values())
        rows = []
        for layer, loss in losses.items():
            bar = "█" * round(30 * (highest - loss) / (highest - lowest)) if highest > lowest else ""
            chosen = " chosen" if loss == lowest else ""
            rows.append([str(layer), f"{loss:.4f}", f"{bar} {highest - loss:.4f}{chosen}".strip()])
        header = ["layer", "validation loss", "better than the worst by"]
        report = StudyReport(
            folder=folder,
            results={"chosen": best, "layers": values},
            file="layer_search.json",
            template=None,
            drawings=[Drawing("layer_search", "Layers", "", figure)],
            plots=None,
            table=TitledTable("Which layer of the teacher to learn from", header, rows),
            left=(2,),
            closing=f"The curve is in {folder / 'layer_search.png'}",
        )
        report.write()
        report.print()
        return int(best)
