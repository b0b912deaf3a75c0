"""How fast a factorised student answers, against its dense teacher, and against what its multiply-adds promise.

    python scripts/bench_generate.py           # GPT-2 against its rank-256 student, minutes
    python scripts/bench_generate.py --quick   # a small model, seconds

Both answer through the package's own generation, greedily: prefill is a batch of prompts and one token each, generation
a batch of short prompts and many tokens each. The promise is the ratio of the multiply-adds of the matrix products that
torch carries out in such a call, counted, not derived; the target is 0.8 of it. The weights are random, as no product
asks what it multiplies, and no answer ends early.

The last line is JSON: {"prefill": {"speedup": ..., "multiply_adds": ..., "share": ...}, "generate": ...}, where share
is speedup over multiply_adds. --profile adds where the time of a call goes, by torch's own profiler.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from benching import Settings, Work, measure, median_ratio, parse
from benching_table import Line, Table
from step_rows import gpt2, low_rank
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

SHARE = 0.8

FULL = {"width": 768, "heads": 12, "vocabulary": 50257, "layers": 12, "rank": 256}
QUICK = {"width": 256, "heads": 4, "vocabulary": 8192, "layers": 4, "rank": 64}
JOBS = {"prefill": {"batch": 8, "prompt": 256, "new": 1}, "generate": {"batch": 8, "prompt": 16, "new": 64}}
QUICK_JOBS = {"prefill": {"batch": 8, "prompt": 128, "new": 1}, "generate": {"batch": 8, "prompt": 8, "new": 8}}


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: {"rank" of a student, "batch", "prompt", "new" tokens, and the model's sizes}."""
    from llmdistill.generation.decode import Decoding, HuggingFaceEngine

    model = gpt2({**row, "way": "generate"}, row["layers"])
    if "rank" in row:
        low_rank(model, row["rank"])
    model.eval().requires_grad_(False).to(device)
    # An end token that no answer holds: all rows then write the same number of tokens.
    tokenizer: Any = SimpleNamespace(eos_token_id=-1, pad_token_id=0)
    engine = HuggingFaceEngine(model, tokenizer, Decoding(sample=False), max_new_tokens=row["new"])
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(row["vocabulary"], (row["batch"], row["prompt"]), generator=generator).tolist()

    def answer() -> None:
        rows = engine.answer(prompts, [0] * len(prompts))
        assert all(len(each) == row["new"] for each in rows), "an answer ended early"

    with FlopCounterMode(display=False) as counter:
        answer()
    facts = {"multiply_adds": counter.get_total_flops() / 2}
    if row.get("profile"):
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            answer()
        facts["profile"] = recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=12)
    return Work(answer, facts)


def compare(settings: Settings, table: Table, job: str, *, profiled: bool) -> dict[str, float]:
    """One job: tokens a second of both, and their ratio."""
    sizes = QUICK if settings.quick else FULL
    work = (QUICK_JOBS if settings.quick else JOBS)[job]
    student: dict[str, Any] = {**sizes, **work, "profile": profiled}
    teacher = {key: value for key, value in student.items() if key != "rank"}
    found = measure(__file__, {"student": student, "teacher": teacher}, settings, weighed=())
    one, other = found["student"], found["teacher"]
    speedup = median_ratio(other.seconds, one.seconds)
    fewer = other.facts["multiply_adds"] / one.facts["multiply_adds"]
    tokens = work["batch"] * (work["prompt"] if job == "prefill" else work["new"])
    detail = f"{tokens / one.median:,.0f} / {tokens / other.median:,.0f} tokens/s; {fewer:.3f} × fewer multiply-adds"
    target = SHARE * fewer
    table.add(Line(f"{job}: student's tokens/s over the teacher's", speedup, target, detail, at_least=True))
    for name, measured in found.items():
        if "profile" in measured.facts:
            table.say(f"{name}, {job}:\n{measured.facts['profile']}")
    per_second = {"student_tokens_per_second": tokens / one.median, "teacher_tokens_per_second": tokens / other.median}
    return {"speedup": speedup, "multiply_adds": fewer, "share": speedup / fewer, **per_second}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this bench has beside the others."""
    parser.add_argument("--profile", action="store_true", help="print where the time goes")


def main() -> None:
    settings, arguments = parse(__doc__, build, add=add_arguments)
    table = Table(settings, silent=arguments.json)
    table.finish({job: compare(settings, table, job, profiled=arguments.profile) for job in JOBS})


if __name__ == "__main__":
    main()
