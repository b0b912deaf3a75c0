"""``llmdistill evaluate --suite zero_shot`` and the other suites that run models as they are, side by side."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from jsonargparse import ArgumentParser

from llmdistill.config.command_line import build, parse
from llmdistill.config.side_by_side import (
    AttentionConfig,
    ChunksConfig,
    MtebConfig,
    SideBySideConfig,
    SpeedConfig,
    ZeroShotConfig,
)
from llmdistill.files import check_writable
from llmdistill.messages import print_result
from llmdistill.runtime.terminal import exit_code, quiet_transformers


class Entry(NamedTuple):
    """A suite of the command."""

    config: type[SideBySideConfig]
    """Its settings."""
    module: str
    """The module of the package with its SUITE, which is imported after the arguments are parsed, so that
    --help does not wait for torch."""
    description: str


_KEPT = " Finished models are kept, so the same command continues an interrupted one."

SUITES = {
    "zero_shot": Entry(
        ZeroShotConfig,
        "studies.zero_shot",
        "Score decoders on tasks of lm-evaluation-harness without fine-tuning, such as the teacher, the untrained "
        "student and the student of a run side by side." + _KEPT,
    ),
    "mteb": Entry(
        MtebConfig,
        "studies.mteb",
        "Score the embeddings of encoders on tasks of MTEB, such as those of the teacher, the untrained student and "
        "the student of a run side by side. Finished tasks are kept, so the same command continues an interrupted one.",
    ),
    "speed": Entry(
        SpeedConfig,
        "studies.speed",
        "Time the forward pass, and the training step, of models and of shapes of a model side by side: the seconds "
        "for 100 batches of MiniLM Table 4 and the training latency of KroneckerBERT A.1.",
    ),
    "conll2000": Entry(
        ChunksConfig,
        "papers.phrases",
        "Cluster the spans of CoNLL-2000 by the outputs of each layer of encoders, and compare the clusters with the "
        "types of the chunks by normalized mutual information (Jawahar et al. 2019, MiniLM Table 10)." + _KEPT,
    ),
    "attention": Entry(
        AttentionConfig,
        "papers.attention_maps",
        "Draw the attention maps of models side by side, such as those of teacher and student, with the divergence of "
        "each from the first (MiniLM, supplement).",
    ),
}
"""The suites by name."""


def main(suite: str, arguments: Sequence[str] | None = None, *, prog: str = "evaluate") -> int:
    """Run the command and return its exit code. Bad input gives exit code 2 and a one-sentence message on stderr."""
    return exit_code(lambda: compare_models(suite, sys.argv[1:] if arguments is None else arguments, prog=prog))


def compare_models(suite: str, arguments: Sequence[str], *, prog: str) -> None:
    """Run the models according to the arguments and print the result."""
    entry = SUITES[suite]
    parser = ArgumentParser(prog=prog, exit_on_error=False, description=entry.description)
    parser.add_argument("--json", action="store_true", help="Print results.json instead of the table.")
    parser.add_class_arguments(entry.config, None)
    parsed = parse(parser, arguments)
    config = build(parsed, entry.config, prefix="--")
    if config.output_dir is not None:
        check_writable(Path(config.output_dir), "--output_dir")
    quiet_transformers()
    runner = import_module(f"llmdistill.{entry.module}").SUITE
    # With --json, stdout contains only the result.
    with contextlib.redirect_stdout(sys.stderr) if parsed.json else contextlib.nullcontext():
        report = runner.score_models(config, command=f"{prog} {shlex.join(arguments)}")
    if parsed.json:
        print_result({**report.results, "folder": str(report.folder)})
    else:
        report.print()
