"""Where settings become objects. Nobody below this module reads a RunConfig."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.data.instruct import Encoded, Example, InstructData, encode
from llmdistill.data.sampler import TrainLoader
from llmdistill.data.sources import read_examples
from llmdistill.data.stream import StreamLoader, check_stream
from llmdistill.data.validation import validation_batches
from llmdistill.embedded import locate
from llmdistill.factorize import compress
from llmdistill.factorize.checkpoint import merge_adapter
from llmdistill.generation.provenance import check_teacher
from llmdistill.generation.rollout import OnPolicyLoader
from llmdistill.models.adapters import add_lora, is_adapter
from llmdistill.models.forward import TappedModel
from llmdistill.models.load import load_model, load_tokenizer
from llmdistill.models.taps import Recorder
from llmdistill.plan import Plan
from llmdistill.runtime.distributed import World, on_main
from llmdistill.runtime.engine import TORCH_DTYPES, build_engine
from llmdistill.scoring.book import VALID, ScoreBook
from llmdistill.scoring.instruct import check_sets
from llmdistill.teacher.live import LiveTeacher, load_teacher
from llmdistill.trainer import Loader, Trainer


@dataclass(frozen=True)
class RunData:
    """The texts of a run."""

    tokenizer: PreTrainedTokenizerBase
    """The student's."""
    teacher_tokenizer: PreTrainedTokenizerBase
    train: InstructData | None
    """None where the training set is streamed."""
    valid: list[Example]
    valid_items: list[Encoded]
    """The validation set as the student's tokens."""
    tests: dict[str, list[Example]]
    report: str
    """One sentence on the training set."""


def read_data(plan: Plan) -> RunData:
    """Read and check every file of a run, and its tokenizers.

    Raises:
        UserError: a missing, malformed or empty file, or prompts over the limit.
    """
    data = plan.config.data
    teacher_tokenizer = load_tokenizer(plan.teacher_path)
    shared = plan.tokenizer_path == plan.teacher_path
    tokenizer = teacher_tokenizer if shared else load_tokenizer(plan.tokenizer_path)
    limits = _limits(plan)
    valid = [] if data.valid is None else read_examples(locate(data.valid))
    valid_items = encode(valid, tokenizer, **limits).items if valid else []
    tests = {name: read_examples(locate(path)) for name, path in data.tests.items()}
    scored = {**({VALID: valid} if valid else {}), **tests}
    for each in [tokenizer] if shared else [tokenizer, teacher_tokenizer]:
        check_sets(scored, each, plan.config.scoring, **limits)
    if data.streaming:
        check_stream(locate(data.train))
    if data.streaming or plan.config.method == "none":
        report = "streamed while training" if data.streaming else "not read, as nothing is trained"
        return RunData(tokenizer, teacher_tokenizer, None, valid, valid_items, tests, report)
    train = encode(read_examples(locate(data.train)), tokenizer, **limits)
    return RunData(tokenizer, teacher_tokenizer, train, valid, valid_items, tests, train.report())


def _limits(plan: Plan) -> dict[str, Any]:
    data = plan.config.data
    return {
        "max_prompt_length": data.max_prompt_length,
        "max_length": data.max_length,
        "long_prompts": data.long_prompts,
    }


def check_responses(plan: Plan) -> list[str]:
    """Warnings about answers that another model than the run's teacher wrote."""
    if plan.config.method != "seqkd":
        return []
    warning = check_teacher(locate(plan.config.data.train), plan.teacher_path)
    return [] if warning is None else [warning]


def prepare_student(plan: Plan, world: World) -> Path:
    """The folder of the untrained student: the one given, or the teacher factorised once, by one rank, for all.

    A resumed run finds it there.
    """
    if plan.config.student.model is not None:
        return locate(plan.config.student.model)
    folder = plan.folder / "untrained"
    if not (folder / "config.json").is_file():
        settings = plan.config.student.factorize
        on_main(lambda: compress(plan.teacher_path, folder, settings, device=world.device), world)
    return folder


def make_teacher(plan: Plan, world: World) -> LiveTeacher:
    """The teacher, in evaluation mode."""
    wanted = plan.config.teacher.dtype
    dtype = plan.dtype if wanted == "auto" else TORCH_DTYPES[wanted]
    path, sharding = plan.teacher_path, plan.config.teacher.sharding
    if sharding == "zero3" and is_adapter(path):
        # No rank could merge an adapter into a base of which it holds a share.
        merged = plan.folder / "teacher"
        if not (merged / "config.json").is_file():
            on_main(lambda: merge_adapter(path, merged), world)
        path = merged
    return load_teacher(str(path), dtype=dtype, sharding=sharding, world=world)


def make_loader(plan: Plan, data: RunData, world: World) -> TrainLoader | StreamLoader:
    """The training batches of this rank."""
    config = plan.config
    arguments: dict[str, Any] = {
        "pad_token_id": data.tokenizer.pad_token_id,
        "seed": config.seed,
        "global_batch_size": config.train.global_batch_size,
        "micro_batch_size": plan.split.micro_batch_size,
        "rank": world.rank,
        "world_size": world.size,
    }
    if data.train is not None:
        return TrainLoader(data.train.items, **arguments)
    return StreamLoader(
        locate(config.data.train),
        data.tokenizer,
        **_limits(plan),
        shuffle_buffer=config.data.shuffle_buffer,
        **arguments,
    )


def make_trainer(
    plan: Plan,
    student_folder: Path,
    teacher: Callable[[], LiveTeacher],
    data: RunData,
    train_loader: TrainLoader | StreamLoader,
    world: World,
) -> Trainer:
    """Student engine, taps, loader and method, put together; `teacher` is called only where the method needs one."""
    config, method = plan.config, plan.method
    student = load_model(str(student_folder), dtype=plan.dtype)
    if config.student.lora.rank is not None:
        add_lora(student, config.student.lora, config.seed)
    engine = build_engine(student, plan.ds_config, config.train)
    loader: Loader = train_loader
    if config.data.on_policy > 0:
        loader = OnPolicyLoader(
            train_loader,
            engine.module,
            share=config.data.on_policy,
            seed=config.seed,
            max_new_tokens=config.data.max_length - config.data.max_prompt_length,
            end_token_id=data.tokenizer.eos_token_id,
            pad_token_id=data.tokenizer.pad_token_id,
            rank=world.rank,
            world_size=world.size,
            synced=engine.zero_optimization_stage() == 3,
        )
    # The recorders come last: DeepSpeed's own hooks must sit inside them.
    tapped_teacher = None
    if method.needs_teacher:
        live = teacher()
        recorder = Recorder(live.model, method.teacher_taps)
        tapped_teacher = TappedModel(live.forward, recorder, vocabulary=plan.vocabulary)
    return Trainer(
        engine=engine,
        student=TappedModel(engine, Recorder(engine.module, method.student_taps), vocabulary=plan.vocabulary),
        teacher=tapped_teacher,
        method=method,
        loader=loader,
        settings=config.train,
        seed=config.seed,
        folder=plan.folder,
        world=world,
        validation=validation_batches(
            data.valid_items,
            pad_token_id=data.tokenizer.pad_token_id,
            batch_size=plan.split.micro_batch_size,
            rank=world.rank,
            world_size=world.size,
        ),
    )


def make_score_book(plan: Plan, data: RunData, world: World) -> ScoreBook:
    """The scoring of the run's models."""
    return ScoreBook(plan.folder, data.tests, data.valid, plan.config.scoring, plan.config.data, world)


def load_scored(folder: Path, plan: Plan, world: World) -> PreTrainedModel:
    """A model to score, in the number format it was trained in."""
    return load_model(str(folder), dtype=plan.dtype, device=world.device)
