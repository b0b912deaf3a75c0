"""Loading a training set: what each rank keeps in memory, how long a start takes, and who tokenizes a stream.

    python scripts/bench/bench_data.py           # 100,000 instructions, some minutes
    python scripts/bench/bench_data.py --quick   # 5,000 instructions

Each row is measured in a process of its own. Private memory is what no other process shares; the pages of a mapped file
are in the memory of a node once. `lists` is what every rank would hold if the examples were Python lists. The rows of a
stream are the CPU seconds of each rank for the same steps.
"""

from __future__ import annotations

import gc
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benching import Line, Work, bench_parser, facts_of, measure, parse, run

from llmdistill.data.collate import collate
from llmdistill.data.exchange import Exchange
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.sampler import Share
from llmdistill.data.sources import read_examples
from llmdistill.data.stored_examples import open_examples, store_examples
from llmdistill.data.stream import ExampleStream, StreamLoader
from llmdistill.embedded import locate
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.runtime.devices import give_back_memory
from llmdistill.runtime.distributed import CONTROL_TIMEOUT
from llmdistill.runtime.launch import free_port

GLOBAL_BATCH = 256
STEPS_SHARE = 4
"""The stream goes through one part of this many of the set."""
TITLES = {"lists": "Python lists", "mapped-0": "mapped, first start", "mapped-1": "mapped, next start"}


def main() -> None:
    settings, table, arguments = parse(bench_parser(__doc__))
    settings = replace(settings, threads=1)  # one thread a rank, as several ranks share a node
    count = 5_000 if arguments.quick else 100_000
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TOKENIZERS_PARALLELISM": "false", "LLMDISTILL_CACHE": f"{folder}/cache"}
        file = Path(folder) / "rows.jsonl"
        write(file, count)
        row = {"file": str(file)}
        rows = {title: facts_of(build, {**row, "way": way}, settings) for way, title in TITLES.items()}
        for ranks in (1, 2):
            port = free_port()
            streams = {
                f"stream, rank {rank} of {ranks}": {**row, "way": "stream", "rank": rank, "size": ranks, "port": port}
                for rank in range(ranks)
            }
            found = measure(build, streams, settings, times=False, memory=False)
            rows |= {name: each.facts for name, each in found.items()}
    for name, each in rows.items():
        per = "" if name.startswith("stream") else f", {each['private'] / count:,.1f} private bytes an example"
        table.add(Line(f"{name}: CPU seconds", each["cpu"], None, f"{each['seconds']:.2f} s by the clock{per}", " s"))
    table.finish()


def write(file: Path, count: int) -> None:
    """Write examples made of the embedded ones, no two the same."""
    examples = islice(cycle(read_examples(locate("embedded:train"))), count)
    rows = (
        {"instruction": f"{number}. {each.instruction}", "input": each.input, "output": each.outputs[0]}
        for number, each in enumerate(examples)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build(row: dict[str, Any], _device: torch.device) -> Work:
    """One row: {"way": lists, mapped-0 (the first start, which makes it), mapped-1 or stream, ...}."""
    file, limits, tokenizer = Path(row["file"]), Limits(), load_tokenizer(locate("embedded:teacher"))
    tokenizer(["a"])  # the first call takes longer
    if row["way"] == "lists":
        return Work(None, measured(lambda: encode(read_examples(file), tokenizer, limits)))
    if row["way"] != "stream":
        return Work(None, measured(lambda: open_examples(store_examples(file, tokenizer, limits))))
    rank, size = row["rank"], row["size"]
    if size > 1:
        address = f"tcp://127.0.0.1:{row['port']}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    share = Share(
        seed=0, global_batch_size=GLOBAL_BATCH, micro_batch_size=GLOBAL_BATCH // size, rank=rank, world_size=size
    )
    make_batch = partial(collate, pad_token_id=0)
    exchange = Exchange.of_all_ranks(CONTROL_TIMEOUT)
    examples = ExampleStream(file, share.seed, shuffle_buffer=1_000)
    loader = StreamLoader(examples, tokenizer, limits, share, make_batch, exchange=exchange)
    steps = file.read_bytes().count(b"\n") // GLOBAL_BATCH // STEPS_SHARE
    loader.micro_batches(0)
    return Work(None, measured(lambda: loader.micro_batches(steps)))


def measured(job: Callable[[], object]) -> dict[str, float]:
    """Return the seconds, the CPU seconds and the private bytes that a job's result costs."""
    before, began, cpu = private_bytes(), time.perf_counter(), time.process_time()
    result = job()
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    kept = private_bytes() - before  # while the result is there
    del result
    return {"seconds": round(seconds, 3), "cpu": round(used, 3), "private": max(0, kept)}


def private_bytes() -> int:
    """Return the bytes of this process that are no file's, as Linux counts them."""
    gc.collect()
    give_back_memory()
    return 1024 * int(re.findall(r"Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[0])


if __name__ == "__main__":
    run(main)
