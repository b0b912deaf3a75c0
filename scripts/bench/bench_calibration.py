"""Calibration of a weighted SVD: all of a real model's against plain arithmetic, or decompositions by size.

    python scripts/bench/bench_calibration.py --model DIR --text FILE.txt --examples 96 --tokens 512 # all of `compress`
    python scripts/bench/bench_calibration.py           # matrices of GPT-2 and Llama-3.2-1B, minutes
    python scripts/bench/bench_calibration.py --quick   # narrow ones, seconds

With --model the whole calibration is run once in this process, for ranks by loss at 60 % of all parameters:
statistics, decompositions, predicted losses of cuts and the held-out check (one example for each eight). Then comes a
forward and a backward pass of the same tokens. Peak memory is what the process holds above its imports, at most.

Otherwise a matrix of each shape is decomposed once, in fp64, with moments of full rank, up to its break-even rank, in
CPU seconds over all threads, and larger teachers are reckoned from that.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import torch
from benching import Line, Settings, Table, bench_parser, parse, positive, run, wait
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from llmdistill.batch import Batch
from llmdistill.config import CalibrationConfig, FactorizeConfig
from llmdistill.data.whole_text import WholeText
from llmdistill.embedded import locate
from llmdistill.models.configs import load_config
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.step.passes import split_batches
from llmdistill.students.counting import build_reference, layer_linears
from llmdistill.students.start import cuts, measure, weigh
from llmdistill.students.start.moments import Moments
from llmdistill.students.start.sampled import watch_reads
from llmdistill.students.start.weighted import weighted_svd
from llmdistill.students.svd import largest_rank
from llmdistill.teachers.live import LoadedTeacher

LLAMAS = {"1B": (16, 2048, 512, 8192), "8B": (32, 4096, 1024, 14336), "70B": (80, 8192, 1024, 28672)}
"""Layers, width, width of keys and values, feed-forward width of Llama-3.2-1B, Llama-3-8B and Llama-3-70B."""


def llama(width: int, keys: int, inner: int, layers: int = 1) -> LlamaConfig:
    heads = width // 64
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads}
    return LlamaConfig(**sizes, num_key_value_heads=keys // 64, num_hidden_layers=layers)


def shapes_of(config: Any) -> list[tuple[int, int]]:
    """(m, n) of the linears of a model."""
    return list(layer_linears(build_reference(config)).values())


def statistics_bytes(model: Any, batch: Batch) -> int:
    """Bytes of C and G of all linears."""
    shapes = layer_linears(model)
    groups = watch_reads(model, shapes, [batch]).groups
    (whole,) = measure.plan_passes(groups, shapes, gradients=True, memory=math.inf)
    return whole.bytes


def decomposition(m: int, n: int) -> float:
    """Multiply-adds to decompose a matrix: Cholesky factors, whitening, eigenvectors of its Gram matrix, solutions."""
    short, long, rank = min(m, n), max(m, n), largest_rank(m, n)
    small = (m**3 + n**3) / 6 + rank * (m * m + n * n) / 2
    return small + m * n * (m + n) + short * short * long + 9 * short**3 + rank * short * long


def plain(model: Any, batches: Iterable[Batch]) -> None:
    """A forward and a backward pass of each batch."""
    for batch in batches:
        model(input_ids=batch.input_ids, labels=batch.input_ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)


def decomposed(m: int, n: int, device: torch.device) -> float:
    """CPU seconds of one weighted SVD; on a GPU seconds."""
    weight = torch.randn(m, n, device=device)
    sums = []
    for size in (n, m):
        rows = torch.randn(size + 64, size, device=device)
        sums.append(rows.T @ rows)
    moments = Moments(inputs=sums[0], gradients=sums[1], tokens=10_000)
    weighted_svd(weight[:64, :64], Moments(inputs=sums[0][:64, :64], gradients=sums[1][:64, :64], tokens=1), 8)
    wait(device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    begun = clock()
    weighted_svd(weight, moments, largest_rank(m, n))
    wait(device)
    return clock() - begun


def bench_decomposition(settings: Settings, table: Table) -> None:
    """CPU seconds of each shape, and hours of Llama's sizes at the median rate of these."""
    small = [llama(256, 64, 1024)]
    configs = small if settings.quick else [GPT2Config(n_layer=1), llama(*LLAMAS["1B"][1:])]
    rates = []
    for m, n in dict.fromkeys(shape for config in configs for shape in shapes_of(config)):
        took = decomposed(m, n, torch.device(settings.device))
        rates.append(decomposition(m, n) / took)
        detail = f"{rates[-1] / 1e9:.1f} billion multiply-adds a second"
        table.add(Line(f"{m}x{n} decomposed", took, None, detail, unit=" s"))
    for size, (layers, *widths) in LLAMAS.items():
        work = layers * sum(decomposition(m, n) for m, n in shapes_of(llama(*widths)))
        hours = work / statistics.median(rates) / 3600
        table.add(Line(f"{size} decomposed, on paper", hours, None, f"{work:.2g} multiply-adds", " h"))


def bench_model(arguments: argparse.Namespace, settings: Settings, table: Table) -> None:
    """Time and memory of the calibration of a real model, against a forward and a backward pass of the same tokens."""
    path = locate(arguments.model)
    count, length, text = arguments.examples, arguments.tokens, WholeText(arguments.text).read()
    rows = count + max(1, count // 8)
    ids = torch.tensor(load_tokenizer(path)(text)["input_ids"][: rows * length])
    parts = ids.view(rows, length).split(8)
    batches = [
        Batch(part, torch.ones_like(part), part, sample_ids=tuple((8 * number + row,) for row in range(len(part))))
        for number, part in enumerate(parts)
    ]

    def weighed(model: Any, target: str) -> Any:
        parts = weigh.CalibrationParts(
            config=model.config,
            teacher=lambda: LoadedTeacher(model, model),
            batches=lambda: (batches[: count // 8], batches[count // 8 :]),
        )
        calibration, gradients = CalibrationConfig(examples=count), {"weighting": "gradients", "allocation": "loss"}
        chosen: Any = {"target_params": target, "calibration": calibration, **gradients}
        return weigh.weigh(parts, FactorizeConfig(**chosen))

    # A narrow model first, so that what is imported and built on the way is no part of the peak. Nearly all of it is
    # the token embedding, which stays whole.
    config = load_config(path)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    narrow = type(config)(**config.to_dict() | sizes | {"head_dim": 32, "num_hidden_layers": 1, "layer_types": None})
    whole, batches = batches, [each.select(slice(0, 2), 16) for each in batches]
    weighed(AutoModelForCausalLM.from_config(narrow), "99.5%")
    batches = whole
    process, seconds = psutil.Process(), dict[str, tuple[float, float]]()
    before, peaks, stage, over = process.memory_info().rss, dict[str, int](), ["other"], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            peaks[stage[-1]] = max(peaks.get(stage[-1], 0), process.memory_info().rss - before)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            stage.append(name)
            began = time.perf_counter(), time.process_time()
            try:
                return work(*args, **more)
            finally:
                stage.pop()
                wall, cpu = seconds.get(name, (0.0, 0.0))
                seconds[name] = wall + time.perf_counter() - began[0], cpu + time.process_time() - began[1]

        return run

    measure.measure_moments = timed("statistics", measure.measure_moments)
    measure.Measurement._decompose = timed("decompositions", measure.Measurement._decompose)  # type: ignore[method-assign]
    measure.predict_losses = timed("predicted losses of cuts", cuts.predict_losses)
    weigh.divergences = timed("held-out check", cuts.divergences)
    threading.Thread(target=watch, daemon=True).start()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    teacher = 4 * sum(each.numel() for each in model.parameters())
    timed("all", weighed)(model, "60%")
    over.set()

    timed("forward and backward", plain)(model, split_batches(batches[: count // 8], 512))
    (wall, cpu), (of_plain, cpu_of_plain) = seconds["all"], seconds["forward and backward"]
    kept, peak = statistics_bytes(model, batches[0]), max(peaks.values())
    table.add(Line("all / forward and backward", wall / of_plain, 1.6, f"{wall:.0f} s / {of_plain:.0f} s"))
    table.add(Line("the same in CPU seconds", cpu / cpu_of_plain, 1.6, f"{cpu:.0f} s / {cpu_of_plain:.0f} s"))
    above = f"({peak:,} - {kept:,}) / {teacher:,}"
    table.add(Line("(peak - statistics) / teacher in fp32", (peak - kept) / teacher, 1.5, above))
    for name, (wall, cpu) in seconds.items():
        detail = f"{wall:.1f} s by the clock, peak {peaks.get(name, 0) / 1e6:,.0f} MB"
        table.add(Line(f"{name}: CPU seconds", cpu, None, detail, unit=" s"))


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", help="folder of a decoder, for the whole calibration of a real model")
    parser.add_argument("--text", help="with --model: a plain text")
    parser.add_argument("--examples", type=positive, default=96, help="with --model: a multiple of eight")
    parser.add_argument("--tokens", type=positive, default=512, help="with --model: of each example")
    settings, table, arguments = parse(parser)
    if (arguments.model is None) != (arguments.text is None):
        parser.error("give --model and --text together")
    torch.set_num_threads(settings.threads)
    if arguments.model is not None:
        bench_model(arguments, settings, table)
    else:
        bench_decomposition(settings, table)
    table.finish()


if __name__ == "__main__":
    run(main)
