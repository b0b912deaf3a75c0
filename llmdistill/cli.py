"""The ``llmdistill`` command and its subcommands, which COMMANDS lists."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

import llmdistill
from llmdistill.config import DataConfig, FactorizeConfig
from llmdistill.config.command_line import TYPED, build, parse
from llmdistill.config.data import LIMITS
from llmdistill.config.strict import did_you_mean
from llmdistill.config.student import CalibrationConfig, FactorizeMethod, QuantizeConfig
from llmdistill.data.references import TEACHER
from llmdistill.embedded import locate
from llmdistill.errors import CannotWrite, UserError
from llmdistill.files import check_new
from llmdistill.messages import fold, print_result, say
from llmdistill.runtime.hosts import check_hosts
from llmdistill.runtime.launch import (
    DEFAULT_PORT,
    free_port,
    has_gpu_device,
    is_busy,
    local_ranks,
    run_ranks,
    split_launcher_flags,
)
from llmdistill.runtime.signals import begin_anew
from llmdistill.runtime.terminal import exit_code, quiet_transformers, warn_main
from llmdistill.tasks.instruction_sets import suite_sets


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:10}{text}" for name, (text, _) in COMMANDS.items())
        print_result(f"usage: llmdistill COMMAND [--help | arguments]\n       llmdistill --version\n\n{lines}")
        return 0
    if words[0] == "--version":
        print_result(f"llmdistill {llmdistill.__version__}")
        return 0
    if words[0] not in COMMANDS:
        hint = did_you_mean(words[0], COMMANDS)
        print(f"error: there is no command {words[0]!r}; there are {', '.join(COMMANDS)}{hint}", file=sys.stderr)
        return 2
    return exit_code(lambda: COMMANDS[words[0]][1](words[1:]))


def train(arguments: Sequence[str]) -> None:
    """Train in the ranks that the launcher's flags ask for, or as one of them if there is a launcher."""
    launcher, words = split_launcher_flags(arguments)
    if "LOCAL_RANK" not in os.environ and not any(word in ("-h", "--help", "--dry_run") for word in words):
        os.environ[TYPED] = "llmdistill train"  # for the ranks, whose reports name the command
        try:
            launch(launcher, "llmdistill.train", *words)
        finally:
            os.environ.pop(TYPED, None)
    from llmdistill.train import run

    run(arguments if "--dry_run" in words else words)


def launch(flags: Sequence[str], module: str, *arguments: str) -> None:
    """Run a module of the package in several ranks, and end this process as they end; return where one is enough.

    The deepspeed launcher replaces this process where the flags name nodes or single GPUs.

    Raises UserError if the deepspeed launcher is not installed, or its hosts do not answer.
    """
    if not has_gpu_device():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else each of its processes warns that it finds none
    count = local_ranks(flags)
    if count == 1:
        return
    if count is not None:
        # -u, so that the lines of the ranks are shown as they are printed.
        run_ranks([sys.executable, "-u", "-m", module, *arguments], count)
    if shutil.which("deepspeed") is None:
        raise UserError("the deepspeed launcher is not on the path: activate the environment it is installed in")
    check_hosts(flags)
    given = {flag.split("=")[0] for flag in flags}
    # Nodes that are started one by one could not agree on another port.
    if not given & {"--master_port", "--no_ssh", "--node_rank"} and is_busy(DEFAULT_PORT):
        flags = [*flags, "--master_port", str(free_port())]
    if "--log_level" not in given:
        flags = [*flags, "--log_level", "critical"]  # its other lines say what the run says too
    # Without --no_local_rank the launcher would insert --local_rank before the name of the command.
    os.execvp("deepspeed", ["deepspeed", *flags, "--no_local_rank", "--module", module, *arguments])


def compress(arguments: Sequence[str]) -> None:
    """Factorize a model folder into a new folder, or with --dry_run report the resulting sizes."""
    parser = ArgumentParser(
        prog="llmdistill compress",
        exit_on_error=False,
        description="Factorize a model: replace every linear of its layers by a product of two smaller ones, low-rank "
        "or Kronecker. --dry_run reads only config.json, except that --method kronecker with --target_params also "
        "reads the weights.",
    )
    parser.add_argument("--model", type=str, required=True, help="Model folder, hub name or GGUF file.")
    parser.add_argument("--output", type=str, help="New folder for the student; required without --dry_run.")
    parser.add_argument("--method", type=FactorizeMethod, default="svd", help="Kind of factorization.")
    text = "With --method kronecker and --target_params: also print the best combinations of shapes, which are "
    text += "those of the first factor; for a matrix with fewer outputs than inputs, transposed."
    parser.add_argument("--candidates", action="store_true", help=text)
    parser.add_argument("--dry_run", action="store_true", help="Only print the sizes.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_class_arguments(FactorizeConfig, None)
    parser.add_class_arguments(DataConfig, "data", skip={setting.name for setting in fields(DataConfig)} - set(LIMITS))
    parsed = parse(parser, arguments)
    if not parsed.dry_run:
        if parsed.output is None:
            raise UserError("--output is missing: name the student's folder, or add --dry_run")
        check_new(Path(parsed.output))  # before torch is loaded
    given, unchanged = build(parsed, FactorizeConfig, prefix="--"), asdict(DataConfig())
    limits = {key: value for key, value in parsed.data.as_dict().items() if value != unchanged[key]}
    from llmdistill.data.sources import kind_of
    from llmdistill.generation.self_written import choose_kind
    from llmdistill.models.configs import load_config
    from llmdistill.students.counting import build_reference, count_parameters  # after --help, as it loads torch
    from llmdistill.students.reconstruction import by_kind
    from llmdistill.students.sizes import chosen_ranks, describe_params, describe_ranks
    from llmdistill.students.speed import describe_speed
    from llmdistill.tasks.distance import Distance
    from llmdistill.training.defaults import LEAST_EXAMPLES, settle_compress, starts_by_data
    from llmdistill.training.written_data import calibration_file

    quiet_transformers()
    config, length = load_config(locate(parsed.model)), limits.get("max_length", unchanged["max_length"])

    def settle(given: FactorizeConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        has_data = given.calibration.data is not None
        settings = asdict(settle_compress(given, parsed.method, config, has_data=has_data, max_length=length))
        return settings, llmdistill.sizes(parsed.model, method=parsed.method, **settings)

    writes = given.calibration.data is None and starts_by_data(given, parsed.method, config)
    if writes:
        # Few, since each takes the model seconds to write.
        examples = given.calibration.examples or LEAST_EXAMPLES
        own = replace(given.calibration, data=TEACHER, examples=examples)
        settings, result = settle(replace(given, calibration=own))  # says what does not fit before anything is written
        if not parsed.dry_run:
            try:
                data = calibration_file(parsed.model, CalibrationConfig(**settings["calibration"]))
                settings["calibration"]["data"] = data
            except CannotWrite as error:
                if given.weighting is not None:
                    raise
                say(f"Note        {error}; without calibration data the student starts by the plain SVD", aside=True)
                writes = False
                settings, result = settle(given)
    else:
        settings, result = settle(given)
    candidates = result.pop("candidates", None)
    if parsed.candidates and candidates is None:
        raise UserError("--candidates tells what a search found: add --method kronecker and --target_params")
    if not parsed.dry_run:
        if settings["calibration"]["folder"] is None:  # which keeps the statistics
            begin_anew()
        # A search finds shapes by the unweighted error; the products may still be weighted.
        weighting = {key: settings[key] for key in ("weighting", "calibration")}
        chosen = {**weighting, **result["settings"]} if "settings" in result else settings
        squares: dict[str, tuple[float, float]] = {}
        distance: list[Distance] = []
        llmdistill.compress(
            parsed.model,
            method=parsed.method,
            output=parsed.output,
            lost=squares,
            distance=distance,
            **chosen,
            **limits,
        )
        made = load_config(parsed.output)  # the data may have decided the ranks
        reference = build_reference(made)
        params = count_parameters(reference)
        result |= {"student_params": params, "ratio": params / result["teacher_params"]}
        if isinstance(result.get("ranks"), str):
            result |= chosen_ranks(reference)
        if parsed.json:
            result |= {"lost": by_kind(squares), "distance": asdict(distance[0]) if distance else None}
        slower = describe_speed(made)
        if slower is not None:
            result["speed"] = slower
    if parsed.candidates and parsed.json:
        result["candidates"] = candidates
    elif parsed.candidates:
        from llmdistill.students.search import as_table

        print_result(as_table(candidates, result["teacher_params"]) + "\n")
    shown = (
        *("teacher_params", "student_params", "ratio", "rank"),
        *("flops_per_token", "teacher_flops_per_token", "settings"),
    )
    if not parsed.json and result.get("rank", 0) is None:
        result["rank"] = describe_ranks(result)
    if parsed.dry_run and not parsed.json:
        result["student_params"] = describe_params(result)
    _show(result, parsed.json, [key for key in shown if key in result])
    if not parsed.json and "speed" in result:
        print_result(fold(f"In transformers, on this machine, {result['speed']}."))
    if not parsed.dry_run:
        calibrated, kind = settings["calibration"]["data"], None
        is_written = writes or calibrated == TEACHER
        if is_written:
            kind = choose_kind(parsed.model, "auto")
        elif calibrated is not None:
            kind = kind_of(calibrated)
        of = "rows that the model wrote" if is_written else calibrated or "texts that the model samples"
        for measured in distance:
            if measured.is_hopeless:
                remedy = "give it more parameters (--target_params)"
                if settings["weighting"] == "none" and parsed.method == "svd":
                    remedy = "the plain SVD of the weights ruins most models, so name --calibration.data FILE"
                warn_main(f"the student {measured.sentence(of)}; {remedy}, or expect to train it almost from nothing")
            elif not parsed.json:
                print_result(fold(f"It {measured.sentence(of)}."))
        if parsed.json:
            return
        words = ["--teacher.model", parsed.model, "--student.model", parsed.output]
        # The rows of the calibration are data that the model reads, in these limits.
        words += ["--data.train", TEACHER if is_written else calibrated or "FILE"]
        words += ["--data.kind", "text"] if kind == "text" else []
        words += [word for key, value in limits.items() for word in (f"--data.{key}", str(value))]
        print_result(fold(f"The untrained student is in {parsed.output}. Train it:"))
        print_result(shlex.join(["llmdistill", "train", *words]))


def export(arguments: Sequence[str]) -> None:
    """Write a student as a stock Hugging Face model or as ONNX, which both need no llmdistill, or with few bits."""
    parser = ArgumentParser(
        prog="llmdistill export",
        exit_on_error=False,
        description="Write a student for programs that need no llmdistill, or with weights of few bits, and compare "
        "its answers with the student's.",
    )
    text = "onnx: keeps the factors, and measures size and speed beside the dense model; also for stock models. "
    text += "dense: multiplies the factors out, to a stock Hugging Face model of the teacher's size and speed. "
    text += "gguf: a file for llama.cpp and Ollama, with the factors multiplied out. int8, int4: torchao rounds the "
    text += "linears of the layers, factors too. Packages with forms of their own (llmdistill.forms) add other "
    text += "names."
    parser.add_argument("--to", type=str, required=True, help=text)
    parser.add_argument("--int8", action="store_true", help="With --to onnx: also a file with int8 matrices.")
    parser.add_class_arguments(QuantizeConfig, None, skip={"weights", "packed"})
    parser.add_argument("--packed", action="store_true", help="With --to int4: two weights in a byte, for llmdistill.")
    text = "With --to gguf: f32, f16, bf16 or q8_0; default: the type of the student's weights."
    parser.add_argument("--weights", type=str, help=text)
    text = "With --to gguf: the teacher's GGUF file, from which tokenizer and chat template are copied; default: the "
    text += "student's."
    parser.add_argument("--tokenizer_file", type=str, metavar="FILE", help=text)
    text = "With --to a form of another package: its settings, such as --settings.share 0.5."
    parser.add_argument("--settings", type=dict[str, Any], default={}, help=text)
    parser.add_argument("--model", type=str, required=True, help="Student folder, such as runs/quickstart/student.")
    parser.add_argument("--output", type=str, required=True, help="New folder.")
    text = "Rows on which both models are compared: instructions, a text, or sentences for encoders; of at most 48 "
    text += "rows the first 128 tokens are read. Default: rows of llmdistill itself (embedded:seen)."
    parser.add_argument("--data", type=str, metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parsed = parse(parser, arguments)
    check_new(Path(parsed.output))  # before torch is loaded
    begin_anew()
    quiet_transformers()
    named = ("group_size", "packed", "weights", "tokenizer_file")
    bits = {name: getattr(parsed, name) for name in named}
    bits["packed"] = parsed.packed or None  # a flag that is not given is no setting
    bits["embeddings"] = "exact" if parsed.embeddings == "exact" else None
    settings = {**{name: value for name, value in bits.items() if value is not None}, **parsed.settings}
    result = llmdistill.export(
        parsed.model, parsed.output, to=parsed.to, int8=parsed.int8, data=parsed.data, **settings
    )
    compared = {key: value for key, value in result.items() if key.endswith("comparison")}
    _show(result, parsed.json, [key for key in result if key not in {*compared, "speed"}])
    if parsed.json:
        return
    for key, comparison in compared.items():
        print_result(
            fold(f"Compared with the model{', int8' if key.startswith('int8') else ''}: {comparison['text']}.")
        )
    if "speed" in result:
        print_result(fold(f"In transformers, on this machine, {result['speed']}."))
    if parsed.to == "dense":
        print_result(fold("The factors are multiplied out: this model has the teacher's size and speed again."))
    if parsed.to == "gguf":
        print_result(fold("A GGUF has no factors: with the same type of weights it is as large as the teacher's."))


def evaluate(arguments: Sequence[str]) -> None:
    """Score a model: ROUGE-L of its answers, tasks after fine-tuning, or a suite of models side by side."""
    launcher, words = split_launcher_flags(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--suite", nargs="?")
    flags, rest = parser.parse_known_args(words)
    if flags.suite == "glue":
        from llmdistill.commands.fine_tuning import fine_tune

        return fine_tune(
            rest,
            prog="llmdistill evaluate --suite glue",
            launcher_flags=launcher,
            launch=lambda: launch(launcher, "llmdistill.cli", "evaluate", *words),
        )
    from llmdistill.commands import side_by_side

    if flags.suite in side_by_side.SUITES:
        if launcher:
            raise UserError(f"{launcher[0]}: --suite {flags.suite} runs in one process; leave it out")
        return side_by_side.compare_models(flags.suite, rest, prog=f"llmdistill evaluate --suite {flags.suite}")
    if flags.suite is not None:  # a mistyped suite is not to be answered with what a set needs
        suite_sets(flags.suite, None, others=["glue", *side_by_side.SUITES])
    if launcher:
        launch(launcher, "llmdistill.cli", "evaluate", *words)
    from llmdistill.commands.evaluate import score_answers

    score_answers(words, prog="llmdistill evaluate")


def _of_module(name: str, in_ranks: bool = False) -> Callable[[Sequence[str]], None]:
    """Return what runs the command of the module of the same name, which is imported then.

    Flags of the launcher run a command `in_ranks` in several.
    """

    def run(arguments: Sequence[str]) -> None:
        if in_ranks:
            launcher, arguments = split_launcher_flags(arguments)
            if launcher:
                launch(launcher, "llmdistill.cli", name, *arguments)
        code = getattr(import_module(f"llmdistill.commands.{name}"), name)(arguments)
        if code:
            raise SystemExit(code)

    return run


def _show(result: dict[str, Any], as_json: bool, keys: Sequence[str] | None = None) -> None:
    if as_json:
        print_result(result)
        return
    shown = list(keys or result)
    width = max(20, *(len(key) + 2 for key in shown))
    for key in shown:
        value = result[key]
        text = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
        print_result(fold(f"{key:{width}}{text}"))


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], None]]] = {
    "train": ("distill a teacher into a smaller student (the main job)", train),
    "plan": ("forecast memory and time of a training on GPUs, and propose settings that fit", _of_module("plan")),
    "doctor": ("check this machine, and a run on one batch of its data, before the launch", _of_module("doctor")),
    "compare": ("train by several methods under equal conditions and report how they compare", _of_module("compare")),
    "recipes": ("list the shipped recipes, or show one", _of_module("recipes")),
    "compress": ("factorize a model folder", compress),
    "cache": (
        "keep a teacher's outputs, so that trainings read them and do not load it",
        _of_module("cache", True),
    ),
    "write": ("let a teacher write its own training data", _of_module("write", True)),
    "generate": ("let a teacher answer prompts, as training data for SeqKD", _of_module("generate", True)),
    "export": ("write a student as ONNX, GGUF, few bits, or a stock model", export),
    "push": ("upload a student with its model card to the Hugging Face hub", _of_module("push")),
    "evaluate": ("score models: ROUGE-L of answers, tasks after fine-tuning, or zero-shot tasks", evaluate),
}
"""Name of a command -> its description, and the function that runs it with its arguments."""

if __name__ == "__main__":
    sys.exit(main())
