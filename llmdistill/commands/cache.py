"""The command that keeps a teacher's outputs for the training set of a run: its arguments and summary.

llmdistill cache [--num_gpus N] --output DIR [--recipe NAME] [--cache.content top_k] [--KEY VALUE ...]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from llmdistill.config.cache import CacheConfig
from llmdistill.config.command_line import build, parse, parse_run, split_words
from llmdistill.files import byte_size
from llmdistill.messages import print_result
from llmdistill.methods import METHODS
from llmdistill.runtime.terminal import quiet_transformers


def build_parser(prog: str) -> ArgumentParser:
    """Return the parser of the command's own arguments."""
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} --output DIR [--num_gpus N] [--recipe NAME] [--cache.KEY VALUE ...] [--KEY VALUE ...]",
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
    """Make a cache according to the arguments, on every rank of the launcher, and print a summary.

    Raises:
        UserError: bad arguments or input.
    """
    began = time.perf_counter()
    own, rest = split_own(arguments)
    parsed = parse(build_parser("llmdistill cache"), own)
    settings = build(parsed.cache, CacheConfig, prefix="--cache.")
    config, _ = parse_run([*rest, "--output_dir", str(parsed.output)], METHODS)
    # Imported below so that --help and errors in the arguments do not wait for torch.
    from llmdistill.run.cache import make_cache
    from llmdistill.run.plan import make_plans
    from llmdistill.runtime.distributed import process_group

    quiet_transformers()
    plan = make_plans(config)[0]
    asked = config.teacher.others.get(settings.teacher, config.teacher)
    with process_group(needed=asked.is_sharded) as world:
        data = plan.task.read_on_all(plan.models, world).prepared(world)
        record = make_cache(plan, data, settings, parsed.output, world)
    if world.is_main:
        summary = summarize(record, parsed.output, time.perf_counter() - began)
        print_result(summary if parsed.json else sentence(summary))


def split_own(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into those of the cache and those of the run."""
    return split_words(arguments, {"help", "output", "json", "cache"})


def summarize(record: dict[str, Any], folder: Path, seconds: float) -> dict[str, Any]:
    """Return the size of a cache and the time of the command."""
    size = sum(entry["bytes"] for entry in record["files"].values())
    return {
        "cache": str(folder),
        "examples": record["examples"],
        "tokens": record["tokens"],
        "bytes": size,
        "bytes_per_token": size / max(1, record["tokens"]),
        "seconds": seconds,
    }


def sentence(summary: dict[str, Any]) -> str:
    """Return the summary for the terminal."""
    return (
        f"{summary['cache']} has the teacher's outputs for {summary['examples']:,} examples of {summary['tokens']:,} "
        f"tokens: {byte_size(summary['bytes'])}, {summary['bytes_per_token']:,.0f} bytes a token, in "
        f"{summary['seconds']:.1f} s. Train with --teacher.cache {summary['cache']}"
    )
