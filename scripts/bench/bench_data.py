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

import ctypes
import gc
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benching import Work, bench_parser, facts_of, measure, parse, run
from benching_table import Line, Table
from transformers import BertConfig

from llmdistill.config import DataConfig, RunConfig, TaskConfig
from llmdistill.data.collate import collate
from llmdistill.data.example_store import open_examples, store_examples
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.pairs import encode_pairs
from llmdistill.data.sampler import Share
from llmdistill.data.sources import read_examples
from llmdistill.data.stream import StreamLoader
from llmdistill.data.windows import WindowLimits, encode_windows
from llmdistill.embedded import locate
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Objective
from llmdistill.runtime.exchange import open_exchange
from llmdistill.runtime.launch import free_port
from llmdistill.tasks import make_task
from llmdistill.tasks.base import Models

GLOBAL_BATCH = 256
STEPS_SHARE = 4
"""The stream goes through one part of this many of the set."""
TASK_KINDS = {"pairs": ("rte", 128), "questions": ("squad1", 384)}
"""A task of each kind of data, and its largest number of tokens."""
TITLES = {"lists": "Python lists", "mapped-0": "mapped, first start", "mapped-1": "mapped, next start"}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--data", choices=["instructions", *TASK_KINDS], default="instructions")
    settings, arguments = parse(parser, build)
    settings = replace(settings, threads=1)  # one thread a rank, as several ranks share a node
    table = Table(settings)
    count, kind = 5_000 if arguments.quick else 100_000, arguments.data
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TOKENIZERS_PARALLELISM": "false", "LLMDISTILL_CACHE": f"{folder}/cache"}
        (write if kind == "instructions" else write_tasks)(Path(folder), count)
        row = {"data": kind, "folder": folder}
        rows = {title: facts_of(__file__, {**row, "way": way}, settings) for way, title in TITLES.items()}
        for ranks in (1, 2) if kind == "instructions" else ():
            port = free_port()
            streams = {
                f"stream, rank {rank} of {ranks}": {**row, "way": "stream", "rank": rank, "size": ranks, "port": port}
                for rank in range(ranks)
            }
            found = measure(__file__, streams, settings, times=False, memory=False)
            rows |= {name: each.facts for name, each in found.items()}
    for name, each in rows.items():
        per = f", {each['private'] / count:,.1f} private bytes an example" if "private" in each else ""
        table.add(Line(f"{name}: CPU seconds", each["cpu"], None, f"{each['seconds']:.2f} s by the clock{per}", " s"))
    table.finish()


def build(row: dict[str, Any], _device: torch.device) -> Work:
    """One row: {"data": a kind, "way": lists, mapped-0 (the first start, which makes it), mapped-1 or stream, ...}."""
    folder = Path(row["folder"])
    if row["way"] == "stream":
        return Work(None, stream(folder, row["rank"], row["size"], row["port"]))
    read = read_instructions if row["data"] == "instructions" else partial(read_task, row["data"])
    return Work(None, measured(read(folder, as_lists=row["way"] == "lists")))


def write(folder: Path, count: int) -> None:
    """Write examples made of the embedded ones, no two the same."""
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number, example in enumerate(embedded(count)):
            row = {"instruction": f"{number}. {example.instruction}", "input": example.input}
            file.write(json.dumps({**row, "output": example.outputs[0]}) + "\n")


def embedded(count: int) -> Iterator[Any]:
    """Yield embedded examples, from the first one again after the last."""
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


def read_instructions(folder: Path, *, as_lists: bool) -> Callable[[], object]:
    """Read every example as Python lists, or as the tokens on disk, which the first start makes."""
    (tokenizer, limits), rows = setting(), folder / "rows.jsonl"
    if as_lists:
        return lambda: encode(read_examples(rows), tokenizer, limits)
    return lambda: open_examples(store_examples(rows, tokenizer, limits))


def read_task(kind: str, folder: Path, *, as_lists: bool) -> Callable[[], object]:
    """Read text and tokens of a task's training examples as Python objects, or as the tokens on disk."""
    (tokenizer, _), config, path = setting(), BertConfig(), locate("embedded:teacher")
    name, length = TASK_KINDS[kind]
    data = DataConfig(kind="task", max_length=length, task=TaskConfig(name=name, dir=str(folder)))
    task: Any = make_task(RunConfig(ds_config="", data=data))
    models = Models(
        teacher=config, student=config, teacher_path=path, tokenizer_path=path, causal=False, objective=Objective()
    )

    def read() -> object:
        files = task.read_files()
        if kind == "pairs":
            return files, encode_pairs(files.train, tokenizer, length)
        return files, encode_windows(files.train, tokenizer, WindowLimits(length, 128, 64), learned=True)

    return read if as_lists else lambda: task.read(models)


def stream(folder: Path, rank: int, size: int, port: int) -> dict[str, float]:
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


def setting() -> tuple[Any, Any]:
    """The tokenizer, which has been used once, and the limits."""
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
    file = Path("/proc/self/smaps_rollup")
    if not file.is_file():
        return 0
    ctypes.CDLL(None).malloc_trim(0)
    return 1024 * int(re.findall(r"Anonymous:\s+(\d+) kB", file.read_text())[0])


if __name__ == "__main__":
    run(main)
