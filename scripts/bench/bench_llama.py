"""A distillation step at Llama's sizes on one GPU: the floor, ours with and without DeepSpeed, and TRL's trainer.

    python scripts/bench/bench_llama.py             # every case in the ways of WAYS: some 20 s each
    python scripts/bench/bench_llama.py --case 8b-1b --way floor --way zero2 --way zero2+compiled+fp8
    python scripts/bench/bench_llama.py --tiny      # the same ways on a CPU, to try the script

A way is one of floor, ours, zero1, zero2, zero3 and trl. All but floor and trl may have, after a plus, what the layers
run (compiled, liger), and what the teacher is: int8, int4 or fp8, whose nats from the exact teacher are in the line, or
cache, its hidden states in the host's memory.

Prints a line of JSON for each case and way as it comes: milliseconds of a step (the median), tokens per second, the
peak of memory in GB, and TFLOP/s by 2 FLOP a token and parameter of the teacher and 6 of the student. Weights are
random and bf16. The floor is the teacher's forward pass, the student's forward and backward pass on plain labels, and
torch's fused AdamW in bf16, which `ours` and `trl` have too; `zero1` to `zero3` run the same step under DeepSpeed, with
fp32 master weights. A case that does not fit the card, or a way whose library is missing, has its reason under "error".
Each runs in a process of its own, one after the other, because the models of one fill most of a card.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import step_rows
import torch
from benching import run, wait
from step_rows import IGNORE, Setting
from transformers import LlamaConfig, LlamaForCausalLM

from llmdistill.batch import Batch, HeadInputs
from llmdistill.config import FactorizeConfig, TrainConfig
from llmdistill.errors import UserError
from llmdistill.runtime.distributed import World, process_group
from llmdistill.runtime.engine import build_engine
from llmdistill.teachers.cache.teacher import CachedTeacher
from llmdistill.teachers.few_bits import check_bits, round_teacher
from llmdistill.teachers.output_rows import Request

# Hidden size, layers, query heads, key heads, head size, feed-forward size, vocabulary
SIZES = {
    "1b": (2048, 16, 32, 8, 64, 8192, 128_256),  # Llama-3.2-1B
    "3b": (3072, 28, 24, 8, 128, 8192, 128_256),  # Llama-3.2-3B
    "8b": (4096, 32, 32, 8, 128, 14336, 128_256),  # Llama-3-8B, but with a tied embedding: 7.5 billion
    "tiny": (64, 2, 4, 2, 16, 128, 500),
}
WAYS = (
    *("floor", "ours", "ours+compiled", "ours+liger", "ours+int8", "ours+fp8", "ours+cache"),
    *("zero1", "zero2", "zero2+compiled+fp8", "zero3", "trl"),
)
ENGINES = ("floor", "ours", "zero1", "zero2", "zero3", "trl")
LAYERS, BITS = ("compiled", "liger"), ("int8", "int4", "fp8")
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    teacher: str
    student: str
    batch: int
    tokens: int
    """Of each sequence."""
    rank: int | None = None
    """Of the student's factors; None for a dense student."""
    labeled: float = 1.0
    """The share of the tokens that are supervised, at the end of each sequence."""
    method: str = "kl"


CASES = {
    "8b-1b": Case(teacher="8b", student="1b", batch=4, tokens=2048),
    "3b-1b": Case(teacher="3b", student="1b", batch=8, tokens=1024),
    "3b-1b-40": Case(teacher="3b", student="1b", batch=8, tokens=1024, labeled=0.4),
    # 56 % of the parameters. 635 is the largest rank that fits, 640 the next that bf16 kernels multiply at full speed.
    "1b-rank-635": Case(teacher="1b", student="1b", batch=8, tokens=1024, rank=635, method="makd"),
    "1b-rank-640": Case(teacher="1b", student="1b", batch=8, tokens=1024, rank=640, method="makd"),
    "1b-rank-640-kd": Case(teacher="1b", student="1b", batch=8, tokens=1024, rank=640, method="kd"),
}
TINY = {
    "tiny": Case(teacher="tiny", student="tiny", batch=2, tokens=32),
    "tiny-rank-8": Case(teacher="tiny", student="tiny", batch=2, tokens=32, rank=8, method="makd"),
}


def make_model(size: str, device: torch.device) -> LlamaForCausalLM:
    width, layers, heads, key_heads, head, ffn, vocabulary = SIZES[size]
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head,
        intermediate_size=ffn,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    with device:  # never in the host's memory
        return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)


def make_setting(case: Case, device: torch.device) -> Setting:
    """The models and the batch, which are the same in every way."""
    torch.manual_seed(0)
    teacher = make_model(case.teacher, device).eval().requires_grad_(False)
    student = make_model(case.student, device).train()
    if case.rank is not None:
        step_rows.low_rank(student, FactorizeConfig(rank=case.rank))
        student.to(device, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(teacher.config.vocab_size, (case.batch, case.tokens), generator=generator)
    labels = ids.masked_fill(torch.arange(case.tokens) < round((1 - case.labeled) * case.tokens), IGNORE)
    return Setting(teacher, student, ids.to(device), labels.to(device), None)


def measure(case: Case, step: Callable[[], float], setting: Setting, repeats: int) -> dict[str, Any]:
    """Time a step, which has been built, and return the figures of its line."""
    device, seconds, loss = setting.ids.device, list[float](), 0.0
    for _ in range(WARM_UP):
        step()
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(repeats):
        began = time.perf_counter()
        loss = step()
        wait(device)
        seconds.append(time.perf_counter() - began)
    median, tokens = statistics.median(seconds), setting.ids.numel()
    # Anew, as few bits and a cache leave other parameters of the one that taught.
    whole = make_model(case.teacher, torch.device("meta"))
    teacher, student = (sum(one.numel() for one in model.parameters()) for model in (whole, setting.student))
    run_here = 0 if setting.teacher.device.type == "meta" else teacher  # not from a cache
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    return {
        "ms": round(1e3 * median, 2),
        "tokens_per_second": round(tokens / median),
        "peak_gb": peak and round(peak, 2),
        "tflops": round((2 * run_here + 6 * student) * tokens / median / 1e12, 1),
        "loss": loss,
        "teacher": teacher,
        "student": student,
    }


class HostCache:
    """Hidden states of one batch as a cache on a disk gives them, whose files the system holds in memory."""

    def __init__(self, head: HeadInputs) -> None:
        self.record, self.scaling = {"held": {"top_k": None}}, dict[int, float]()
        self._rows, self._head = head.rows.cpu(), head._replace(rows=head.rows[:0])

    def head(self, _device: torch.device) -> HeadInputs:
        return self._head

    def find(self, ids: list[int]) -> np.ndarray:
        return np.array(ids)

    def rows(self, _name: str, _places: np.ndarray) -> torch.Tensor:
        return self._rows.clone()  # as reading does


def from_cache(live: Any, method: Any, batch: Any) -> CachedTeacher:
    """The teacher of a batch of labels alone, read from the host's memory; the live one ran once."""
    with torch.no_grad():
        targets = live.compute_targets(batch, lm_head=("labels",))
    cache: Any = HostCache(targets.lm_head["labels"])
    live.remove()
    live.model.to("meta")  # gives its memory back, but for the head
    return CachedTeacher(cache, Request.of(method), shift=True, device=batch.input_ids.device)


def measure_way(case: Case, way: str, device: torch.device, repeats: int) -> dict[str, Any]:
    setting, (engine, *parts) = make_setting(case, device), way.split("+")
    row = {"task": case.method, "kernels": next((each for each in parts if each in LAYERS), "transformers")}
    if engine == "floor":
        return measure(case, step_rows.floor(setting, row), setting, repeats)
    if engine == "trl":
        import peer_rows

        return measure(case, peer_rows.trl_step(setting, "distillation", on_policy=False), setting, repeats)
    more: dict[str, Any] = {"taught_by": from_cache} if "cache" in parts else {}
    nats = {}
    batch = Batch(setting.ids, torch.ones_like(setting.ids), setting.labels)
    for bits in (each for each in parts if each in BITS):
        check_bits("the teacher in", bits, device)
        with replace(World.current(), device=device).entered(), redirect_stdout(sys.stderr):
            nats = {"nats": round_teacher(setting.teacher, "the teacher in", bits, lambda: batch)}
    if engine == "ours":
        return measure(case, step_rows.ours(setting, row, **more), setting, repeats) | nats

    def make_engine(model: Any) -> Any:
        # A rate of 0 would let DeepSpeed skip work; this one leaves bf16 weights as they are.
        train = TrainConfig(global_batch_size=case.batch, micro_batch_size=case.batch, dtype="bf16", learning_rate=1e-8)
        return build_engine(model, step_rows.ds_config(engine, train, 1), train)

    with process_group(needed=True):
        return measure(case, step_rows.ours(setting, row, make_engine=make_engine, **more), setting, repeats) | nats


def be_the_process(pipe: Any, case: Case, way: str, device: str, repeats: int) -> None:
    try:
        pipe.send(measure_way(case, way, torch.device(device), repeats))
    except (ImportError, UserError, torch.OutOfMemoryError) as error:
        pipe.send({"error": str(error).splitlines()[0]})


def line_of(case: Case, way: str, device: str, repeats: int) -> dict[str, Any]:
    """Measure a case in one way, in a process of its own, whose end gives the card back whole."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=be_the_process, args=(theirs, case, way, device, repeats))
    process.start()
    theirs.close()
    try:
        line: dict[str, Any] = ours.recv()
    except EOFError:
        line = {"error": "its process ended without figures: see above"}
    process.join()
    return line


def way(text: str) -> str:
    engine, *parts = text.split("+")
    known = parts if engine in ENGINES[1:-1] else []
    if engine not in ENGINES or known != parts or not set(parts) <= {*LAYERS, *BITS, "cache"}:
        raise argparse.ArgumentTypeError(f"{text}: one of {', '.join(ENGINES)}, such as {', '.join(WAYS[2:7])}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="one of the cases alone; may be repeated")
    parser.add_argument("--way", action="append", type=way, help="one of the ways alone; may be repeated")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps, after 3 that warm up")
    parser.add_argument("--tiny", action="store_true", help="two layers of 64 in every way, also on a CPU")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: --tiny tries the script on a CPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = {"card": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__}
    for name in TINY if options.tiny else options.case or CASES:
        case = (TINY if options.tiny else CASES)[name]
        for each in options.way or WAYS:
            # TRL and the cache here have no losses of layers.
            if case.method == "makd" and ("cache" in each or each == "trl"):
                continue
            line = {"case": name, "way": each, **line_of(case, each, device, options.repeats), **where}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run(main)
