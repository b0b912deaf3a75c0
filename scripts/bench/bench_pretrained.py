"""Seconds of a pretrained decoder's way to a student: dequantizing, answers, `compress`, and another size.

    python scripts/bench/bench_pretrained.py --model smollm2.gguf --chats chats.jsonl     # on a GPU if there is one
    python scripts/bench/bench_pretrained.py                      # the embedded teacher, to try the script, a minute

Prints a line of JSON for each part as it comes. Nothing is in a cache before: a GGUF file is dequantized anew, and the
second size takes the statistics of the first. Answers are samples of up to `--max_length` less `--max_prompt_length`
tokens, with end tokens; as many are written at once as the memory of the GPU holds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from benching import positive, run, wait

import llmdistill
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.prompts import resolve_prompt
from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate
from llmdistill.generation.decode import Decoding, generate_passes
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.runtime.devices import default_device, free_memory


def timed(part: str, work: Callable[[], Any], device: torch.device) -> Any:
    """Do the work, and print its seconds; what it returns as a dict is in the line too."""
    began = time.perf_counter()
    result = work()
    wait(device)
    line = {"part": part, "seconds": round(time.perf_counter() - began, 2)}
    print(json.dumps(line | (result if isinstance(result, dict) else {})), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded:teacher", help="a decoder: a GGUF file, a folder or a name")
    parser.add_argument("--chats", default="embedded:train", help="instructions, for prompts and calibration")
    parser.add_argument("--examples", type=positive, default=96, help="chats of the calibration")
    parser.add_argument("--answers", type=positive, default=3072, help="prompts that are answered")
    parser.add_argument("--sizes", nargs=2, default=["60%", "80%"], help="target_params of the two students")
    parser.add_argument("--max_prompt_length", type=positive, default=160)
    parser.add_argument("--max_length", type=positive, default=448)
    options = parser.parse_args()
    device = default_device()
    limits = {"max_prompt_length": options.max_prompt_length, "max_length": options.max_length}
    if device.type == "cuda":
        timed("start of CUDA", lambda: torch.ones(1, device=device).sum().item() and None, device)
    with TemporaryDirectory() as folder:
        os.environ["LLMDISTILL_CACHE"] = folder
        model = timed("find or dequantize the model", lambda: locate(options.model), device)

        def answer() -> dict[str, Any]:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            teacher, tokenizer = load_model(model, dtype=dtype, device=device).eval(), load_tokenizer(model)
            prompt = resolve_prompt(None, [tokenizer])
            rows = encode(
                read_examples(str(locate(options.chats))),
                tokenizer,
                Limits(**limits, long_prompts="drop", prompt=prompt),
            ).items
            prompts = list(islice(cycle([row.last_prompt for row in rows]), options.answers))
            [passed] = generate_passes(teacher, tokenizer, prompts, Decoding(sample=True, **limits), seeds=[0])
            return {"tokens": passed.tokens, "tokens_per_second": round(passed.tokens / passed.seconds)}

        timed("load, and write answers", answer, device)
        free_memory(device)
        calibration = {"data": options.chats, "examples": options.examples, "folder": str(Path(folder) / "statistics")}
        for part, size in zip(("compress", "another size"), options.sizes, strict=True):

            def compress(size: str = size) -> dict[str, Any]:
                student = llmdistill.compress(
                    str(model),
                    target_params=size,
                    weighting="gradients",
                    allocation="loss",
                    calibration=calibration,
                    output=Path(folder) / f"student-{size}",
                    long_prompts="drop",
                    **limits,
                )
                return {"size": size, "parameters": sum(each.numel() for each in student.parameters())}

            timed(part, compress, device)
            free_memory(device)


if __name__ == "__main__":
    run(main)
