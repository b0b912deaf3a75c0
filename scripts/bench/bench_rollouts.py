"""How fast a student's own answers are written: all prompts of a step, by transformers' generate and by a vLLM server.

    VLLM_SERVER_DEV_MODE=1 vllm serve DIR --worker-extension-cls llmdistill.generation.vllm_worker.StudentWeights
    python scripts/bench/bench_rollouts.py --model DIR --url http://localhost:8000

Nothing ends an answer before its last token. The third row hands the weights over: it saves and loads them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from benching import Work, bench_parser, measure, parse, run

from llmdistill.embedded import locate
from llmdistill.generation.rollout import Prompt, StudentWriter
from llmdistill.generation.rollout_server import RolloutServer
from llmdistill.models.companions import save_model
from llmdistill.models.load import load_model


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: what writes, or hands over."""
    folder, size = locate(row["model"]), row["prompts"]
    model = load_model(str(folder), dtype=torch.float32, device=device).eval()
    ids = torch.randint(5, model.config.vocab_size, (size, row["tokens"]), generator=torch.Generator().manual_seed(0))
    prompts = [Prompt(each, seed) for seed, each in enumerate(ids.tolist())]
    server = RolloutServer(row["url"], vocabulary=1 << 30, max_new_tokens=row["new"], end_token_ids=[], wait=3600.0)
    if row["way"] == "generate":
        writer = StudentWriter(model, row["new"], [-1], pad_token_id=0, synced=False)
        return Work(lambda: writer.write(0, [prompts]))
    if row["way"] == "server":
        return Work(lambda: [each.result() for each in [server.ask(prompt) for prompt in prompts]])
    kept = Path(mkdtemp()) / "student"

    def hand_over() -> None:
        shutil.rmtree(kept, ignore_errors=True)
        save_model(model, kept, folder)
        server.take_weights(kept, "bench")

    return Work(hand_over)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="embedded:teacher", help="what the server serves")
    parser.add_argument("--url", required=True)
    settings, table, arguments = parse(parser)
    row = {"model": arguments.model, "url": arguments.url, "prompts": 64, "tokens": 64, "new": 128}
    rows = {way: {**row, "way": way} for way in ("generate", "server", "hand over")}
    found = measure(build, rows, settings, memory=False)
    for way in ("generate", "server"):
        table.say(f"{way}: {row['prompts'] * row['new'] / found[way].median:,.0f} tokens/s")
    table.say(f"hand over: {found['hand over'].median:.2f} s")
    table.time("server / generate", found["server"], found["generate"])
    table.finish()


if __name__ == "__main__":
    run(main)
