"""The command by which a model writes training data: its arguments, summary and exit code.

llmdistill write [--num_gpus N] --model DIR --output FILE.jsonl [--rows N]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from llmdistill.config.command_line import build, parse
from llmdistill.config.generation import WriteConfig
from llmdistill.messages import print_result
from llmdistill.runtime.terminal import quiet_transformers


def write(arguments: Sequence[str]) -> None:
    """Write rows according to the arguments, on every rank of the launcher, and print a summary."""
    parser = ArgumentParser(
        prog="llmdistill write",
        exit_on_error=False,
        description="Let a model write training data from nothing: an instruct model chats, a base model texts. The "
        "output can be used as data.train; a run with --data.train teacher writes it itself. After an interruption the "
        "same command continues, on any number of ranks.",
    )
    parser.add_argument("--model", type=str, required=True, help="The model: folder, hub name or GGUF file.")
    text = (
        "File for the rows; FILE.jsonl.provenance.json beside it records the model, the settings and what was dropped."
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help=text)
    text = "instructions: chats; text: texts; auto: chats if the tokenizer has a chat template, else texts."
    parser.add_argument("--kind", type=Literal["auto", "instructions", "text"], default="auto", help=text)
    parser.add_argument("--json", action="store_true", help="Print that record as one JSON object.")
    parser.add_class_arguments(WriteConfig)
    parsed = parse(parser, arguments)
    settings = build(parsed, WriteConfig, prefix="--")
    quiet_transformers()
    # Imported here so that --help does not wait for transformers and DeepSpeed.
    from llmdistill.generation.self_written import write_data
    from llmdistill.runtime.distributed import process_group

    with process_group(needed=False) as world:
        record = write_data(parsed.model, parsed.output, settings, kind=parsed.kind)
    if world.is_main:
        print_result(record if parsed.json else summary(record, parsed.output))


def summary(record: dict[str, Any], output: Path) -> str:
    """Return what was written, and what was dropped and why."""
    what, kind = ("chats", "") if record["kind"] == "instructions" else ("texts", " --data.kind text")
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in record["dropped"].items()) or "none"
    return (
        f"{record['rows']:,} {what} of {record['tokens']:,} tokens, written by {record['teacher']}, are in {output}.\n"
        f"Of {record['sampled_rows']:,} that were sampled these were dropped: {dropped}.\n"
        f"Train on them with --data.train {output}{kind}"
    )
