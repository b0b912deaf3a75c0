"""How fast a teacher and its students are served, and how much of the saved multiply-adds arrives as speed.

    python scripts/bench/bench_serve.py --teacher DIR --student NAME=DIR --student NAME=DIR --graphs FOLDER
    python scripts/bench/bench_serve.py --quick   # the embedded teacher and a student of it, a minute or two

transformers is torch without a compiler in fp32; onnx and onnx_int8 are what `llmdistill export --to onnx --int8`
makes, in ONNX Runtime. vllm is left out where it is not installed; `--only vllm` is for an interpreter that has it.

prefill reads a prompt of one sequence and gives the logits of its end. generate writes tokens greedily after such a
prompt, whose keys and values are there already. Multiply-adds are counted by torch on the meta device: the graph of
ONNX makes the logits of every token of a prompt, transformers and vLLM those of the last one. The share of the saved
multiply-adds that arrives as speed is

    ((t_teacher - t_student) / t_teacher) / ((m_teacher - m_student) / m_teacher)

with times t of a call, whose ratio is the median over the rounds, and multiply-adds m of a call. Bytes are those of the
weights on disk, in ONNX of the graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from benching import Line, Settings, Table, Work, bench_parser, measure, parse, run, time_ratio
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

import llmdistill  # also lets transformers load students
from llmdistill.embedded import locate
from llmdistill.models.configs import load_config
from llmdistill.models.general import cache_argument
from llmdistill.serving.onnx_export import export_onnx
from llmdistill.students.counting import build_reference

SHARE = 0.8
RUNTIMES = ("transformers", "onnx", "onnx_int8", "vllm")
TEACHER = "teacher"


Step = Callable[[Any, Any], tuple[Any, Any]]
"""Of tokens (1, T) and the keys and values before them: the next token (1, 1), and the keys and values for it."""


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: a model in a runtime, and one call of its work."""
    ids = torch.randint(row["vocabulary"], (1, row["tokens"]), generator=torch.Generator().manual_seed(1))
    if row["runtime"] == "vllm":
        return Work(_vllm(row, ids))
    step, empty = (_transformers if row["runtime"] == "transformers" else _onnx)(row["model"])
    with torch.inference_mode():
        first, cache = step(ids, empty)

    def prefill() -> None:
        step(ids, empty)

    def generate() -> None:
        token, past = first, cache
        for _ in range(row["new"]):
            token, past = step(token, past)
        if past is cache:  # transformers appends to it
            cache.crop(-row["new"])

    return Work(torch.inference_mode()(prefill if row["work"] == "prefill" else generate))


def _transformers(folder: str) -> tuple[Step, Any]:
    """A step, and what stands for no keys and values."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    argument = cache_argument(model)

    def step(tokens: Any, past: Any) -> tuple[Any, Any]:
        past = DynamicCache(config=model.config) if past is None else past
        outputs = model(input_ids=tokens, logits_to_keep=1, use_cache=True, **{argument: past})
        return outputs.logits.argmax(-1), past

    return step, None


def _onnx(file: str) -> tuple[Step, Any]:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    pasts = [each for each in session.get_inputs() if each.name.startswith("past_")]
    presents = [each.name.replace("past_key_values", "present") for each in pasts]
    empty = {each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32) for each in pasts}

    def step(tokens: Any, past: dict[str, Any]) -> tuple[Any, Any]:
        before = next(iter(past.values())).shape[2]
        places = np.arange(before, before + tokens.shape[1])[None]
        mask = np.ones((1, places[0, -1] + 1), np.int64)
        feed = {"input_ids": np.asarray(tokens), "position_ids": places, "attention_mask": mask}
        logits, *after = session.run(["logits", *presents], {**feed, **past})
        return logits[:, -1:].argmax(-1), dict(zip(empty, after, strict=True))

    return step, empty


def _vllm(row: dict[str, Any], ids: torch.Tensor) -> Callable[[], None]:
    # This process runs the model, on as many threads as the other rows have.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM, SamplingParams

    generates = row["work"] == "generate"
    new = row["new"] if generates else 1
    # The cache of prefixes keeps the prompt for generate, all but its last 16 tokens, which the first step reads.
    caching, quiet = {"enable_prefix_caching": generates}, {"skip_tokenizer_init": True, "disable_log_stats": True}
    longest = row["tokens"] + row["new"]
    model = LLM(row["model"], dtype="float32", max_model_len=longest, max_num_seqs=1, **caching, **quiet)
    sampling = SamplingParams(temperature=0, max_tokens=new, min_tokens=0, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": ids[0].tolist()}

    def work() -> None:
        (answer,) = model.generate(prompt, sampling, use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == new, "an answer ended early"

    return work


def multiply_adds(folder: str, tokens: int, new: int, *, all_logits: bool) -> dict[str, float]:
    """Multiply-adds of a call of each work, counted on the meta device; those of a step grow by as many each time."""
    model: Any = build_reference(load_config(folder), "lm_head").eval()

    argument = cache_argument(model)

    def of_call(count: int, cache: Any, keep: int) -> tuple[float, Any]:
        ids = torch.zeros(1, count, dtype=torch.long, device="meta")
        cache = DynamicCache(config=model.config) if cache is None else cache
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            model(input_ids=ids, logits_to_keep=keep, use_cache=True, **{argument: cache})
        return counter.get_total_flops() / 2, cache

    prefill, cache = of_call(tokens, None, 0 if all_logits else 1)
    first, _ = of_call(1, cache, 1)
    _, cache = of_call(tokens + new - 1, None, 1)
    last, _ = of_call(1, cache, 1)
    return {"prefill": prefill, "generate": new * (first + last) / 2}


def files(runtime: str, model: str, name: str, graphs: Path) -> tuple[str, int]:
    """What a runtime opens, and its bytes; the ONNX of a model, in fp32 and int8, is written unless it is there."""
    if not runtime.startswith("onnx"):
        return model, sum(each.stat().st_size for each in Path(model).glob("*.safetensors"))
    folder = graphs / name
    if not folder.exists():
        export_onnx(model, folder, int8=True)
    file = folder / {"onnx": "model.onnx", "onnx_int8": "model_int8.onnx"}[runtime]
    return str(file), sum(each.stat().st_size for each in folder.glob(f"{file.name}*"))


def compare(
    settings: Settings, table: Table, runtime: str, models: dict[str, str], row: dict[str, Any], arguments: Any
) -> None:
    opened = {name: files(runtime, model, name, arguments.graphs) for name, model in models.items()}
    sizes = {"tokens": row["tokens"], "new": row["new"], "all_logits": runtime.startswith("onnx")}
    products = {name: multiply_adds(model, **sizes) for name, model in models.items()}
    for work, tokens in (("prefill", row["tokens"]), ("generate", row["new"])):
        rows = {name: {**row, "runtime": runtime, "work": work, "model": file} for name, (file, _) in opened.items()}
        found = measure(build, rows, settings, memory=False)
        for name, measured in found.items():
            speed, adds, size = tokens / measured.median, products[name][work] / tokens, opened[name][1]
            detail = f"{speed:.1f} tokens/s, {adds / 1e6:.1f} million multiply-adds a token, {size / 1e6:.1f} MB"
            if name == TEACHER:
                table.say(f"{runtime}, {work}: {name}: {detail}")
                continue
            saved = 1 - products[name][work] / products[TEACHER][work]
            share = (1 - time_ratio(measured, found[TEACHER])) / saved
            target = SHARE if runtime.startswith("onnx") else None
            table.add(Line(f"{runtime}, {work}: {name}: share of the saved", share, target, detail, at_least=True))


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--teacher", help="model folder or package:NAME, without --quick")
    parser.add_argument("--student", metavar="NAME=DIR", action="append", default=[], help="may be repeated")
    parser.add_argument("--graphs", type=Path, help="folder that keeps the ONNX, without --quick")
    parser.add_argument("--only", choices=RUNTIMES, action="append", help="one of the runtimes alone; may be repeated")
    settings, table, arguments = parse(parser)
    if not settings.quick and (arguments.teacher is None or arguments.graphs is None or not arguments.student):
        parser.error("give --teacher, --student and --graphs, or --quick")
    row: dict[str, Any] = {"tokens": 256, "new": 64}
    with TemporaryDirectory() as scratch:
        if settings.quick:
            arguments.graphs, row = Path(scratch) / "graphs", {"tokens": 32, "new": 8}
            models = {TEACHER: str(locate("embedded:teacher")), "student": f"{scratch}/student"}
            llmdistill.compress(models[TEACHER], output=models["student"], target_params="34%")
        else:
            students = dict(each.split("=", 1) for each in arguments.student)
            models = {TEACHER: str(locate(arguments.teacher)), **students}
        row["vocabulary"] = min(load_config(model).vocab_size for model in models.values())
        arguments.graphs.mkdir(exist_ok=True)
        for runtime in arguments.only or [each for each in RUNTIMES if each != "vllm" or find_spec("vllm")]:
            compare(settings, table, runtime, models, row, arguments)
    table.finish()


if __name__ == "__main__":
    run(main)
