"""The command that stores a teacher's outputs for the training set of a run: its arguments and summary.

llmdistill cache [--num_gpus N] --output DIR [--recipe NAME] [--cache.content top_k] [--KEY VALUE ...]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from llmdistill.config.command_line import build, parse_own, parse_run
from llmdistill.config.teacher import CacheConfig
from llmdistill.files import byte_size
from llmdistill.messages import print_result
from llmdistill.methods import METHODS
from llmdistill.runtime.terminal import quiet_transformers


def build_parser() -> ArgumentParser:
    """Return the parser of the command's own arguments."""
    parser = ArgumentParser(
        prog="llmdistill cache",
        usage="llmdistill cache --output DIR [--recipe NAME] [--KEY VALUE ...]",
        exit_on_error=False,
        description="Run the teacher of a run once over its training set and keep of its outputs what the method "
        "needs. All settings of a run (llmdistill train --help all) can be given too; --num_gpus and similar flags are "
        "passed to the launcher. The same run with --teacher.cache DIR then trains without the teacher. After an "
        "interruption the same command continues, on any number of ranks.",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="Folder of the cache.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_class_arguments(CacheConfig, "cache")
    return parser


def cache(arguments: Sequence[str]) -> None:
    """Make a cache according to the arguments, on every rank of the launcher, and print a summary."""
    began = time.perf_counter()
    parsed, rest = parse_own(build_parser(), arguments)
    settings = build(parsed.cache, CacheConfig, prefix="--cache.")
    config, _ = parse_run([*rest, "--output_dir", str(parsed.output)], METHODS)
    # Imported below so that --help and errors in the arguments do not wait for torch.
    from llmdistill.runtime.distributed import process_group
    from llmdistill.teachers.cache.making import make_cache
    from llmdistill.training.plan import make_plans
    from llmdistill.training.written_data import with_written_data

    quiet_transformers()
    plan = make_plans(config)[0]  # with assistants the first one's, which alone learns from teacher.model
    teacher = config.teacher.everyone.get(settings.teacher, config.teacher)
    with process_group(needed=teacher.is_sharded) as world:
        written = with_written_data(config)
        if written is not config:
            plan = make_plans(written)[0]
        data = plan.task.read_on_all(plan.models).prepare()
        record = make_cache(plan, data, settings, parsed.output)
    if world.is_main:
        size, tokens = sum(entry["bytes"] for entry in record["files"].values()), record["tokens"]
        summary = {
            "cache": str(parsed.output),
            "examples": record["examples"],
            "tokens": tokens,
            "bytes": size,
            "bytes_per_token": size / max(1, tokens),
            "seconds": time.perf_counter() - began,
        }
        sentence = (
            f"{parsed.output} has the teacher's outputs for {record['examples']:,} examples of {tokens:,} tokens: "
            f"{byte_size(size)}, {summary['bytes_per_token']:,.0f} bytes a token, in {summary['seconds']:.1f} s. "
            f"Train with --teacher.cache {parsed.output}"
        )
        print_result(summary if parsed.json else sentence)
