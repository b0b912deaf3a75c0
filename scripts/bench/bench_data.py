"""Loading training sets: what each rank keeps in memory, how long a start takes, and who tokenizes a stream.

    python scripts/bench/bench_data.py                      # 100,000 instructions, some minutes
    python scripts/bench/bench_data.py --quick              # 5,000 instructions
    python scripts/bench/bench_data.py --data pairs         # a task on pairs of sentences, like MNLI
    python scripts/bench/bench_data.py --data questions     # a task like SQuAD

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
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

GLOBAL_BATCH = 256
STEPS_SHARE = 4
"""The stream goes through one part of this many of the set."""


def main() -> None:
    """Measure the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 examples")
    parser.add_argument(
        "--data", choices=["instructions", *TASK_KINDS], default="instructions", help="kind of examples"
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row is not None:
        kind, *numbers = arguments.row.split("-")
        print(json.dumps(ROWS[kind](Path(arguments.folder), *map(int, numbers))))
        return
    with tempfile.TemporaryDirectory() as folder:
        count = 5_000 if arguments.quick else 100_000
        (write if arguments.data == "instructions" else write_tasks)(Path(folder), count)
        kind = "" if arguments.data == "instructions" else f"{arguments.data}_"
        names = {f"{kind}{row}": title for row, title in TITLES.items()}
        rows = {name: measure(name, folder) for name in names}
        for ranks in (1, 2) if arguments.data == "instructions" else ():
            port = free_port()
            started = [start(f"stream-{rank}-{ranks}-{port}", folder) for rank in range(ranks)]
            rows |= {f"stream, rank {rank} of {ranks}": ended(each) for rank, each in enumerate(started)}
    for name, row in rows.items():
        per = f"{row['private'] / count:9,.1f} private bytes an example" if "private" in row else ""
        print(f"{names.get(name, name):22} {row['seconds']:7.2f} s  {row['cpu']:7.2f} CPU s  {per}")
    print(json.dumps({"examples": count, **rows}))


def write(folder: Path, count: int) -> None:
    """Write examples made of the embedded ones, no two the same."""
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number, example in enumerate(embedded(count)):
            row = {"instruction": f"{number}. {example.instruction}", "input": example.input}
            file.write(json.dumps({**row, "output": example.outputs[0]}) + "\n")


def embedded(count: int) -> Iterator[Any]:
    """Yield embedded examples, from the first one again after the last."""
    from llmdistill.data.sources import read_examples
    from llmdistill.embedded import locate

    return islice(cycle(read_examples(locate("embedded:train"))), count)


def write_tasks(folder: Path, count: int) -> None:
    """Write pairs of sentences and questions, no two the same, and small dev sets."""
    (folder / "RTE").mkdir()
    (folder / "squad1").mkdir()
    for split, size in (("train", count), ("dev", 100)):
        paragraphs = []
        with (folder / "RTE" / f"{split}.tsv").open("w", encoding="utf-8") as file:
            file.write("sentence1\tsentence2\tlabel\n")
            for number, example in enumerate(embedded(size)):
                first, second = (" ".join(text.split()) for text in (example.instruction, example.outputs[0]))
                file.write(f"{number}. {first}\t{second}\tentailment\n")
                answer = {"text": str(number), "answer_start": 0}
                asked = {"id": f"{split}-{number}", "question": first, "answers": [answer]}
                paragraphs.append({"context": f"{number}. " + f"{first} {second} " * 5, "qas": [asked]})
        articles = {"data": [{"paragraphs": paragraphs}]}
        (folder / "squad1" / f"{split}-v1.1.json").write_text(json.dumps(articles), encoding="utf-8")


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


def task_of(kind: str, folder: Path) -> tuple[Any, Any]:
    """A task of a kind, and the models that read it."""
    from transformers import BertConfig

    from llmdistill.config import DataConfig, RunConfig, TaskConfig
    from llmdistill.embedded import locate
    from llmdistill.objective import Objective
    from llmdistill.tasks import make_task
    from llmdistill.tasks.base import Models

    config, path, (name, length) = BertConfig(), locate("embedded:teacher"), TASK_KINDS[kind]
    data = DataConfig(kind="task", max_length=length, task=TaskConfig(name=name, dir=str(folder)))
    models = Models(
        teacher=config, student=config, teacher_path=path, tokenizer_path=path, causal=False, objective=Objective()
    )
    return make_task(RunConfig(ds_config="", data=data)), models


def task_lists(kind: str, folder: Path) -> dict[str, float]:
    """Text and tokens of every training example as Python objects."""
    from llmdistill.data.pairs import encode_pairs
    from llmdistill.data.windows import WindowLimits, encode_windows

    (task, _), (tokenizer, _) = task_of(kind, folder), setting()

    def read() -> object:
        files, length = task.read_files(), TASK_KINDS[kind][1]
        if kind == "pairs":
            return files, encode_pairs(files.train, tokenizer, length)
        return files, encode_windows(files.train, tokenizer, WindowLimits(length, 128, 64), learned=True)

    return measured(read)


def task_mapped(kind: str, folder: Path, again: int) -> dict[str, float]:
    """The tokens on disk; the first start makes them."""
    (task, models), _ = task_of(kind, folder), setting()
    assert (folder / "cache").exists() == bool(again)
    return measured(lambda: task.read(models))


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


TASK_KINDS = {"pairs": ("rte", 128), "questions": ("squad1", 384)}
"""A task of each kind of data, and its largest number of tokens."""
TITLES = {"lists": "Python lists", "mapped-0": "mapped, first start", "mapped-1": "mapped, next start"}
ROWS: dict[str, Callable[..., dict[str, float]]] = {
    **{"lists": lists, "mapped": mapped, "stream": stream},
    **{f"{kind}_lists": partial(task_lists, kind) for kind in TASK_KINDS},
    **{f"{kind}_mapped": partial(task_mapped, kind) for kind in TASK_KINDS},
}


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
