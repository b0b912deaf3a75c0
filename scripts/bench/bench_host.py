"""What the host does for a batch: a Llama of 30 layers, too narrow for arithmetic to count, beside transformers alone.

    python scripts/bench/bench_host.py             # under a minute
    python scripts/bench/bench_host.py --quick     # 3 layers, seconds
    python scripts/bench/bench_host.py --device cuda
    TRITON_INTERPRET=1 python scripts/bench/bench_host.py    # operations alone, as a GPU has them

A GPU waits for the host as long as this takes. A time is the median of rounds in which all rows take turns in this
process, against the plain work that each row cannot do without: a forward and a backward pass of transformers' model
for the calibration and the costs of cuts, one of the two forward passes of the held-out check, for a step of training
the passes of teacher and student and the optimizer, for scoring a forward pass, and for answers transformers' generate,
batch by batch, with the same samples. Operations are those that torch dispatches and that make a tensor of their own,
no views; unlike milliseconds they are the same on every machine. In Triton's interpreter the losses take the kernels of
a GPU, each launch of which counts as one operation.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import step_rows
import torch
from benching import Line, Settings, Table, bench_parser, parse, run, wait
from step_rows import Setting
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.generation.decode import inference, new_tokens
from llmdistill.generation.refill import pad_left
from llmdistill.generation.row_draws import RowDraws
from llmdistill.losses import attention, features
from llmdistill.losses.fused import head_chunk
from llmdistill.students.counting import layer_linears
from llmdistill.students.start import sampled
from llmdistill.students.start.cuts import divergences, predict_losses
from llmdistill.students.start.moments import measure_moments
from llmdistill.students.start.sampled import Sampling, watch_reads
from llmdistill.students.start.weighted import weighted_svd
from llmdistill.students.start.weighted_factors import WeightedFactors
from llmdistill.tasks.reference_loss import label_loss

WIDTH, VOCABULARY, ROWS, TOKENS = 16, 64, 2, 8
BATCHES = 4
"""Of a call, so that what happens once in a calibration counts little."""
RANK = 4
"""Of the factorized student, and of the cuts."""


PROMPTS, AT_ONCE, NEW = 32, 8, 32
"""Prompts to answer, the rows of a batch, and the tokens of an answer at most: a quarter of them on average."""


class Operations(TorchDispatchMode):
    """Counts the operations that are no views."""

    inside_kernel = False

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or self.inside_kernel)
        return func(*args, **(kwargs or {}))


@contextmanager
def kernels() -> Iterator[None]:
    """Within this block the losses launch their Triton kernels, in the interpreter; a launch is one operation."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def count_launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        torch.empty(())  # is counted for the launch, whose copies to the host no GPU makes
        with patch.object(Operations, "inside_kernel", True):
            launch(executor, *args, **kwargs)

    with ExitStack() as patches:
        for module in (attention, features, head_chunk):
            patches.enter_context(patch.object(module, "available", lambda device: True))
        patches.enter_context(patch.object(GridExecutor, "__call__", count_launch))
        yield


class Row(NamedTuple):
    call: Callable[[], object]
    plain: str | None = None
    """The row that it is compared with."""
    most: float | None = None
    """The largest ratio that is aimed for."""


def make_rows(layers: int, device: torch.device) -> dict[str, Row]:
    """Return what is measured, by its name."""
    # As on a GPU with room: a model so small would run all its layers twice, and give the heap back after each.
    sampled.tokens_at_a_time = lambda _: ROWS * TOKENS
    sampled.give_back_memory = lambda: None
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "vocab_size": VOCABULARY}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1)

    def llama(rank: int | None = None) -> Any:
        model = LlamaForCausalLM(config)
        if rank is not None:
            step_rows.low_rank(model, FactorizeConfig(rank=rank))
        return model.to(device)

    teacher = llama().eval().requires_grad_(False)
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS))
    batch = Batch(ids, torch.ones_like(ids), ids, sample_ids=tuple((number,) for number in range(ROWS)))
    batches = [batch] * BATCHES
    names = list(layer_linears(teacher))
    sampling = Sampling(reads=watch_reads(teacher, names, [batch]))
    moments = measure_moments(teacher, names, [batch], sampling)
    factors = {}
    for name in names:
        weight = teacher.get_submodule(name).weight
        factors[name.removeprefix("model.")] = weighted_svd(weight, moments[name], min(weight.shape))
    cut = WeightedFactors(ranks=dict.fromkeys(factors, RANK), factors=factors, predicted_loss=0.0)
    learner = llama()
    on_device = ids.to(device)

    def forward() -> None:
        for _ in batches:
            with torch.no_grad():
                teacher(input_ids=on_device, use_cache=False)

    def forward_and_backward() -> None:
        for _ in batches:
            learner(input_ids=on_device, labels=on_device, use_cache=False).loss.backward()
            learner.zero_grad(set_to_none=True)

    def step(way: str, task: str) -> Callable[[], object]:
        setting = Setting(teacher, llama(RANK).train(), on_device, on_device, None)
        return step_rows.floor(setting, {}) if way == "plain" else step_rows.ours(setting, {"task": task})

    answering = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=list(range(VOCABULARY // 8)), pad_token_id=0
    )
    prompts = torch.randint(VOCABULARY, (PROMPTS, TOKENS)).tolist()

    def generate() -> None:
        with inference(teacher, answering):
            for start in range(0, PROMPTS, AT_ONCE):
                input_ids, attention_mask = pad_left(prompts[start : start + AT_ONCE], 0, device)
                draws = RowDraws(range(start, start + AT_ONCE))
                given = {"input_ids": input_ids, "attention_mask": attention_mask, "generation_config": answering}
                teacher.generate(**given, logits_processor=LogitsProcessorList([draws]))

    def answers() -> None:
        draws = RowDraws(range(PROMPTS))
        with inference(teacher, answering):
            list(new_tokens(teacher, prompts, answering, at_once=AT_ONCE, draws=draws))

    def scoring() -> None:
        with label_loss(teacher, shift=True) as loss_of:
            sum(loss_of(each)[0] for each in batches)

    return {
        "plain forward pass": Row(forward),
        "plain forward and backward pass": Row(forward_and_backward),
        "plain step": Row(step("plain", "kd")),
        "plain generate": Row(generate),
        "calibration": Row(
            lambda: measure_moments(teacher, names, batches, sampling), "plain forward and backward pass", 1.5
        ),
        "costs of cuts": Row(
            lambda: predict_losses(teacher, factors, batches, sampling), "plain forward and backward pass", 1.5
        ),
        "held-out check of a cut": Row(lambda: divergences(teacher, {"cut": cut}, batches), "plain forward pass", 3.0),
        "scoring": Row(scoring, "plain forward pass", 1.5),
        "answers": Row(answers, "plain generate", 1.0),
        "KD step": Row(step("ours", "kd"), "plain step", 1.25),
        "MaKD step": Row(step("ours", "makd"), "plain step", 1.25),
    }


def measure(settings: Settings, table: Table) -> None:
    """Add a line for the time of each row, and one for its operations."""
    device = torch.device(settings.device)
    rows = make_rows(3 if settings.quick else 30, device)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    operations = {}
    for name, row in rows.items():
        with kernels() if interpreted else nullcontext():
            row.call()  # warms up
            with Operations() as counted:
                row.call()
        operations[name] = counted.count
    if interpreted:
        for name, row in rows.items():
            if row.plain is not None:
                table.add(compare_operations(name, row.plain, operations))
        return
    for number in range(settings.repeats):
        for name in rows if number % 2 == 0 else reversed(rows):
            wait(device)
            begun = time.perf_counter()
            rows[name].call()
            wait(device)
            seconds[name].append(time.perf_counter() - begun)
    for name, row in rows.items():
        took = 1000 * statistics.median(seconds[name])
        if row.plain is None:
            table.add(Line(name, took, None, f"{operations[name]:,} operations", unit=" ms"))
            continue
        pairs = zip(seconds[name], seconds[row.plain], strict=True)
        ratio = statistics.median(own / plain for own, plain in pairs)
        table.add(Line(f"{name} / {row.plain}", ratio, row.most, f"{took:.1f} ms"))
        table.add(compare_operations(name, row.plain, operations))


def compare_operations(name: str, plain: str, operations: dict[str, int]) -> Line:
    """The line for the operations of a row beside those of its plain work."""
    counts = operations[name], operations[plain]
    return Line(f"{name}, operations / plain", counts[0] / counts[1], None, f"{counts[0]:,} / {counts[1]:,}")


def main() -> None:
    settings, table, _ = parse(bench_parser(__doc__))
    torch.set_num_threads(settings.threads)
    measure(settings, table)
    table.finish()


if __name__ == "__main__":
    run(main)
