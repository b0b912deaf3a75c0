"""The data of a run, from its plan: what is read and tokenised once, and the batches made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from llmdistill.batch import Batch, Loader
from llmdistill.data.collate import collate, collate_packed
from llmdistill.data.corpus import Corpus, tokenise
from llmdistill.data.instruct import Encoded, Example, InstructData, encode
from llmdistill.data.prefetch import Prefetched
from llmdistill.data.sampler import TrainLoader
from llmdistill.data.sources import read_examples
from llmdistill.data.stream import StreamLoader, check_stream
from llmdistill.data.text import TextLoader
from llmdistill.data.text import validation_batches as text_validation_batches
from llmdistill.data.validation import validation_batches
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.generation.provenance import check_teacher
from llmdistill.generation.rollout import OnPolicyLoader
from llmdistill.methods import METHODS
from llmdistill.models.load import load_tokenizer
from llmdistill.run.plan import Plan
from llmdistill.runtime.distributed import World, on_main
from llmdistill.tasks.answers import check_sets
from llmdistill.tasks.scores import VALID


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
    text: Corpus | None = None
    """The training set of a run on text, once it is tokenised."""
    valid_text: Corpus | None = None
    """Its validation set."""


def read_data(plan: Plan) -> RunData:
    """Read and check every file of a run, and its tokenizers.

    Raises:
        UserError: a missing, malformed or empty file, or prompts over the limit.
    """
    data = plan.config.data
    teacher_tokenizer = load_tokenizer(plan.teacher_path)
    shared = plan.tokenizer_path == plan.teacher_path
    tokenizer = teacher_tokenizer if shared else load_tokenizer(plan.tokenizer_path)
    if data.kind == "text":
        return RunData(tokenizer, teacher_tokenizer, None, [], [], {}, "")
    limits = _limits(plan)
    valid = [] if data.valid is None else read_examples(locate(data.valid))
    valid_items = encode(valid, tokenizer, **limits).items if valid else []
    tests = {name: read_examples(locate(path)) for name, path in data.tests.items()}
    scored = {**({VALID: valid} if valid else {}), **tests}
    for each in [tokenizer] if shared else [tokenizer, teacher_tokenizer]:
        check_sets(scored, each, plan.config.scoring, **limits)
    if data.streaming:
        check_stream(locate(data.train))
    if data.streaming or not plan.trains:
        report = "streamed while training" if data.streaming else "not read, as nothing is trained"
        return RunData(tokenizer, teacher_tokenizer, None, valid, valid_items, tests, report)
    train = encode(read_examples(locate(data.train)), tokenizer, **limits)
    return RunData(tokenizer, teacher_tokenizer, train, valid, valid_items, tests, train.report())


def tokenise_texts(plan: Plan, data: RunData, world: World) -> RunData:
    """The texts of a run as tokens: made by one rank where the cache lacks them, then read by all.

    Raises:
        UserError: a text that cannot be read or is too short.
    """
    settings = plan.config.data
    if settings.kind != "text":
        return data

    def tokenised(reference: str, fraction: float) -> Corpus:
        make = partial(
            tokenise,
            locate(reference),
            data.tokenizer,
            field=settings.text.field,
            cache_dir=settings.text.cache_dir,
            fraction=fraction,
            seed=plan.config.seed,
        )
        on_main(lambda: make().report(), world)
        return make()

    fraction = settings.text.fraction
    text = tokenised(settings.train, fraction)
    valid = None if settings.valid is None else tokenised(settings.valid, 1.0)
    share = "" if fraction == 1 else f"{100 * fraction:.4g} % of it: "
    return replace(data, text=text, valid_text=valid, report=share + text.report())


def count_steps(plan: Plan, data: RunData, world: World) -> Plan:
    """The plan with train.epochs as a number of steps, now that its text is tokenised; other plans as they are.

    The same text gives the same number, so a run that is resumed finds its own again.

    Raises:
        UserError: the text is too short.
    """
    if data.text is None or not plan.trains:
        return plan
    config, train = plan.config, plan.config.train
    sequences = len(_text_loader(plan, data, world))  # also where steps are given: a text may be too short
    if train.epochs is None:
        return plan
    steps = -(-train.epochs * sequences // train.global_batch_size)
    note = f"{train.epochs} epoch(s) of {sequences:,} sequences are {steps:,} steps"
    counted = replace(config, train=replace(train, steps=steps, epochs=None))
    return replace(plan, config=counted, notes=[*plan.notes, note])


def check_responses(plan: Plan) -> list[str]:
    """Warnings about answers that another model than the run's teacher wrote."""
    if not METHODS[plan.config.method].teacher_writes:
        return []
    warning = check_teacher(locate(plan.config.data.train), plan.teacher_path)
    return [] if warning is None else [warning]


def make_loader(plan: Plan, data: RunData, world: World) -> TrainLoader[Encoded] | StreamLoader | TextLoader:
    """The training batches of this rank."""
    if data.text is not None:
        return _text_loader(plan, data, world)
    config, arguments = plan.config, _share(plan, world)
    arguments["pad_token_id"] = data.tokenizer.pad_token_id
    packing = config.data.packing
    arguments["collate"] = partial(collate_packed, max_length=config.data.max_length) if packing else collate
    arguments |= {"spread": packing, "bucket_steps": 1 if packing else config.data.bucket_steps}
    if data.train is not None:
        return TrainLoader(data.train.items, **arguments)
    return StreamLoader(
        locate(config.data.train),
        data.tokenizer,
        **_limits(plan),
        shuffle_buffer=config.data.shuffle_buffer,
        **arguments,
    )


def _text_loader(plan: Plan, data: RunData, world: World) -> TextLoader:
    assert data.text is not None, "the text is not tokenised yet"
    try:
        return TextLoader(data.text, data.tokenizer, **_reading(plan), **_share(plan, world))
    except UserError as error:
        fraction = plan.config.data.text.fraction
        if fraction == 1:
            raise
        raise UserError(f"of data.text.fraction {fraction}: {error}; or raise the fraction") from error


def _share(plan: Plan, world: World) -> dict[str, Any]:
    """Which batches of a run are this rank's."""
    return {
        "seed": plan.config.seed,
        "global_batch_size": plan.config.train.global_batch_size,
        "micro_batch_size": plan.split.micro_batch_size,
        "rank": world.rank,
        "world_size": world.size,
    }


def prepare_loader(
    plan: Plan,
    loader: TrainLoader[Encoded] | StreamLoader | TextLoader,
    engine: Any,
    data: RunData,
    world: World,
) -> Loader:
    """The training batches as the loop takes them: made ahead in a thread, or answered by the student."""
    config = plan.config
    if config.data.on_policy == 0:
        locate = partial(Batch.with_label_rows, shift=plan.method.shift)
        return Prefetched(loader, steps=config.train.steps, device=world.device, prepare=locate)
    assert not isinstance(loader, TextLoader)
    return OnPolicyLoader(
        loader,
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


def make_validation(plan: Plan, data: RunData, world: World) -> list[Batch]:
    batch_size = plan.split.micro_batch_size
    if data.valid_text is not None:
        return text_validation_batches(
            data.valid_text,
            data.tokenizer,
            **_reading(plan),
            limit=plan.config.data.text.valid_sequences,
            batch_size=batch_size,
            rank=world.rank,
            world_size=world.size,
        )
    return validation_batches(
        data.valid_items,
        pad_token_id=data.tokenizer.pad_token_id,
        batch_size=batch_size,
        rank=world.rank,
        world_size=world.size,
    )


def _reading(plan: Plan) -> dict[str, Any]:
    """How text becomes batches."""
    text = plan.config.data.text
    return {
        "objective": "next" if plan.causal else "masked",
        "max_length": plan.config.data.max_length,
        "mask_share": text.mask_share,
        "whole_words": text.whole_words,
        "next_sentence": plan.objective.sequences is not None,
    }


def _limits(plan: Plan) -> dict[str, Any]:
    data = plan.config.data
    return {
        "max_prompt_length": data.max_prompt_length,
        "max_length": data.max_length,
        "long_prompts": data.long_prompts,
    }
