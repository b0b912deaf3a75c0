"""How fast factorized students run, against their dense teachers, and against what their multiply-adds promise.

    python scripts/bench/bench_students.py           # GPT-2 by SVD and BERT-base by Kronecker products, minutes
    python scripts/bench/bench_students.py --quick   # small models, seconds

GPT-2 at rank 256 answers greedily through the package's own generation: prefill is a batch of prompts and one token
each, generate a batch of short prompts and many tokens each. KroneckerBERT_21 and _8 read a batch of texts (encode_21,
encode_8), and one text alone. prefill_pivoted and generate_pivoted set a student of pivoted factors against the one of
plain factors with as many parameters. The promise is the ratio of the counted multiply-adds; the target is 0.8 of it.
The weights are random, as no product asks what it multiplies, and no answer ends early.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from benching import Line, Settings, Table, Work, bench_parser, measure, parse, run, time_ratio
from step_rows import bert, gpt2
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from llmdistill.config import FactorizeConfig
from llmdistill.config.command_line import recipe_path
from llmdistill.generation.decode import Decoding, HuggingFaceEngine
from llmdistill.students.install import install
from llmdistill.students.sizes import plan_factors

SHARE = 0.8

GPT2 = {"width": 768, "heads": 12, "vocabulary": 50257, "layers": 12, "factorize": {"rank": 256}}
PREFILL, GENERATE = {"batch": 8, "tokens": 256, "new": 1}, {"batch": 8, "tokens": 16, "new": 64}
PIVOTED = {"factorize": {"target_params": 77_253_888, "form": "pivoted"}, "against": {"rank": 256}}
BERT = {"width": 768, "heads": 12, "vocabulary": 30522, "layers": 12, "tokens": 128}
JOBS: dict[str, dict[str, Any]] = {
    "prefill": {**GPT2, **PREFILL},
    "generate": {**GPT2, **GENERATE},
    "prefill_pivoted": {**GPT2, **PREFILL, **PIVOTED},
    "generate_pivoted": {**GPT2, **GENERATE, **PIVOTED},
    **{f"encode_{size}": {**BERT, "recipe": f"kroneckerbert/bert-{size}", "batch": 32} for size in (21, 8)},
    **{f"encode_{size}_one": {**BERT, "recipe": f"kroneckerbert/bert-{size}", "batch": 1} for size in (21, 8)},
}
"""Students and their work; a decoder writes `new` tokens, an encoder reads alone. `factorize` says what makes a student
of the model; where it is missing the recipe's section of that name does. `against` makes another student, which takes
the place of the dense teacher."""

QUICK = {"layers": 2, "vocabulary": 8192, "batch": 1}
QUICK_PIVOTED = {"factorize": {"target_params": "70%", "form": "pivoted"}, "against": {"target_params": "70%"}}
"""What is smaller with --quick."""


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: the work of JOBS, with or without what makes the model a student."""
    model = gpt2(row, row["layers"]) if "new" in row else bert(row, row["layers"])
    if "factorize" in row:
        # Factors of random weights: a call costs the same whatever they hold.
        factorize = row["factorize"]
        install(
            model, plan_factors(model, FactorizeConfig(**factorize), "kronecker" if "shapes" in factorize else "svd")
        )
    model.eval().requires_grad_(False).to(device)
    ids = torch.randint(row["vocabulary"], (row["batch"], row["tokens"]), generator=torch.Generator().manual_seed(1))
    work = _answers(model, ids.tolist(), row["new"]) if "new" in row else partial(model.base_model, ids.to(device))
    with FlopCounterMode(display=False) as counter:
        work()
    return Work(work, {"multiply_adds": counter.get_total_flops() / 2})


def _answers(model: PreTrainedModel, prompts: list[list[int]], new: int) -> Callable[[], None]:
    # An end token that no answer holds: all rows then write the same number of tokens.
    tokenizer: Any = SimpleNamespace(eos_token_id=-1, pad_token_id=0)
    width = len(prompts[0])
    decoding = Decoding(sample=False, max_prompt_length=width, max_length=width + new)
    engine = HuggingFaceEngine(model, tokenizer, decoding)

    def answer() -> None:
        rows = engine.answer(prompts, [0] * len(prompts), len(prompts))
        assert all(len(each) == new for _, each in rows), "an answer ended early"

    return answer


def compare(settings: Settings, table: Table, job: str, work: dict[str, Any]) -> None:
    made = work.pop("factorize", None)
    if "recipe" in work:
        recipe = yaml.safe_load(recipe_path(work.pop("recipe")).read_text(encoding="utf-8"))
        made = recipe["student"]["factorize"]
    name, against = ("plain student", {"factorize": work.pop("against")}) if "against" in work else ("teacher", {})
    found = measure(build, {"student": {**work, "factorize": made}, name: work | against}, settings, memory=False)
    one, other = found["student"], found[name]
    fewer = other.facts["multiply_adds"] / one.facts["multiply_adds"]
    tokens = work["batch"] * (work["new"] if work.get("new", 1) > 1 else work["tokens"])
    detail = f"{tokens / one.median:,.0f} / {tokens / other.median:,.0f} tokens/s; {fewer:.3f} × fewer multiply-adds"
    title = f"{job}: student's tokens/s over the {name}'s"
    table.add(Line(title, time_ratio(other, one), SHARE * fewer, detail, at_least=True))


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", choices=JOBS, action="append", help="one of the comparisons alone; may be repeated")
    settings, table, arguments = parse(parser)
    for job in arguments.only or JOBS:
        work = {**JOBS[job], **(QUICK if settings.quick else {})}
        if settings.quick and "new" in work:
            work |= {"new": min(work["new"], 8), **(QUICK_PIVOTED if "against" in work else {})}
        compare(settings, table, job, work)
    table.finish()


if __name__ == "__main__":
    run(main)
