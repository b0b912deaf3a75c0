"""How fast a student's own answers are written, 64 at once, by transformers' generate and by a vLLM server.

    VLLM_SERVER_DEV_MODE=1 vllm serve DIR --worker-extension-cls llmdistill.generation.vllm_worker.StudentWeights
    python scripts/bench/bench_rollouts.py --model DIR --url http://localhost:8000

Nothing ends an answer before its last token. The time to save and hand over the weights is apart.
"""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import torch
from benching import Work, bench_parser, measure, parse, run

from llmdistill.embedded import locate
from llmdistill.models.companions import save_model
from llmdistill.models.load import load_model
from llmdistill.training.own_answers import Prompt, RolloutServer, ServerWriter, StudentWriter, Writer

PROMPTS, TOKENS, NEW = 64, 64, 128


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: what writes the answers of a step, or hands the weights over and writes none."""
    folder = locate(row["model"])
    model = load_model(str(folder), dtype=torch.float32, device=device).eval()
    ids = torch.randint(5, model.config.vocab_size, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(0))
    prompts = [Prompt(each, seed) for seed, each in enumerate(ids.tolist())]
    writer: Writer = StudentWriter(model, NEW, [-1], pad_token_id=0, synced=False)
    if row["way"] != "generate":
        server = RolloutServer(row["url"], vocabulary=1 << 30, max_new_tokens=NEW, end_token_ids=[], wait=3600.0)
        writer = ServerWriter(
            server,
            lambda output: save_model(model, output, folder),
            Path(row["folder"]) / "handed-over",
            every=row["every"],
        )
    turn = count()
    return Work(lambda: writer.write(next(turn), [prompts[: row["prompts"]]]))


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="embedded:teacher", help="what the server serves")
    parser.add_argument("--url", required=True)
    settings, table, arguments = parse(parser)
    with tempfile.TemporaryDirectory() as folder:
        row = {"model": arguments.model, "url": arguments.url, "folder": folder, "every": 1 << 30, "prompts": PROMPTS}
        rows = {way: {**row, "way": way} for way in ("generate", "server")}
        found = measure(build, rows, settings, memory=False)
        # Not in turn with the others: a server whose weights are another's is handed them again before it answers.
        again = {"hand over": {**row, "way": "server", "every": 1, "prompts": 0}}
        found |= measure(build, again, settings, memory=False)
    for way in ("generate", "server"):
        table.say(f"{way}: {PROMPTS * NEW / found[way].median:,.0f} tokens/s")
    table.say(f"hand over: {found['hand over'].median:.2f} s")
    table.time("server / generate", found["server"], found["generate"])
    table.finish()


if __name__ == "__main__":
    run(main)
