"""The command that generates a teacher's answers to prompts: its arguments, summary and exit code.

llmdistill generate [--num_gpus N] --model DIR --data FILE --output FILE.jsonl
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from llmdistill.config.command_line import build, parse
from llmdistill.config.data import LIMITS
from llmdistill.config.generation import ResponseConfig, add_limits
from llmdistill.messages import print_result
from llmdistill.runtime.terminal import quiet_transformers


def generate(arguments: Sequence[str]) -> None:
    """Generate answers according to the arguments, on every rank of the launcher, and print a summary."""
    parser = ArgumentParser(
        prog="llmdistill generate",
        exit_on_error=False,
        description="Generate a teacher's answers to prompts, for sequence-level distillation: the output can be used "
        "as data.train. After an interruption the same command continues, on any number of ranks.",
    )
    parser.add_argument("--model", type=str, required=True, help="The teacher: folder, hub name or embedded:teacher.")
    text = "Prompts, in any form of data.train; answers in it are ignored."
    parser.add_argument("--data", type=str, required=True, help=text)
    text = "File for the answers; FILE.jsonl.provenance.json beside it records the model and the settings."
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help=text)
    parser.add_argument("--json", action="store_true", help="Print that record as one JSON object.")
    add_limits(parser, long_prompts="error")
    parser.add_class_arguments(ResponseConfig, skip=set(LIMITS))
    parsed = parse(parser, arguments)
    settings = build(parsed, ResponseConfig, prefix="--")
    quiet_transformers()
    # Imported here so that --help does not wait for transformers and DeepSpeed.
    from llmdistill.generation.responses import generate_responses
    from llmdistill.runtime.distributed import process_group

    with process_group(needed=False) as world:
        record = generate_responses(parsed.model, parsed.data, parsed.output, settings)
    if world.is_main:
        print_result(record if parsed.json else summary(record, parsed.output))


def summary(record: dict[str, Any], output: Path) -> str:
    """Return a summary: the number of answers, the teacher, and counts to check before training on the answers."""
    room = record["settings"]["max_length"] - record["settings"]["max_prompt_length"]
    return "\n".join(
        (
            f"{record['prompts']:,} answers of {record['teacher']} ({record['teacher_fingerprint']}) are in {output}: "
            f"{record['generated_tokens']:,} tokens, {record['settings']['decoding']}, engine {record['engine']}.",
            f"{record['unfinished_answers']:,} were cut at {room} tokens before their end, "
            f"{record['empty_answers']:,} are empty; "
            f"{record['dropped']:,} prompts were dropped for their length and {record['truncated']:,} truncated.",
        )
    )
