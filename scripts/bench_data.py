"""Loading an instruction set: what each rank keeps in memory, how long a start takes, and who tokenises a stream.

    python scripts/bench_data.py           # 100,000 examples, some minutes
    python scripts/bench_data.py --quick   # 5,000 examples

Each row is measured in a process of its own. Private memory is what no other process shares; the pages of a mapped file
are in the memory of a node once. `lists` is what every rank would hold if the examples were Python lists. The rows of a
stream are the CPU seconds of each rank for the same steps. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

GLOBAL_BATCH = 256
STEPS_SHARE = 4
"""The stream goes through one part of this many of the set."""


def main() -> None:
    """Measure the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 examples")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row is not None:
        kind, *numbers = arguments.row.split("-")
        print(json.dumps(ROWS[kind](Path(arguments.folder), *map(int, numbers))))
        return
    with tempfile.TemporaryDirectory() as folder:
        count = write(Path(folder) / "rows.jsonl", 5_000 if arguments.quick else 100_000)
        rows = {name: measure(name, folder) for name in ("lists", "mapped-0", "mapped-1")}
        for ranks in (1, 2):
            port = free_port()
            started = [start(f"stream-{rank}-{ranks}-{port}", folder) for rank in range(ranks)]
            rows |= {f"stream, rank {rank} of {ranks}": ended(each) for rank, each in enumerate(started)}
    names = {"lists": "Python lists", "mapped-0": "mapped, first start", "mapped-1": "mapped, next start"}
    for name, row in rows.items():
        per = f"{row['private'] / count:9,.1f} private bytes an example" if "private" in row else ""
        print(f"{names.get(name, name):22} {row['seconds']:7.2f} s  {row['cpu']:7.2f} CPU s  {per}")
    print(json.dumps({"examples": count, **rows}))


def write(path: Path, count: int) -> int:
    """Write examples made of the embedded ones, no two the same."""
    from llmdistill.data.sources import read_examples
    from llmdistill.embedded import locate

    examples = read_examples(locate("embedded:train"))
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            example = examples[number % len(examples)]
            row = {"instruction": f"{number}. {example.instruction}", "input": example.input}
            file.write(json.dumps({**row, "output": example.outputs[0]}) + "\n")
    return count


def measure(row: str, folder: str) -> dict[str, float]:
    """Measure a row in a process of its own."""
    return ended(start(row, folder))


def start(row: str, folder: str) -> subprocess.Popen[str]:
    """Start the process of a row; one thread a rank, as several ranks share a node."""
    command = [sys.executable, __file__, "--row", row, "--folder", folder]
    quiet = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "LLMDISTILL_CACHE": f"{folder}/cache"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **quiet})


def ended(process: subprocess.Popen[str]) -> dict[str, float]:
    """Return what the process of a row says last."""
    said, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{process.args}: exit code {process.returncode}")
    return dict(json.loads(said.splitlines()[-1]))


def free_port() -> int:
    """Return a port for two ranks to meet."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def lists(folder: Path) -> dict[str, float]:
    """Every example as Python lists."""
    from llmdistill.data.instruct import encode
    from llmdistill.data.sources import read_examples

    tokenizer, limits = setting()
    return measured(lambda: encode(read_examples(folder / "rows.jsonl"), tokenizer, limits))


def mapped(folder: Path, again: int) -> dict[str, float]:
    """The tokens on disk; the first start makes them."""
    from llmdistill.data.example_store import open_examples, store_examples

    tokenizer, limits = setting()
    assert (folder / "cache").exists() == bool(again)
    return measured(lambda: open_examples(store_examples(folder / "rows.jsonl", tokenizer, limits)))


def stream(folder: Path, rank: int, size: int, port: int) -> dict[str, float]:
    """One rank's batches of a stream."""
    import torch.distributed as dist

    from llmdistill.data.collate import collate
    from llmdistill.data.sampler import Share
    from llmdistill.data.stream import StreamLoader
    from llmdistill.runtime.exchange import open_exchange

    if size > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    tokenizer, limits = setting()
    share = Share(
        seed=0, global_batch_size=GLOBAL_BATCH, micro_batch_size=GLOBAL_BATCH // size, rank=rank, world_size=size
    )
    data, make_batch = folder / "rows.jsonl", partial(collate, pad_token_id=0)
    loader = StreamLoader(data, tokenizer, limits, share, make_batch, shuffle_buffer=1_000, exchange=open_exchange())
    with data.open(encoding="utf-8") as file:
        steps = sum(1 for _ in file) // GLOBAL_BATCH // STEPS_SHARE
    loader.micro_batches(0)
    found = measured(lambda: loader.micro_batches(steps))
    return {key: found[key] for key in ("seconds", "cpu")}


ROWS: dict[str, Callable[..., dict[str, float]]] = {"lists": lists, "mapped": mapped, "stream": stream}


def setting() -> tuple[Any, Any]:
    """The tokenizer, which has been used once, and the limits."""
    from llmdistill.data.instruct import Limits
    from llmdistill.embedded import locate
    from llmdistill.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(locate("embedded:teacher"))
    tokenizer(["a"])
    return tokenizer, Limits()


def measured(job: Callable[[], object]) -> dict[str, float]:
    """Return the seconds, the CPU seconds and the private bytes that a job's result costs."""
    before, began, cpu = private_bytes(), time.perf_counter(), time.process_time()
    result = job()
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    kept = private_bytes() - before
    del result
    return {"seconds": round(seconds, 3), "cpu": round(used, 3), "private": max(0, kept)}


def private_bytes() -> int:
    """Return the bytes of this process that are no file's; 0 where the system does not tell."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    file = Path("/proc/self/smaps_rollup")
    found = re.search(r"Anonymous:\s+(\d+) kB", file.read_text()) if file.is_file() else None
    return 0 if found is None else int(found[1]) * 1024


if __name__ == "__main__":
    main()
