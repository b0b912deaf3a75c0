"""Everything that reads files which a user or somebody else wrote, with files that it takes.

Hypothesis damages the files in tests/unit/test_properties.py, atheris in scripts/torture/fuzz.py; the only outcome
besides success is one UserError. A new reader belongs here, so that both try it.
"""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import question_files
import torch
from safetensors.torch import save

from llmdistill.artifacts import entries_damage, manifest_damage, read_record
from llmdistill.config import TaskConfig, TrainConfig
from llmdistill.config.command_line import parse_run
from llmdistill.data.corpus import read_segments, text_files
from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.fingerprints import file_entry, fingerprint
from llmdistill.generation.response_file import read_batches
from llmdistill.methods import METHODS
from llmdistill.models.adapters import of_base
from llmdistill.models.configs import load_config
from llmdistill.papers import writing_files
from llmdistill.papers.conll import read_sentences
from llmdistill.papers.xnli import read_xnli
from llmdistill.report.metrics_log import read_metrics_log
from llmdistill.runtime.ds_check import check_ds_config
from llmdistill.runtime.ds_config import SHIPPED, read_ds_config
from llmdistill.runtime.engine import BatchSplit, student_ds_config
from llmdistill.runtime.hosts import read_hosts
from llmdistill.tasks import squad
from llmdistill.tasks.glue import GLUE_TASKS, read_split
from llmdistill.tasks.out_of_domain import read_set, table_rows
from llmdistill.teachers.cache.folder import CacheFolder
from llmdistill.training.callbacks.best import read_best
from llmdistill.training.checkpoints import checkpoints


@dataclass(frozen=True)
class Reader:
    """A function that reads files, and files that it takes."""

    files: Mapping[str, bytes]
    """The content of each file by its path below a folder."""
    read: Callable[[Path], Any]
    """It is given the path of the first file."""

    def write(self, folder: Path, number: int = 0, change: Callable[[bytes], bytes] = bytes) -> Path:
        """Write the files, of which the one of this number (modulo their number) is changed; return the first."""
        for place, (name, content) in enumerate(self.files.items()):
            file = folder / name
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_bytes(change(content) if place == number % len(self.files) else content)
        return folder / next(iter(self.files))


def one(name: str, content: bytes, read: Callable[[Path], Any]) -> Reader:
    """A reader of a single file."""
    return Reader({name: content}, read)


# Contents.

INSTRUCTIONS = [
    {"instruction": "Say é.", "input": "", "output": ["a", "b\u2028c"]},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    {"prompt": "1 + 1 =", "completion": " 2", "score": 1.5},
]


def lines(*values: Any) -> bytes:
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values).encode()


def parquet() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"instruction": ["a", "b"], "output": ["c", "d"]}), file)
    return file.getvalue()


def table(*lines_of_cells: str) -> bytes:
    return "".join(line.replace("|", "\t") + "\n" for line in lines_of_cells).encode()


QUESTIONS = question_files.content(question_files.rows(4, seed=0, unanswerable=False)).encode()
PAIRS = lines({"source": "a b", "target": "a"}, {"source": "c", "target": "d"})
XNLI = table("language|gold_label|sentence1|sentence2", "en|neutral|a|b", "de|entailment|c|d")
MRPC = table("Quality|#1 ID|#2 ID|#1 String|#2 String", "1|7|8|One.|Two.", "0|9|10|One.|Three.")
WEIGHTS = save({"a.weight": torch.zeros(2, 3), "b": torch.ones(1)})
TEACHER = locate("embedded:teacher")
RECIPE = """\
extends: quickstart
train: {steps: 3, betas: [0.9, 0.98]}
data:
  tests: {mine: a.jsonl}
seed: 1
"""
SHARD = save(
    {"ids": torch.arange(3), "offsets.logits": torch.tensor([0, 2, 4, 6]), "logits": torch.zeros(6, 2)},
    {"scaling": "{}"},
)


def entries(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The entries of a manifest for files of this content."""
    return {name: {"bytes": len(each), "sha256": sha256(each).hexdigest()} for name, each in files.items()}


def record(**content: Any) -> bytes:
    return json.dumps(content).encode()


RUN = record(format=3, config={"method": "kd", "train": {"steps": 3}}, world_size=1)
CACHE = record(
    files=entries({"shards/00000.safetensors": SHARD}), held={"logits": "top_k"}, data={"train": "x"}, shards=1
)
CHECKPOINT = record(
    **{"format": 1, "step": 3, "ranks": 1, "state": {"seed": 1}, "parameters": {"a.weight": 6}, "kinds": ["fp32"]},
    files=entries({"rank-0.safetensors": WEIGHTS}),
)


# Readers whose arguments are others than a path.


def corpus(path: Path) -> None:
    list(read_segments(path, text_files(path), "text", True))


def further(path: Path) -> None:
    labels = {"entailment": "1", "not_entailment": "0"}
    own = {"task": "rte", "data": str(path), "sentences": ["a", "b"], "label": "c", "labels": labels}
    read_set("Own", own, GLUE_TASKS["RTE"].classes, 2)


def glue(path: Path) -> None:
    """Read the split of a file such as RTE/train.tsv."""
    split: Any = path.stem.rpartition("_")[2]
    read_split(path.parent.name, split, path.parent.parent)


def asked(path: Path) -> None:
    squad._checked(squad._file_rows(path), str(path), "squad1")


def several(key: str) -> Callable[[Path], Any]:
    return lambda path: writing_files.read_files(key, TaskConfig(dir=str(path.parent)))


def read_recipe(path: Path) -> None:
    parse_run(["--ds_config", "zero2", "--recipe", str(path)], METHODS)


def read_ds(path: Path) -> None:
    settings = TrainConfig(dtype="bf16")
    resolved = student_ds_config(read_ds_config(str(path)), str(path), settings, BatchSplit(64, 1), output_dir="runs")
    check_ds_config(resolved, str(path))


def forged(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Read a manifest after the hashes in it were made to fit, as somebody can do who writes the folder on purpose."""

    def read_forged(path: Path) -> None:
        try:
            content = json.loads(path.read_bytes())
            for name, entry in content["files"].items():
                if (path.parent / name).is_file() and entry.keys() >= {"bytes"}:
                    entry.update(file_entry(path.parent / name))
            path.write_text(json.dumps(content), encoding="utf-8")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
            pass  # not even a record
        read(path)

    return read_forged


def read_checkpoints(path: Path) -> None:
    for each in checkpoints(path.parents[2]):
        if each.damage is None:
            entries_damage(each.folder, each.manifest["files"])


def read_cache(path: Path) -> None:
    cache = CacheFolder(path.parent)
    cache.check_files()
    cache.find_missing([0, 1, 7])
    cache.find([0, 2])
    assert isinstance(cache.scaling, dict)


def read_manifest(path: Path) -> None:
    damage = manifest_damage(path.parent)
    if damage is not None:
        raise UserError(damage)


def read_adapter(path: Path) -> None:
    """Read the config of an adapter, whose base is looked for on the disk only."""
    with mock.patch("llmdistill.models.adapters._download_adapter", return_value=None):
        of_base(path.parent, fingerprint)


MULTINLI = table("premise|hypo|label", "a|b|neutral")
XNLI_FILES = {"xnli.dev.tsv": XNLI, "xnli.test.tsv": XNLI, "multinli.train.en.tsv": MULTINLI}
MLQA_NAMES = ("train-v1.1.json", "dev-context-en-question-en.json", "test-context-en-question-en.json")
MLQA_FILES = dict.fromkeys(MLQA_NAMES, QUESTIONS)
BEST = record(step=3, metric="loss", value=0.5, student="a")
LOG = lines({"step": 1, "loss": 0.5}, {"step": 2})
ANSWERS = record(batch=0, rows={"0": [1, 2], "1": []}) + b"\n"
GOOD_ADAPTER = json.dumps({"base_model_name_or_path": "base", "peft_type": "LORA", "r": 4}).encode()
CONFIG = (TEACHER / "config.json").read_bytes()

READERS: dict[str, Reader] = {
    "jsonl": one("a.jsonl", lines(*INSTRUCTIONS), read_examples),
    "json": one("a.json", json.dumps(INSTRUCTIONS).encode(), read_examples),
    "json with data": one("a.json", json.dumps({"data": INSTRUCTIONS}).encode(), read_examples),
    "csv": one("a.csv", b'instruction,output\n"a, b",c\nd,"e\nf"\n', read_examples),
    "tsv": one("a.tsv", table("instruction|output", "a|b", "c|d"), read_examples),
    "parquet": one("a.parquet", parquet(), read_examples),
    "text": one("a.txt", "one\ntwo é\n\nthree\n".encode(), corpus),
    "rows of text": one("a.jsonl", lines({"text": "one\n\ntwo\u2028"}, {"text": "x"}), corpus),
    "further": one("a.tsv", table("a|b|c", "x|y|1", "z|w|0"), further),
    "table": one("a.txt", table("a|b", "x|y"), lambda path: list(table_rows(str(path)))),
    "RTE": one("RTE/train.tsv", table("index|sentence1|sentence2|label", "0|a|b|entailment"), glue),
    "RTE test": one("RTE/test.tsv", table("index|sentence1|sentence2", "7|a|b", "8|c|d"), glue),
    "STS-B": one("STS-B/dev.tsv", table("index|sentence1|sentence2|score", "0|a|b|3.8"), glue),
    "CoLA": one("CoLA/train.tsv", table("gj04|0|*|They drank.", "gj04|1||It is."), glue),
    "MRPC": one("MRPC/msr_paraphrase_test.txt", MRPC, glue),
    "QNLI": one("QNLI/train.tsv", table("index|question|sentence|label", "0|a|b|entailment"), glue),
    "questions": one("a.json", QUESTIONS, asked),
    "CoNLL": one("a.txt", b"He PRP B-NP\nreckons VBZ B-VP\n. . O\n\nYes UH O\n", read_sentences),
    "hosts": one("hosts", b"node1 slots=8\n# no\nnode2 slots=4\n", read_hosts),
    "config": one("config.json", CONFIG, lambda path: load_config(path.parent)),
    "recipe": one("mine.yaml", RECIPE.encode(), read_recipe),
    "ds_config": one("ds.json", (SHIPPED / "zero2_offload.json").read_bytes(), read_ds),
    "summaries": Reader({"train.jsonl": PAIRS, "dev.jsonl": PAIRS}, several("summarization")),
    "XNLI": Reader(XNLI_FILES, lambda path: read_xnli(TaskConfig(dir=str(path.parent)))),
    "MLQA": Reader(MLQA_FILES, lambda path: squad.read_questions("mlqa", TaskConfig(dir=str(path.parent)))),
    # What a run leaves, and a model's folder.
    "run": one("run.json", RUN, lambda path: read_record(path, remedy="choose another folder")),
    "best": one("best.json", BEST, lambda path: read_best(path.parent)),
    "log": one("metrics.jsonl", LOG, lambda path: read_metrics_log(path.parent)),
    "answers": one("a.jsonl.parts/rank-0.jsonl", ANSWERS, lambda path: read_batches(path.parent)),
    "manifest": Reader(
        {"manifest.json": record(files=entries({"model.safetensors": WEIGHTS})), "model.safetensors": WEIGHTS},
        forged(read_manifest),
    ),
    "checkpoint": Reader(
        {"checkpoints/step-3/manifest.json": CHECKPOINT, "checkpoints/step-3/rank-0.safetensors": WEIGHTS},
        forged(read_checkpoints),
    ),
    "cache": Reader({"cache.json": CACHE, "shards/00000.safetensors": SHARD}, forged(read_cache)),
    "model": Reader(
        {"config.json": CONFIG, "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"},
        lambda path: fingerprint(path.parent),
    ),
    "adapter": one("adapter_config.json", GOOD_ADAPTER, read_adapter),
}
"""By name; a command reads each of these files, whoever made them."""
