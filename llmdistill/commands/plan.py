"""``llmdistill plan``: the settings of a training that fit into the memory of GPUs, the time of a step, a proposal."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser

from llmdistill.config import RunConfig
from llmdistill.config.command_line import build, parse_own, parse_run, split_words
from llmdistill.config.machine import MachineConfig, find_gpu
from llmdistill.config.overrides import given_flags
from llmdistill.config.teacher import CacheConfig
from llmdistill.errors import UserError
from llmdistill.files import new_folder, write_json, write_text
from llmdistill.messages import print_result, say
from llmdistill.methods import METHODS
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.terminal import quiet_transformers

if TYPE_CHECKING:
    from llmdistill.planning.choices import CacheForecast, LayoutChoice
    from llmdistill.teachers.cache.trace import Counts
    from llmdistill.training.plan import Plan


def plan(arguments: Sequence[str]) -> None:
    """Forecast a training, and print and write a proposal; raise UserError if no setting fits."""
    parser = ArgumentParser(
        prog="llmdistill plan",
        usage="llmdistill plan [--recipe NAME] [--gpus N] [--write DIR] [--KEY VALUE ...]",
        exit_on_error=False,
        description="Forecast, from configurations alone, the memory of a training by part and the time of a step on "
        "GPUs, or on this CPU, for each ZeRO stage, micro batch, activation checkpointing and place of the teacher, "
        "and propose what fits best. "
        "All settings of a run (llmdistill train --help all) can be given too; with --ds_config only that one is "
        "looked at, and a train.micro_batch_size that is given is kept where it fits. A file with the teacher's "
        "outputs (llmdistill cache) is one of its places where the run can have it.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object with all settings.")
    parser.add_argument("--all", action="store_true", help="List every micro batch size, not only the best one.")
    text = "New folder for the proposal: ds_config.json, and launch.sh, which starts the training with it."
    parser.add_argument("--write", type=Path, metavar="DIR", help=text)
    text = "Read and tokenize the training set for the size of a cache; otherwise its examples are taken to be those "
    text += "of the run's steps, each once and of data.max_length tokens."
    parser.add_argument("--count_data", action="store_true", help=text)
    parser.add_class_arguments(MachineConfig, None)
    parser.add_class_arguments(CacheConfig, "cache")
    parsed, words = parse_own(parser, arguments)
    machine = machine_of(build(parsed, MachineConfig, prefix="--"), arguments)
    settings = build(parsed.cache, CacheConfig, prefix="--cache.")
    config, _ = parse_run(words, METHODS)
    # Imported here so that --help does not wait for torch and transformers.
    from llmdistill.planning.choices import DS_CONFIGS, CacheRequest, explain_choice, make_choices, propose

    quiet_transformers()
    resolved = resolve(config, "bf16" if machine.gpus else "fp32")
    if not resolved.trains:
        raise UserError(f"method {config.method} trains nothing, so there is nothing to plan: name another --method")
    obstacle = None if resolved.source is None else resolved.source.unforecast(config.teacher)
    if obstacle is not None:
        raise UserError(obstacle)
    counts = count_data(resolved) if parsed.count_data else None
    folder = Path("cache") if parsed.write is None else parsed.write / "cache"
    request = CacheRequest(folder=str(folder), settings=settings, counts=counts)
    only_own = (
        "ds_config" in given_flags(words) or not machine.gpus
    )  # a CPU has a single rank, over which no ds_config can shard
    choices = make_choices(resolved, machine, [config.ds_config] if only_own else DS_CONFIGS, request)
    if parsed.json:
        # The object is printed even if nothing fits: the error follows from `propose` below.
        fitting = any(choice.fits for choice in choices)
        best = propose(choices, config.train.micro_batch_size) if fitting else None
        print_result(describe_choices(resolved, machine, choices, best, words))
    else:
        print_choices(resolved, machine, choices, every=parsed.all)
    best = propose(choices, config.train.micro_batch_size)
    if not parsed.json:
        sentence, first_command = (
            explain_choice(best, choices, config.train.micro_batch_size),
            first_words(best, words, machine),
        )
        print_result(f"\nProposal   {best.describe()}\nReason     {sentence}")
        if first_command is not None:
            print_result(f"First      {shlex.join(first_command)}")
        print_result(f"Launch     {shlex.join(launch_words(best, words, machine, best.ds_config))}")
    if parsed.write is not None:
        write(parsed.write, best, words, machine)
        if not parsed.json:
            print_result(f"Written    {parsed.write / 'ds_config.json'}, {parsed.write / 'launch.sh'}")


def machine_of(machine: MachineConfig, words: Sequence[str]) -> MachineConfig:
    """Return the machine with the figures of its GPUs, or of this CPU.

    It is a CPU for --gpus 0, or if the words name no machine and there is no GPU here. GPUs are those that the words
    name, or else those of this machine where their kind is known.
    """
    import torch

    from llmdistill.runtime.speed import measure_cpu

    given = {setting.name for setting in fields(MachineConfig)} & given_flags(words).keys()
    is_here = torch.cuda.is_available()
    if machine.gpus == 0 or not (given or is_here):
        measured = {name: value for name, value in measure_cpu().items() if name not in given}
        return replace(machine, gpus=0, **measured)
    if "gpu" in given or not is_here:
        return machine.of_kind(machine.gpu, given)
    properties = torch.cuda.get_device_properties(0)
    kind = find_gpu(properties.name, properties.total_memory)
    # The driver's number of bytes says what there is to fill, a little less than the data sheet's.
    here: dict[str, Any] = {"gpu_memory": f"{properties.total_memory / 1e9:.1f}GB", "gpus": torch.cuda.device_count()}
    if kind is not None:
        machine = machine.of_kind(kind, given)
    else:
        rest = "TFLOP/s and bandwidths are an A100's where they are not given (--tflops, --memory_bandwidth, ...)"
        say(f"Note       {properties.name} is not among the kinds of --gpu: {rest}", aside=True)
    return replace(machine, **{name: value for name, value in here.items() if name not in given})


def resolve(config: RunConfig, dtype: Literal["bf16", "fp32"] = "bf16") -> Plan:
    """Return the plan of a run in the dtype of its device, from the configurations of its models alone."""
    from llmdistill.embedded import locate
    from llmdistill.models.configs import load_config
    from llmdistill.training.plan import make_plan, make_plans
    from llmdistill.training.rules import check_settings

    if config.train.dtype == "auto":
        config = replace(config, train=replace(config.train, dtype=dtype))
    if config.student.assistants:
        return make_plans(config)[-1]
    check_settings(config)  # before any config of a model is read
    named = {str(name) for name in (config.teacher.model, config.student.model) if name is not None}
    return make_plan(config, pending={name: load_config(locate(name)) for name in named})


def count_data(plan: Plan) -> Counts | None:
    """Read and count the training set of a run; None if the run can have no cache."""
    from llmdistill.teachers.cache.making import count_examples
    from llmdistill.training.checks import can_cache
    from llmdistill.training.plan import make_plan
    from llmdistill.training.written_data import names_teacher, with_written_data

    written = with_written_data(plan.config, write=False)
    if not can_cache(plan) or names_teacher(written):  # no row is there to count
        return None
    plan = plan if written is plan.config else make_plan(written)
    if plan.teacher_plan is None:  # a plan from configurations alone has no folder of the tokenizer
        plan = make_plan(plan.config)
    data = plan.task.read(plan.models).prepare()
    return count_examples(plan, data)


def notes(config: RunConfig) -> list[str]:
    """Return what a forecast leaves out of a run."""
    from llmdistill.training.rules import NOT_FORECAST

    stage = ["the runs of the second stage (tasks)"] if config.tasks.names else []
    parts = [part for condition, part in NOT_FORECAST.items() if condition.of_config and condition.of_config(config)]
    return [f"{part} are not in the forecast" for part in [*parts, *stage]]


def launcher_words(machine: MachineConfig) -> list[str]:
    """Return the flags of the launcher; a CPU needs none."""
    nodes = [] if machine.nodes == 1 else ["--hostfile", "hosts", "--num_nodes", str(machine.nodes)]
    return [*nodes, *(["--num_gpus", str(machine.gpus)] if machine.gpus else [])]


def launch_words(choice: LayoutChoice, words: Sequence[str], machine: MachineConfig, ds_config: str) -> list[str]:
    """Return the command line that launches a training with a choice; its settings stand last, so they win."""
    settings = [
        f"--{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in choice.overrides.items()
    ]
    return ["llmdistill", "train", *launcher_words(machine), *words, "--ds_config", ds_config, *settings]


def first_words(choice: LayoutChoice, words: Sequence[str], machine: MachineConfig) -> list[str] | None:
    """Return the command that makes the cache of a choice, or continues it; None if there is nothing to make."""
    cache = choice.cache
    if cache is None or cache.is_there:
        return None
    changed = {name: value for name, value in asdict(cache.settings).items() if value != getattr(CacheConfig(), name)}
    settings = [f"--cache.{name}={value}" for name, value in changed.items()]
    settings += [] if cache.sharding == "replicated" else [f"--teacher.sharding={cache.sharding}"]
    _, run = split_words(words, {"teacher.cache"})
    return ["llmdistill", "cache", *launcher_words(machine), *run, *settings, "--output", cache.folder]


def describe_choices(
    plan: Plan, machine: MachineConfig, choices: Sequence[LayoutChoice], best: LayoutChoice | None, words: Sequence[str]
) -> dict[str, Any]:
    """Return the forecast as plain JSON values."""
    values = {
        # Choices hold dicts, so they have no hash; their identity finds the proposal among them.
        id(choice): {
            "ds_config": choice.ds_config,
            "accumulation_steps": choice.accumulation_steps,
            "overrides": choice.overrides,
            "memory_bytes": {name: round(size) for name, size in choice.memory.items()},
            "total_bytes": round(choice.total),
            "fits": choice.fits,
            "tight": choice.tight,
            "flops": choice.flops,
            "wire_bytes": round(choice.wire_bytes),
            "node_bytes": round(choice.node_bytes),
            "teacher": choice.teacher,
            "step_seconds": choice.duration.seconds,
            "bound": choice.duration.bound,
            "seconds": asdict(choice.duration),
        }
        for choice in choices
    }
    cache = _find_cache(choices)
    first = None if best is None else first_words(best, words, machine)
    return {
        **{key: plan.models.sizes[key] for key in ("teacher_params", "student_params")},
        "machine": asdict(machine),
        "choices": list(values.values()),
        "proposal": None if best is None else values[id(best)],
        "notes": notes(plan.config),
        "cache": None if cache is None else asdict(cache),
        "first_command": None if first is None else shlex.join(first),
        "command": None if best is None else shlex.join(launch_words(best, words, machine, best.ds_config)),
    }


def _find_cache(choices: Sequence[LayoutChoice]) -> CacheForecast | None:
    """Return the cache that some of the choices read; None if none does."""
    return next((choice.cache for choice in choices if choice.cache is not None), None)


def print_choices(plan: Plan, machine: MachineConfig, choices: Sequence[LayoutChoice], *, every: bool) -> None:
    """Print the run, the choices, and for the best choice of each ds_config the memory by part and the step."""
    from llmdistill.planning.choices import best_by_kind, gigabytes
    from llmdistill.planning.layout import Duration
    from llmdistill.report.tables import print_table
    from llmdistill.students.sizes import describe_params, describe_ranks
    from llmdistill.training.written_data import names_teacher

    train, sizes, cache = plan.config.train, plan.models.sizes, _find_cache(choices)
    ranks = describe_ranks(sizes)
    print_result(
        f"Teacher    {plan.config.teacher.model}, {sizes['teacher_params']:,} parameters\n"
        f"Student    {sizes['method']}, {describe_params(sizes)} parameters{ranks and f', rank {ranks}'}\n"
        f"Step       {train.global_batch_size} sequences of {plan.config.data.max_length} tokens, "
        f"{' + '.join(plan.config.methods())}, {str(plan.models.dtype).removeprefix('torch.')}\n"
        f"Machine    {about_machine(machine)}\n"
        + ("" if cache is None else f"Cache      {about_cache(cache)}\n")
        + (f"Data       {about_writing(plan, machine)}\n" if names_teacher(plan.config) else "")
        + "".join(f"Note       {note}\n" for note in notes(plan.config))
    )
    shown = (
        choices
        if every
        else best_by_kind(choices, lambda choice: (choice.ds_config, choice.teacher, choice.checkpointing))
    )
    header = ["ds_config", "teacher", "re-\ncompute", "micro\nbatch", "GB", "fits", "s", "bound"]
    rows = [
        [
            choice.ds_config,
            choice.teacher or "none",
            "yes" if choice.checkpointing else "no",
            f"{choice.micro_batch_size}x{choice.accumulation_steps}",
            gigabytes(choice.total),
            "no" if not choice.fits else "tight" if choice.tight else "yes",
            f"{choice.duration.seconds:.3g}",
            choice.duration.bound,
        ]
        for choice in shown
    ]
    title = "GB of a rank and seconds of a step, for micro batch x accumulation steps"
    print_table(title, header, rows, left=(0, 1, 2, 5, 7))
    best = best_by_kind(choices, lambda choice: (choice.ds_config,))
    parts = [part for part in best[0].memory if any(choice.memory[part] > 0 for choice in best)]
    part_rows = [[part, *(gigabytes(choice.memory[part]) for choice in best)] for part in parts]
    part_rows.append(["total", *(gigabytes(choice.total) for choice in best)])
    print_result("")
    names = [choice.ds_config for choice in best]
    print_table("GB of the best of each ds_config, by part", ["part", *names], part_rows)
    step_rows = [["TFLOP", *(f"{choice.flops / 1e12:.3g}" for choice in best)]]
    step_rows.append(["GB sent", *(gigabytes(choice.wire_bytes) for choice in best)])
    if any(choice.node_bytes > 0 for choice in best):
        step_rows.append(["GB sent in a node", *(gigabytes(choice.node_bytes) for choice in best)])
    for part in fields(Duration):
        step_rows.append([f"{part.name} s", *(f"{getattr(choice.duration, part.name):.2g}" for choice in best)])
    print_result("")
    print_table("A step of the best of each ds_config on one rank", ["what", *names], step_rows)


def about_machine(machine: MachineConfig) -> str:
    """Describe the machine for which a training is planned."""
    if machine.gpus:
        kind = f"{machine.gpu.upper()}, {machine.gpu_memory}"
        return f"{machine.nodes} x {machine.gpus} {kind}, {machine.tflops:g} TFLOP/s each (--gpu names another kind)"
    text = f"the CPU of this machine, {machine.gpu_memory} free, {1000 * machine.tflops:.3g} GFLOP/s"
    return f"{text}\n           (--gpus N plans for GPUs)"


def about_writing(plan: Plan, machine: MachineConfig) -> str:
    """Describe what the teacher writes before a training, and about how long it takes."""
    from llmdistill.progress import duration
    from llmdistill.training.written_data import describe_writing, most_tokens, written_data_exist

    text = describe_writing(plan.config)
    if written_data_exist(plan.config):
        return text
    # A step of the decoding reads all weights, once for the rows of a batch.
    params, rows = plan.models.sizes["teacher_params"], plan.config.data.write.batch_size or 32
    products = 2 * params * rows / (machine.tflops * 1e12 * machine.product_share)
    weights = params * (2 if machine.gpus else 4) / (machine.memory_bandwidth * 1e9 * machine.bandwidth_share)
    seconds = max(products, weights) * most_tokens(plan.config) / rows / max(1, machine.gpus * machine.nodes)
    return f"{text}\n           in at least {duration(seconds)}, {rows} rows at once on each rank"


def about_cache(cache: CacheForecast) -> str:
    """Describe the size of a cache and the time to make it, as lines for the terminal."""
    from llmdistill.planning.choices import gigabytes

    text = f"{cache.settings.content}, {cache.bytes_per_token:,.0f} bytes a token"
    if cache.counts is None:
        return f"{text}; --count_data gives its whole size"
    text += f", {gigabytes(cache.bytes or 0)} GB for {cache.counts['sequences']:,} examples"
    text += "" if cache.counted else "\n           as long as they may be (--count_data counts them)"
    if cache.is_there:
        return f"{text}; it is there"
    return f"{text}\n           made in {cache.seconds:,.3g} s by the teacher {cache.sharding}"


def write(folder: Path, choice: LayoutChoice, words: Sequence[str], machine: MachineConfig) -> None:
    """Write the DeepSpeed configuration of a choice, and a script that launches the training with it.

    The script makes the teacher's cache first if the choice has one that is not there. Raises UserError if the folder
    exists and is not empty.
    """
    command = shlex.join(launch_words(choice, words, machine, str(folder / "ds_config.json")))
    with new_folder(folder) as partial:
        write_json(partial / "ds_config.json", read_ds_config(choice.ds_config))
        lines = ["#!/bin/sh"]
        first = first_words(choice, words, machine)
        if first is not None:  # `llmdistill cache` skips a finished cache, and continues an unfinished one
            lines.append(f"{shlex.join(first)} || exit")
        write_text(partial / "launch.sh", "\n".join([*lines, f"exec {command}"]) + "\n")
