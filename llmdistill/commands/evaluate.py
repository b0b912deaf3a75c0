"""The command that scores a model on instruction sets and texts: its arguments, tables and exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from llmdistill.config.command_line import build, parse
from llmdistill.config.generation import GenerationConfig, add_limits
from llmdistill.data.sources import kind_of
from llmdistill.data.whole_text import WholeText
from llmdistill.errors import UserError
from llmdistill.files import check_writable, file_name
from llmdistill.messages import print_result, say
from llmdistill.runtime.signals import begin_anew
from llmdistill.runtime.terminal import exit_code, quiet_transformers
from llmdistill.tasks.instruction_sets import SETS, TEXTS, suite_sets


def build_parser(prog: str) -> ArgumentParser:
    """Return the parser; the settings of generation and their defaults come from GenerationConfig."""
    parser = ArgumentParser(
        prog=prog,
        exit_on_error=False,
        description="Score a causal LM: ROUGE-L of its answers, greedy or as in MiniLLM, and perplexity on texts.",
    )
    text = "Folder, hub name or GGUF file of the model, or embedded:teacher."
    parser.add_argument("--model", type=str, required=True, help=text)
    text = "Sets of instruction, input, output: JSONL, JSON, Parquet, CSV or TSV files, hub names, or embedded:NAME; "
    text += "and texts (.txt, or rows of text), whose perplexity is measured."
    parser.add_argument("--data", type=str, nargs="+", default=[], metavar="FILE", help=text)
    text = "What --data holds; default: text for a .txt and for rows of text, else instructions."
    parser.add_argument("--kind", "--data.kind", type=Literal["instructions", "text"], help=text)
    text = f"Test sets by name, separated by commas: {', '.join([*SETS, *TEXTS])} (wikitext2 is WikiText-2's test "
    text += "text, its lines joined as in the papers on SVD). Or one suite with settings of its own, which --help "
    text += "lists after its name: glue fine-tunes the model, zero_shot scores decoders on tasks of "
    text += "lm-evaluation-harness, mteb the embeddings of encoders on tasks of MTEB, speed times models, conll2000 "
    text += "scores the layers of encoders on phrases, and attention draws attention maps. (The suites of "
    text += "llmdistill compare are tables of papers.)"
    parser.add_argument("--suite", type=str, metavar="A,B", help=text)
    text = "Folder of the suite's NAME.jsonl files, and of wikitext2's test.txt; default: the hub."
    parser.add_argument("--data_dir", type=Path, metavar="DIR", help=text)
    text = "Folder for metrics.json and the predictions (JSONL); default: runs/evaluate/MODEL-DECODING."
    parser.add_argument("--output", type=Path, help=text)
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of the table.")
    text = "Number format; auto: bf16 on a GPU."
    parser.add_argument("--dtype", type=Literal["auto", "fp32", "bf16"], default="auto", help=text)
    add_limits(parser, long_prompts=None, hint="; default: error, or with --suite drop, as in MiniLLM")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher passes it to every rank
    parser.add_class_arguments(GenerationConfig, skip={"models"})  # a run has three of them
    return parser


def main(arguments: Sequence[str] | None = None, *, prog: str = "evaluate") -> int:
    """Run the command and return its exit code. Bad input gives exit code 2 and a one-sentence message on stderr."""
    return exit_code(lambda: score_answers(sys.argv[1:] if arguments is None else arguments, prog=prog))


def score_answers(arguments: Sequence[str], *, prog: str) -> None:
    """Score a model according to the arguments, on every rank of the launcher, and print the result."""
    parsed = parse_scoring(arguments, prog)
    quiet_transformers()
    # Imported here so that --help does not wait for torch and transformers.
    from llmdistill.data.instruct import Limits
    from llmdistill.runtime.devices import TORCH_DTYPES, choose_dtype
    from llmdistill.runtime.distributed import process_group
    from llmdistill.tasks.instruction_scores import read_sets, score_model

    settings = build(parsed, GenerationConfig, prefix="--")
    data = chosen_sets(parsed)
    if all(isinstance(each, WholeText) for each in data.values()):
        begin_anew()  # only answers are kept before the end
    limits = Limits(
        max_prompt_length=parsed.max_prompt_length,
        max_length=parsed.max_length,
        long_prompts=parsed.long_prompts or ("error" if parsed.suite is None else "drop"),
    )
    output = default_output(parsed.model, parsed.decoding) if parsed.output is None else parsed.output
    check_writable(output, "--output")
    # One rank needs no process group; only a launcher with several ranks starts one.
    with process_group(needed=False) as world:
        result = score_model(
            read_sets(parsed.model, data, settings, limits, parsed.prompt),
            dtype=TORCH_DTYPES[choose_dtype(parsed.dtype, world.device)],
            output_dir=output,
            log=partial(say, aside=True),
        )
    if not world.is_main:
        return
    if parsed.json:
        print_result(result)
    else:
        print_scores(result)


def parse_scoring(arguments: Sequence[str], prog: str = "evaluate") -> Any:
    """Return the values of the arguments; MiniLLM's sets are sampled by default, as their published figures were."""
    parser = build_parser(prog)
    parsed = parse(parser, arguments)
    if any(name.strip() in SETS for name in (parsed.suite or "").split(",")):
        parser.set_defaults(decoding="sample")
        parsed = parse(parser, arguments)
    return parsed


def chosen_sets(parsed: Any) -> dict[str, str | WholeText]:
    """Return {name: reference of instructions, or text} of the sets in --suite and --data.

    The name of a set of --data is its file's name without the extension. Raises UserError if there is no set, or two
    sets have the same name.
    """
    suite = {} if parsed.suite is None else suite_sets(parsed.suite, parsed.data_dir)
    files: dict[str, str] = {}
    for path in parsed.data:
        name = path.removeprefix("embedded:") if path.startswith("embedded:") else Path(path).stem
        if name in files:
            raise UserError(f"--data: {files[name]} and {path} would both be called {name}; rename one of the files")
        files[name] = path
    if not suite and not files:
        raise UserError("--data is missing: name a file, or sets with --suite dolly,self_inst,vicuna")
    repeated = sorted(suite.keys() & files.keys())
    if repeated:
        raise UserError(f"--data and --suite both have a set called {repeated[0]}; leave one out or rename the file")
    kinds = {name: parsed.kind or kind_of(path) for name, path in files.items()}
    return {**suite, **{name: WholeText(path) if kinds[name] == "text" else path for name, path in files.items()}}


def default_output(model: str, decoding: str) -> Path:
    """Return the default folder of the predictions, which no other model or decoding shares."""
    return Path("runs") / "evaluate" / f"{file_name(model)}-{decoding}"


def print_scores(result: dict[str, Any]) -> None:
    """Print the scores of score_model, one row per set."""
    from llmdistill.report.tables import print_table
    from llmdistill.tasks.perplexity import show_perplexity
    from llmdistill.tasks.words import describe_words

    title = f"{result['model']}: {result['params']:,} parameters, {result['decoding']}, {result['dtype']}"
    title += f", {result['origin']}" if "origin" in result else ""
    words = {name: score["rouge_words"] for name, score in result["sets"].items()}
    title += f"; ROUGE-L is {describe_words(words)}" if "unicode" in words.values() else ""
    header = ["set", "examples", "ROUGE-L", "± std", "perplexity", "tokens/s", "dropped", "truncated"]
    rows = [
        [
            name,
            str(score["examples"]),
            f"{score['rougeL']:.2f}",
            f"{score['std']:.2f}" if len(score["per_seed"]) > 1 else "–",
            show_perplexity(score.get("perplexity")),
            f"{score['tokens_per_second']:.0f}",
            str(score["dropped"]),
            str(score["truncated"]),
        ]
        for name, score in result["sets"].items()
    ]
    if rows:
        print_table(title, header, rows)
    title = f"{result['model']}: {result['params']:,} parameters, {result['dtype']}"
    begin = next((score["begin"] for score in result["texts"].values()), "")
    title += f"; each window begins with {begin}" if begin else ""
    header = ["text", "perplexity", "loss, nats/token", "tokens scored", "windows", "tokens of a window", "stride"]
    rows = [
        [
            name,
            show_perplexity(score["perplexity"]),
            f"{score['loss']:.4f}",
            f"{score['tokens']:,}",
            f"{score['windows']:,} of {score['total']:,}",
            f"{score['window']:,}",
            f"{score['stride']:,}",
        ]
        for name, score in result["texts"].items()
    ]
    if rows:
        print_table(title, header, rows)
