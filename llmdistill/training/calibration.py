"""What is measured on the teacher before a training: the calibration of a student, and a rotation of embeddings."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from llmdistill.artifacts import as_json
from llmdistill.batch import Batch
from llmdistill.config import CalibrationConfig, DataConfig, FactorizeConfig, RunConfig, StudentConfig
from llmdistill.config.command_line import to_dict, with_values
from llmdistill.config.data import NOT_OF_EXAMPLES
from llmdistill.data.memory import has_columns
from llmdistill.data.prompts import resolve_prompt
from llmdistill.data.sampler import Share
from llmdistill.data.sources import Data, kind_of
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.fingerprints import fingerprint, memory_fingerprint
from llmdistill.messages import say
from llmdistill.methods import Method
from llmdistill.models.families import is_causal, max_positions, shape_of
from llmdistill.progress import progress
from llmdistill.report.weighting import WEIGHTING_FILE
from llmdistill.runtime.distributed import World, broadcast_object, largest_number
from llmdistill.runtime.terminal import print_main, warn_main
from llmdistill.step.teacher import Teacher
from llmdistill.students.importance import Importance, measure_importance
from llmdistill.students.shapes import teacher_layers
from llmdistill.students.start.calibration_folder import SavedFactors
from llmdistill.students.start.embedding_rank import LEAST_GAIN, nearest_choice
from llmdistill.students.start.weigh import CalibrationParts, weigh
from llmdistill.students.start.weighted import GRADIENT_DAMPING, INPUT_DAMPING
from llmdistill.students.start.weighted_factors import WeightedFactors
from llmdistill.students.svd import determine_vectors
from llmdistill.tasks import make_task
from llmdistill.tasks.base import LoadedModel, Models, TaskData
from llmdistill.tasks.item_outputs import scoring_forward
from llmdistill.teachers.live import LoadedTeacher
from llmdistill.training.inputs import data_file
from llmdistill.training.plan import Plan
from llmdistill.training.run_folder import task_reference

_SENTENCES = 4096
"""The most sentences whose embeddings are matched."""
_SENTENCES_A_BATCH = 32
_UNDETERMINED = 1e-5
"""Embeddings in fp32 say nothing of a direction that is weaker than this share of the strongest."""


def measure_weights(plan: Plan, teacher: Callable[[], LoadedTeacher], data: TaskData) -> WeightedFactors | None:
    """Weigh the factorization of a run by its calibration data; None without a weighting. Every rank must call it.

    `teacher` loads the teacher with the head that its folder has. The run's own `data` are taken if the calibration
    names no others.
    """
    world = World.current()
    settings = plan.config.student.factorize
    if not settings.is_weighted:
        return None
    began = time.perf_counter()
    parts = CalibrationParts(
        config=plan.models.teacher,
        teacher=teacher,
        # Kept statistics need no data, so these are read at the first use.
        batches=cache(lambda: _batches_of_run(plan, data)),
        device=world.device,
        saved=_open_saved(plan.config, lambda: fingerprint(plan.models.teacher_path), plan.models.teacher_dtype),
        say=lambda text: print_main(f"Student     {text}"),
    )
    print_main(f"Student     its factors are weighted by {settings.weighting}")
    factors = weigh(parts, settings, plan.config.student.method)
    if world.is_main:
        # Statistics that were kept cost what they took then, so that students of a study can be compared.
        _report(plan.folder, settings, factors, max(factors.seconds, time.perf_counter() - began))
    if factors.warning() is not None:
        warn_main(str(factors.warning()))
    return factors


def measure_parts(plan: Plan, teacher: Callable[[], LoadedTeacher], data: TaskData) -> Importance | None:
    """Measure which parts of the teacher a student takes; None if data choose none. Every rank must call it."""
    world = World.current()
    settings = plan.config.student
    if not settings.measures_importance:
        return None
    began = time.perf_counter()
    batches, _ = _batches_of_run(plan, data)
    # A sharded teacher needs all ranks in each pass, so a rank with fewer batches makes as many passes.
    rounds, reduce = largest_number(len(batches)), dist.all_reduce if world.size > 1 else None
    importance = measure_importance(teacher().model, batches, reduce=reduce, rounds=rounds)
    sizes = [shape_of(config).num_layers for config in (plan.models.student, plan.models.teacher)]
    layers = teacher_layers(settings.teacher_layers, *sizes, key="student.layers", influence=importance.influence_L)
    if world.is_main:
        named, seconds = [layer + 1 for layer in layers], time.perf_counter() - began
        values = {
            "tokens": importance.tokens,
            "seconds": round(seconds, 2),
            "layers": named,
            "influence": importance.influence_L.tolist(),
        }
        write_json(plan.folder / "importance.json", values)
        listed = ", ".join(map(str, named))
        say(f"Student     takes parts of layers {listed}, chosen on {importance.tokens:,} tokens in {seconds:.0f} s")
    return importance


def _batches_of_run(plan: Plan, data: TaskData) -> tuple[list[Batch], list[Batch]]:
    """The `calibration_batches` of a run; its own data are not read a second time."""
    own = None if plan.config.student.factorize.calibration.data is not None or not plan.trains else data
    return calibration_batches(plan.config, plan.models, own)


@dataclass(frozen=True, kw_only=True)
class DataOutsideRuns:
    """The calibration data of a model that no run trains."""

    data: Data
    limits: Mapping[str, Any]
    """prompt, max_prompt_length, max_length and long_prompts, where they differ from their defaults."""
    needs_held_out: bool
    """Whether the held-out batches are read even if kept statistics need no data."""


def measure_weights_on(
    given: DataOutsideRuns,
    loaded: LoadedModel,
    student: StudentConfig,
    device: torch.device | None,
    origin: Path | str | None,
) -> tuple[WeightedFactors, Sequence[Batch]]:
    """Weigh the factorization of a dense model by data, outside of a run; also return the held-out batches, if needed.

    The model is moved to `device` for the forward passes, and back; by default it stays. `origin`, the folder or name
    of model and tokenizer, identifies kept statistics; a model in memory has none, and its content identifies it.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    with World.alone().entered(), TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        words = fingerprint(folder)
        model.config.save_pretrained(folder)  # says which tokens have an embedding
        file = data_file(given.data, Path(folder), name="calibration")
        positions = max_positions(model.config, DataConfig().max_length)
        usual = {"max_length": positions, "max_prompt_length": min(DataConfig().max_prompt_length, positions - 1)}
        of_data = {"train": file, "kind": kind_of(given.data), "tests": {}}
        data_config = with_values(DataConfig(), {**usual, **of_data, **given.limits}, key="")
        make_task(RunConfig(ds_config="", data=data_config)).check_positions(
            "model", type(model).__name__, model.config
        )
        if data_config.kind == "instructions":
            data_config = replace(data_config, prompt=resolve_prompt(data_config.prompt, [tokenizer]))
        config = RunConfig(ds_config="", student=student, data=data_config)
        models = Models(
            teacher=model.config,
            student=model.config,
            teacher_path=Path(folder),
            tokenizer_path=Path(folder),
            causal=is_causal(model.config),
            objective=make_task(config).objective(model.config, uses_output=False),
        )

        def content() -> str:
            if origin is not None:
                return fingerprint(origin)
            tensors = ((name, tensor.detach().cpu().contiguous()) for name, tensor in model.state_dict().items())
            # As bytes, because numpy has no bfloat16.
            arrays = (
                (f"{name} {tensor.dtype}", tensor.reshape(-1).view(torch.uint8).numpy()) for name, tensor in tensors
            )
            return memory_fingerprint({"config": json.loads(model.config.to_json_string()), "tokenizer": words}, arrays)

        read = cache(lambda: calibration_batches(config, models))
        parts = CalibrationParts(
            config=model.config,
            teacher=lambda: LoadedTeacher(moved, moved),
            batches=read,
            device=device,
            saved=_open_saved(config, content, model.dtype),
        )
        own = model.device
        moved = cast(Any, model).to(own if device is None else device)
        try:
            factors = weigh(parts, student.factorize, student.method)
        finally:
            moved.to(own)
        _print_allocation(factors, aside=True)
        return factors, read()[1] if given.needs_held_out else ()


def _open_saved(config: RunConfig, teacher: Callable[[], str], dtype: torch.dtype) -> Callable[[], SavedFactors] | None:
    """Return what opens the folder of saved statistics; None without one. `teacher` gives the teacher's fingerprint."""
    settings = config.student.factorize
    if settings.calibration.folder is None:
        return None
    folder = Path(settings.calibration.folder)
    return lambda: SavedFactors(folder, _record(config, teacher(), dtype), str(settings.weighting))


def _record(config: RunConfig, teacher: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return what determines the statistics of a calibration, as plain JSON values."""
    calibration, data = config.student.factorize.calibration, to_dict(config)["data"]
    read = {"data.train": calibration.data or config.data.train, **task_reference(data)}
    held_out = data["held_out"]  # folders of earlier versions know no such rows
    return as_json(
        {
            **({"held_out": [held_out, config.seed]} if held_out and calibration.data is None else {}),
            "content of teacher": teacher,
            "dtype of teacher": str(dtype).removeprefix("torch."),
            **{f"content of {key}": fingerprint(reference) for key, reference in read.items()},
            "examples": calibration.count,
            "seed": calibration.seed,
            "micro_batch_size": _batch_size(calibration),
            "damping": [INPUT_DAMPING, GRADIENT_DAMPING],
            "data": {key: value for key, value in data.items() if key not in NOT_OF_EXAMPLES},
        }
    )


@torch.no_grad()
def nearest_rotation(
    method: Method,
    untrained: Callable[[], PreTrainedModel],
    teacher: Teacher,
    examples: tuple[Sequence[Any], Callable[[list[Any]], Batch]],
) -> Tensor:
    """Return the orthogonal matrix that brings the untrained student's embeddings nearest to the teacher's.

    It is the solution of the orthogonal Procrustes problem (Schönemann 1966): U Vᵀ of the singular value decomposition
    U Σ Vᵀ = Tᵀ S, where the rows of T and S are the embeddings of at most 4,096 sentences, divided by their lengths.
    Each rank runs the teacher on all of them in the same batches, so that the matrix does not depend on their number;
    rank 0 runs the student. Every rank must call this function.

    `untrained` loads the student in fp32, and `examples` are the sentences with the function that collates them.
    Returns (teacher's width, student's width), in fp32 on the CPU.
    """
    world = World.current()
    items, collate = examples
    # Every so many sentences, rounded up, so that they come from the whole set.
    chosen = [items[index] for index in range(0, len(items), -(-len(items) // _SENTENCES))]
    chosen.sort(key=len, reverse=True)  # batches of equal lengths have little padding
    student = untrained().to(world.device) if world.is_main else None  # type: ignore[arg-type]
    product: Tensor | float = 0.0
    for start in progress(range(0, len(chosen), _SENTENCES_A_BATCH), "Matching embeddings", "batches"):
        batch = collate(chosen[start : start + _SENTENCES_A_BATCH]).with_positions(shift=method.shift).to(world.device)
        # (B, width of the teacher); below, ours are (B, width of the student).
        theirs = teacher.compute_targets(batch, lm_head=()).sequence_logits
        assert theirs is not None, "the teacher gives no embeddings"
        if student is not None:
            with scoring_forward(student, pooling=method.pooling) as forward:
                ours = forward(batch).sequence_logits
            assert ours is not None
            # In fp64, so that the sum adds no rounding to that of the embeddings.
            first, second = (functional.normalize(embeddings.double(), dim=-1) for embeddings in (theirs, ours))
            product = product + first.T @ second
    if student is not None:
        assert isinstance(product, Tensor)
        product = nearest_isometry(product.cpu()).float()
    rotation: Tensor = broadcast_object(product)
    return rotation


def nearest_isometry(product: Tensor) -> Tensor:
    """Return the (n, m) of orthonormal columns, or rows if they are fewer, with the largest inner product with (n, m).

    Directions that a product of embeddings does not determine follow from a fixed rule, not from its rounding: a
    LayerNorm without bias, such as that of a new student, leaves one, and so does each sentence too few.
    """
    left, values, right = torch.linalg.svd(product, full_matrices=False)
    left, _, right = determine_vectors(left, values, right, len(values), zero=_UNDETERMINED)
    return left @ right


def split_calibration(given: Data | Mapping[str, Any] | None) -> tuple[Data | None, dict[str, Any]]:
    """Return the calibration data, and the other settings of the calibration by dotted key."""
    if not isinstance(given, Mapping) or has_columns(given) or type(given).__module__.startswith("datasets"):
        return given, {}
    others = {key: str(value) if isinstance(value, Path) else value for key, value in given.items() if key != "data"}
    return given.get("data"), {f"calibration.{key}": value for key, value in others.items()}


def check_calibration(plan: Plan) -> None:
    """Raise a UserError if calibration data of their own cannot be read; every rank must call it."""
    if plan.config.student.factorize.calibration.data is not None:
        _read(plan.config, plan.models)


def calibration_batches(
    config: RunConfig, models: Models, data: TaskData | None = None
) -> tuple[list[Batch], list[Batch]]:
    """Return this rank's batches of the calibration data, and the held-out batches that follow them on every rank.

    Each example is in one batch. If there are fewer than the settings want, they are shared out as the settings say.
    Every rank must call this function. `data` are the calibration data if they are read already. Raises a UserError if
    the data cannot be read.
    """
    world = World.current()
    calibration = config.student.factorize.calibration
    if calibration.count < world.size:  # a rank without a batch has no moments for the sums over the ranks
        raise UserError(
            f"student.factorize.calibration.examples is {calibration.count}, fewer than the {world.size} ranks: "
            f"give {world.size} or more"
        )
    size = _batch_size(calibration)
    # A loader of one rank: its steps are batches, which the ranks take in turn.
    share = Share(seed=calibration.seed, global_batch_size=size, micro_batch_size=size)
    loader = (_read(config, models) if data is None else data).loader(share)
    measured, checked = (-(-wanted // size) for wanted in (calibration.count, calibration.checked))
    steps = loader.once((measured + checked) * size)
    if [len(items) for items in steps] != [size] * (measured + checked):
        items = [item for step in steps for item in step]
        wanted = calibration.count + calibration.checked
        held = calibration.checked * min(len(items), wanted) // wanted
        first = len(items[:wanted]) - held
        if first < world.size:
            raise UserError(
                f"the calibration data have only {len(items):,} examples for {world.size} ranks: give more data, or "
                "run fewer ranks"
            )
        size = min(size, first // world.size)
        parts = [items[:first], items[first : first + held]]
        cut = [[part[start : start + size] for start in range(0, len(part), size)] for part in parts]
        measured, steps = len(cut[0]), [*cut[0], *cut[1]]
    counts = [sum(map(len, part)) for part in (steps[:measured], steps[measured:])]
    if world.is_main:
        more = f", {counts[1]:,} more held out" if counts[1] else ""
        say(f"Student     calibration data: {counts[0]:,} example(s){more}", aside=True)
    batches = [loader.collate(items) for items in [*steps[world.rank : measured : world.size], *steps[measured:]]]
    own = len(range(world.rank, measured, world.size))
    return batches[:own], batches[own:]


def _batch_size(calibration: CalibrationConfig) -> int:
    world = World.current()
    # Small enough that every rank gets a batch.
    return min(calibration.micro_batch_size, calibration.count // world.size)


def _read(config: RunConfig, models: Models) -> TaskData:
    """Read the calibration data alone, as the training set of a run that trains."""
    own = config.student.factorize.calibration.data
    data = replace(config.data, train=own or config.data.train, valid=None, tests={})
    return make_task(replace(config, data=data), trains=True).read_on_all(models).prepare()


def _report(folder: Path, settings: FactorizeConfig, factors: WeightedFactors, seconds: float) -> None:
    """Print what a weighted factorization is expected to cost, and write its figures into the run's folder."""
    values = {
        "weighting": settings.weighting,
        "form": settings.stored_form,
        "tokens": factors.tokens,
        "seconds": round(seconds, 2),
        "predicted_loss": factors.predicted_loss,
        "held_out": dict(factors.held_out),
        "ranks": dict(factors.ranks),
        "embedding_rank": None if factors.table is None else factors.table.rank,
        "spectra": factors.spectra(),
    }
    write_json(folder / WEIGHTING_FILE, values)
    say(f"Student     the cut is predicted to cost {factors.predicted_loss:.4g} per token, measured in {seconds:.0f} s")
    _print_allocation(factors)


def _print_allocation(factors: WeightedFactors, *, aside: bool = False) -> None:
    """Print which allocation the check on held-out data chose, if there was one."""
    names = {"loss": "ranks by predicted loss", "uniform": "one rank", "embedding": "a narrower embedding"}
    found = factors.held_out
    if found:
        figures = ", ".join(f"{found[key]:.4g} with {name}" for key, name in names.items() if key in found)
        chosen = nearest_choice(found)
        best = {"loss": "the ranks", "uniform": "one rank"}.get(chosen)
        if best is None and factors.table is not None:
            best = f"rank {factors.table.rank} of {factors.table.widest} for the embedding"
        elif found.get("embedding", math.inf) < found[chosen]:
            best = f"{best}, as narrowing the embedding would save less than {LEAST_GAIN:.0%}"
        say(f"Student     nats a token from its teacher on held-out data: {figures}; it takes {best}", aside=aside)
