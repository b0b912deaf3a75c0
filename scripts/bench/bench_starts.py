"""Where a student starts: perplexity and ROUGE-L of untrained students, at shares of the linears' parameters.

    python scripts/bench/bench_starts.py --model MODEL --calibration valid.txt --test test.txt --output starts

The rows are plain SVD, SVD weighted by activations and by gradients with one share of the parameters of each matrix (as
SVD-LLM and KFAC-SVD have it) or with one rank for all, ranks by the predicted loss, the same in the pivoted form, and a
rival from its paper: Zero Sum SVD (arXiv 2602.02848, one shot). All read the same calibration examples. A size is the
share of the parameters of the layers' linears; embedding and norms stay whole.

Students that are trained already (--student "KD from loss=runs/kd/student") are scored on the same windows, and
--figure draws perplexity against size.

The factors are kept in the output's folder, and each figure is appended to starts.jsonl, so that the same command goes
on where it was stopped. --examples, --length and the calibration file may not change within a folder.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benching import run
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.config import CalibrationConfig, DataConfig, FactorizeConfig, GenerationConfig, RunConfig, StudentConfig
from llmdistill.data.instruct import Limits
from llmdistill.data.prompts import resolve_prompt
from llmdistill.data.sources import kind_of, read_examples
from llmdistill.data.whole_text import WholeText
from llmdistill.embedded import locate
from llmdistill.models.families import base_name
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.progress import progress
from llmdistill.report.panels import plot_size
from llmdistill.report.plots import method_styles
from llmdistill.report.score import PERPLEXITY
from llmdistill.runtime.distributed import World
from llmdistill.students.counting import count_parameters, layer_linears
from llmdistill.students.install import matrix
from llmdistill.students.start.calibration_folder import SavedFactors
from llmdistill.students.start.moments import Moments
from llmdistill.students.start.weigh import CalibrationParts, choose_ranks, measure_factors, weigh
from llmdistill.students.start.weighted import WeightedSVD, weighted_svd
from llmdistill.students.start.weighted_factors import WeightedFactors
from llmdistill.students.svd import factor_params, largest_rank
from llmdistill.tasks import make_task
from llmdistill.tasks.base import LoadedModel, Models
from llmdistill.tasks.instruction_scores import score_sets
from llmdistill.tasks.text_windows import WindowSizes, cut_windows, score_windows
from llmdistill.teachers.live import LoadedTeacher
from llmdistill.training.calibration import calibration_batches

STARTS = {
    "plain, one rank": ("none", "uniform"),
    "activations, one share (SVD-LLM)": ("inputs", "share"),
    "gradients, one rank": ("gradients", "uniform"),
    "gradients, one share (KFAC-SVD)": ("gradients", "share"),
    "ranks by loss, costs not corrected": ("gradients", "predicted"),
    "ranks by loss": ("gradients", "loss"),
    "ranks by loss, pivoted": ("gradients", "pivoted"),
    "Zero Sum SVD": ("inputs", "zero sum"),
}
"""What weighs the factors, and how the ranks are chosen."""
Factors = Mapping[str, WeightedSVD]
Shapes = Mapping[str, tuple[int, int]]


def zero_sum_ranks(factors: Factors, slopes: Mapping[str, Tensor], shapes: Shapes, budget: int) -> dict[str, int]:
    """Return the ranks of Zero Sum SVD; a matrix that is not named stays dense.

    To set a singular value σ to 0 changes the loss by ΔL = -σ ∂L/∂σ. Each matrix offers its smallest one; the next to
    go is that of the smallest |ΔL| of the sign that brings the running sum back to zero, until the parameters fit into
    the budget. A rank that does not make its matrix smaller counts, and is kept, as the dense matrix.

    Args:
        factors: the SVD of each matrix weighted by its inputs.
        slopes: ∂L/∂σ of each singular value.
        shapes: (m, n) of each matrix.
        budget: the number of parameters of all matrices together.
    """
    changes = {name: (-each.values * slopes[name]).tolist() for name, each in factors.items()}
    ranks = {name: len(each) for name, each in changes.items()}

    def params(name: str) -> int:
        m, n = shapes[name]
        return min(ranks[name] * (m + n), m * n)

    def offer(name: str) -> None:
        if ranks[name] > 1:
            change = changes[name][ranks[name] - 1]
            heapq.heappush(heaps[change > 0], (abs(change), name))

    heaps: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
    for name in changes:
        offer(name)
    total, running = sum(map(params, ranks)), 0.0
    while total > budget:
        _, name = heapq.heappop(heaps[running <= 0] or heaps[running > 0])
        before = params(name)
        running += changes[name][ranks[name] - 1]
        ranks[name] -= 1
        total += params(name) - before
        offer(name)
    return {name: rank for name, rank in ranks.items() if rank <= largest_rank(*shapes[name])}


class Bench:
    """The model, its calibration and its starts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder, self.world = options, Path(options.output), World.alone()
        text, self.path = WholeText(options.test).read(), locate(options.model)
        self.model: PreTrainedModel = load_model(self.path, dtype=torch.float32, device=self.world.device).eval()
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.path)
        self.windows = cut_windows(
            text,
            self.tokenizer,
            self.model.config,
            WindowSizes(window=options.window, limit=options.windows),
            name=options.test,
        )
        prompt = resolve_prompt(None, [self.tokenizer])
        self.limits = Limits(max_prompt_length=128, max_length=192, long_prompts="drop", prompt=prompt)
        linears = layer_linears(self.model)
        self.modules = {base_name(self.model, name): self.model.get_submodule(name) for name in linears}
        self.shapes = {base_name(self.model, name): shape for name, shape in linears.items()}
        self.linears = sum(m * n for m, n in self.shapes.values())
        self.whole = count_parameters(self.model)
        self.batches, self.held_out = self._calibration()
        self.folder.mkdir(parents=True, exist_ok=True)

    def _calibration(self) -> tuple[list[Batch], list[Batch]]:
        options, config_of = self.options, self.model.config
        calibration = CalibrationConfig(examples=options.examples, micro_batch_size=2, held_out=options.held_out)
        data: dict[str, Any] = {"max_length": options.length, "kind": kind_of(options.calibration)}
        if data["kind"] == "instructions":
            data |= {"max_prompt_length": options.length // 2, "long_prompts": "drop"}
        student = StudentConfig(factorize=FactorizeConfig(calibration=calibration))
        config = RunConfig(ds_config="", student=student, data=DataConfig(train=options.calibration, **data))
        objective = make_task(config).objective(config_of, uses_output=False)
        both = {"teacher": config_of, "student": config_of, "teacher_path": self.path, "tokenizer_path": self.path}
        return calibration_batches(config, Models(**both, causal=True, objective=objective))

    def factors(self, weighting: str) -> SavedFactors:
        """Return the factors of all matrices by a weighting; they are measured once and kept in the output's folder."""
        calibration = {key: getattr(self.options, key) for key in ("calibration", "examples", "length")}
        kept = SavedFactors(self.folder / weighting, {"weighting": weighting, **calibration}).claim()
        if weighting != "none":
            # Pivoted factors have the largest ranks, which serve both forms.
            settings = FactorizeConfig(weighting=weighting, form="pivoted", rank=1)
            measure_factors(self._parts(kept, self.batches), settings)
        for name in self.shapes.keys() - kept.keys():
            weight = matrix(self.modules[name]).detach()
            plain = Moments(inputs=torch.eye(weight.shape[1]), gradients=None, tokens=1)
            kept[name] = weighted_svd(weight, plain, min(weight.shape))
        return kept

    def _parts(self, kept: SavedFactors, batches: Sequence[Batch]) -> CalibrationParts:
        return CalibrationParts(
            config=self.model.config,
            teacher=lambda: LoadedTeacher(self.model, self.model),
            batches=lambda: (batches, self.held_out),
            saved=lambda: kept,
            say=print,
        )

    def slopes(self, factors: Factors) -> dict[str, Tensor]:
        """∂L/∂σ = uᵀ ∂L/∂(W L) v of each singular value, where the factors' right side is Vᵀ L⁻¹ and the left one U.

        L is the mean loss of the data's own labels, on about 2,048 tokens as in the paper's one-shot setting.
        """
        self.model.requires_grad_(False)
        weights = {name: module.weight.requires_grad_(True) for name, module in self.modules.items()}
        batches = self.batches[: -(-2048 // (self.options.length * self.batches[0].input_ids.shape[0]))]
        count = sum(int((batch.labels[:, 1:] != IGNORE_INDEX).sum()) for batch in batches)
        for batch in progress(batches, "Slopes of the singular values", "batches"):
            logits = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
            labels = batch.labels[:, 1:].flatten()
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
            (loss / count).backward()
        found = {}
        for name, weight in weights.items():
            gradient, weight.grad = weight.requires_grad_(False).grad, None
            found[name] = ((factors[name].left.T @ gradient) * factors[name].right).sum(1)
        return found

    def student(self, start: str, share: float) -> tuple[FactorizeConfig, WeightedFactors]:
        """Return the settings, ranks and factors of a start at a share of the linears' parameters."""
        weighting, allocation = STARTS[start]
        budget = int(share * self.linears)
        settings = FactorizeConfig(
            target_params=str(self.whole - self.linears + budget),
            weighting=weighting,
            allocation="loss" if allocation in ("loss", "predicted", "pivoted") else "uniform",
            form="pivoted" if allocation == "pivoted" else "plain",
            calibration=CalibrationConfig(data=self.options.calibration, held_out=self.options.held_out),
        )
        factors = self.factors(weighting)
        if allocation in ("loss", "pivoted"):
            costs = self.batches[: -(-self.options.cost_examples // 2)]
            return settings, weigh(self._parts(factors, costs), settings)
        if allocation in ("uniform", "predicted"):
            return settings, choose_ranks(self.model.config, settings, factors)
        ranks = {name: int(share * m * n / (m + n)) for name, (m, n) in self.shapes.items()}
        if allocation == "zero sum":
            ranks = zero_sum_ranks(factors, self.slopes(factors), self.shapes, budget)
        return settings, WeightedFactors(ranks={}, factors=factors, predicted_loss=0.0).with_ranks(ranks)

    def score(self, start: str, share: float) -> dict[str, Any]:
        """Make a student in the place of the model's weights, score it, and put the weights back."""
        began = time.perf_counter()
        settings, found = FactorizeConfig(), WeightedFactors(ranks={}, factors={}, predicted_loss=0.0)
        if start != "teacher":
            settings, found = self.student(start, share)
        params, weights = self.linears, {}
        for name, rank in found.ranks.items():
            weight, cut = matrix(self.modules[name]).data, found.factors[name].leading(rank)
            weights[name] = weight.clone()
            weight.copy_((cut.left * cut.values) @ cut.right)
            params += factor_params(*weight.shape, rank, settings.form) - weight.numel()
        row = {**score_windows(self.model, self.windows, batch_size=4), **self._rouge()}
        for name, weight in weights.items():
            matrix(self.modules[name]).data.copy_(weight)
        return {
            **row,
            "linears": params / self.linears,
            "all": (self.whole - self.linears + params) / self.whole,
            "predicted_loss": found.predicted_loss,
            "held_out": dict(found.held_out),
            "ranks": dict(found.ranks),
            "seconds": round(time.perf_counter() - began, 1),
        }

    def _rouge(self) -> dict[str, Any]:
        if self.options.prompts is None:
            return {}
        sets = {"prompts": read_examples(self.options.prompts)}
        settings = GenerationConfig(decoding="greedy", limit=self.options.num_prompts, batch_size=16)
        score = score_sets(LoadedModel(model=self.model, tokenizer=self.tokenizer), sets, settings, self.limits)[
            "prompts"
        ]
        return {"rougeL": score["rougeL"], "prompts": score["examples"], "reference_perplexity": score["perplexity"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a decoder")
    parser.add_argument("--calibration", required=True, help="a text, or a file of instructions")
    parser.add_argument("--test", required=True, help="a text, whose perplexity is the figure")
    parser.add_argument("--output", required=True, help="folder of moments, factors and figures")
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="tokens of an example")
    parser.add_argument("--held_out", type=int, default=8, help="examples on which ranks by loss must be better")
    parser.add_argument("--cost_examples", type=int, default=64, help="examples that measure predicted losses of cuts")
    parser.add_argument("--sizes", default="90,80,70,60", help="percent of the linears' parameters")
    parser.add_argument("--only", action="append", choices=STARTS, help="one of the starts alone; may be repeated")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=24, help="the first so many windows of the test text")
    parser.add_argument("--prompts", help="a file of instructions, for ROUGE-L")
    parser.add_argument("--num_prompts", type=int, default=16)
    parser.add_argument("--student", action="append", default=[], metavar="LABEL=DIR", help="a trained student")
    parser.add_argument("--figure", type=Path, help="PNG of perplexity against size")
    options = parser.parse_args()
    bench = Bench(options)
    asked = {key: getattr(options, key) for key in ("window", "prompts", "num_prompts")}
    asked |= {"windows": bench.windows.count, "prompt": bench.limits.prompt}
    file = bench.folder / "starts.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = [row for row in map(json.loads, lines) if row["asked"] == asked]
    sizes = [float(percent) / 100 for percent in options.sizes.split(",")]
    cases = [("teacher", 1.0), *((start, share) for share in sizes for start in options.only or STARTS)]
    done = [(row["start"], row["share"]) for row in rows]
    for start, share in [case for case in cases if case not in done]:
        row = {"start": start, "share": share, "asked": asked, **bench.score(start, share)}
        rows.append(row)
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(f"{start}, {100 * share:.0f} %: perplexity {row['perplexity']:.5g}, {row['seconds']:.0f} s", flush=True)
    trained = []
    for label, folder in (given.split("=", 1) for given in options.student):
        student = load_model(folder, dtype=torch.float32, device=bench.world.device).eval()
        scores = score_windows(student, bench.windows, batch_size=4)
        trained.append({"start": label, **scores, "all": count_parameters(student) / bench.whole})
        print(f"{label}, {100 * trained[-1]['all']:.0f} % of all: perplexity {scores['perplexity']:.5g}", flush=True)
    print(table(rows))
    if options.figure is not None:
        draw([*rows, *trained], bench.whole, Path(options.test).stem).savefig(options.figure, dpi=160)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return perplexity, and ROUGE-L where it was asked for, by start and size, as Markdown."""
    shares = sorted({row["share"] for row in rows if row["start"] != "teacher"}, reverse=True)
    found = {
        (row["start"], row["share"]): f"{row['perplexity']:,.4g}"
        + (f" / {row['rougeL']:.1f}" if "rougeL" in row else "")
        for row in rows
    }
    lines = ["| start | " + " | ".join(f"{100 * share:.0f} %" for share in shares) + " |"]
    lines.append("|---" * (len(shares) + 1) + "|")
    for start in STARTS:
        lines.append(f"| {start} | " + " | ".join(found.get((start, share), "") for share in shares) + " |")
    return "\n".join([*lines, f"\nteacher: {found.get(('teacher', 1.0), '')}"])


def draw(rows: Sequence[Mapping[str, Any]], whole: int, name: str) -> Figure:
    """Plot the perplexity over the number of parameters, a line for each start, single points for trained students."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        lines.setdefault(row["start"], []).append((round(row["all"] * whole), row["perplexity"]))
    ((_, teacher),) = lines.pop("teacher")
    styles = method_styles(list(lines))
    return plot_size([(label, styles[label], points) for label, points in lines.items()], teacher, PERPLEXITY, [name])


if __name__ == "__main__":
    run(main)
