"""Generates a teacher's answers as training data (sequence-level distillation, Kim & Rush 2016).

The generation can be resumed, and a provenance record beside the answers says which model wrote them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from llmdistill.config import ResponseConfig
from llmdistill.data.examples import Example
from llmdistill.data.instruct import EncodedPrompts, check_lengths, encode_example_prompts
from llmdistill.data.sources import read_prompts
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.files import write_json, write_text
from llmdistill.fingerprints import content_fingerprint, file_sha256
from llmdistill.generation.decode import (
    Decoding,
    Engine,
    HuggingFaceEngine,
    answer_batch,
    check_context,
    decode_answers,
    plan_batches,
)
from llmdistill.generation.parts import append_batch, claim_output, parts_folder, read_batches, remove_parts
from llmdistill.generation.provenance import model_fingerprint, read_provenance, side_file
from llmdistill.generation.rows import answered_row, prompt_row
from llmdistill.generation.vllm_engine import VllmEngine, choose_engine
from llmdistill.models.configs import load_config
from llmdistill.models.families import family_of
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.runtime.distributed import World, barrier, broadcast_object, on_main

Log = Callable[[str], None]

_BATCH_SIZES = {"hf": 32, "vllm": 1024}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class _Job:
    """One request with all settings resolved."""

    teacher: str
    folder: Path
    data: str
    output: Path
    settings: ResponseConfig
    """The settings, with engine, dtype and batch_size resolved where they were auto or None."""
    decoding: Decoding
    examples: list[Example]
    """The examples whose prompts are kept, in order."""
    prompts: EncodedPrompts
    batches: list[list[int]]
    tokenizer: PreTrainedTokenizerBase
    world: World

    @property
    def max_new_tokens(self) -> int:
        return self.settings.max_length - self.settings.max_prompt_length


def generate_responses(
    model: str,
    data: str,
    output: Path,
    settings: ResponseConfig,
    *,
    world: World | None = None,
    log: Log | None = None,
) -> dict[str, Any]:
    """Write the model's answer to every prompt of a set, in a file that can be used as data.train.

    The file has one row per kept prompt, in the set's order and form: instruction, input, output; or prompt,
    completion; or messages that end with the answer. The file is written when all answers are generated. Until then
    OUTPUT.parts holds every finished batch, and the same request resumes from these batches on any number of ranks and
    writes the same file. OUTPUT.provenance.json beside the file says which model wrote the answers, to which prompts
    and with which settings. If the finished file of this request already exists, nothing is generated.

    Args:
        model: folder or hub name of a causal LM, or embedded:teacher.
        data: a set as in data.train; its answers, if it has any, are ignored.
        output: the JSONL file to write.
        settings: the settings of the generation.
        world: the rank and the number of ranks; every rank must call this function. None: a single process.
        log: is called with one line of text at a time.

    Returns:
        The record in OUTPUT.provenance.json, the same on every rank.

    Raises:
        UserError: the settings, prompts or model are invalid (found before the weights are loaded), or the output
            belongs to another request.
    """
    job = _prepare(model, data, output, settings, world or _alone())
    request, finished, done = _claim(job)
    say = log or (lambda _: None)
    if finished:
        say(f"{output} holds these answers already; nothing to do.")
    else:
        left = [number for number in range(len(job.batches)) if number not in done]
        if done:
            say(f"{len(done)} of {len(job.batches)} batches are there already, in {parts_folder(output)}; going on.")
        _answer(job, left)
        barrier()
        if job.world.is_main:
            _finish(job, request)
    record = read_provenance(output) if job.world.is_main else None
    return dict(broadcast_object(record))


def _alone() -> World:
    return World(rank=0, size=1, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _prepare(model: str, data: str, output: Path, settings: ResponseConfig, world: World) -> _Job:
    """Resolve the request, and check everything that can be checked without the weights."""
    check_lengths(settings.max_prompt_length, settings.max_length)
    folder = locate(model)
    engine = choose_engine(
        settings.engine, folder, no_repeat_ngram_size=settings.no_repeat_ngram_size, world_size=world.size
    )
    settings = replace(
        settings,
        engine=engine,
        dtype=_number_format(world.device) if settings.dtype == "auto" else settings.dtype,
        batch_size=_BATCH_SIZES[engine] if settings.batch_size is None else settings.batch_size,
    )
    decoding = _decoding(settings)
    _check_model(folder, settings.max_length)
    examples = read_prompts(locate(data))[: settings.limit]
    tokenizer = load_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{model}: the tokenizer has no end token; set eos_token in its tokenizer_config.json")
    prompts = encode_example_prompts(
        examples, tokenizer, max_prompt_length=settings.max_prompt_length, long_prompts=settings.long_prompts
    )
    return _Job(
        teacher=model,
        folder=folder,
        data=data,
        output=output,
        settings=settings,
        decoding=decoding,
        examples=[examples[index] for index in prompts.kept],
        prompts=prompts,
        batches=plan_batches(prompts.ids, decoding.batch_size),
        tokenizer=tokenizer,
        world=world,
    )


def _number_format(device: torch.device) -> Any:
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


def _decoding(settings: ResponseConfig) -> Decoding:
    assert settings.batch_size is not None
    return Decoding(
        sample=settings.decoding == "sample",
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        no_repeat_ngram_size=settings.no_repeat_ngram_size,
        batch_size=settings.batch_size,
    )


def _check_model(folder: Path, max_length: int) -> None:
    config = load_config(folder)
    if not family_of(config).causal:
        raise UserError(f"{folder}: {config.model_type} models do not generate text; give a causal language model")
    check_context(config, max_length)


def _claim(job: _Job) -> tuple[dict[str, Any], bool, set[int]]:
    """Return the request, whether its output is finished, and the finished batches, as rank 0 finds them."""

    def look() -> tuple[dict[str, Any], bool, set[int]]:
        request = _request(job)
        finished = claim_output(job.output, request)
        return request, finished, set() if finished else set(read_batches(job.output))

    return on_main(look, job.world)


def _request(job: _Job) -> dict[str, Any]:
    """Return everything that determines the answers."""
    return {
        "teacher_fingerprint": model_fingerprint(job.folder),
        "data_fingerprint": content_fingerprint([prompt_row(example) for example in job.examples]),
        # The ids of the prompts also depend on the tokenizer and its chat template.
        "prompt_ids_fingerprint": content_fingerprint(job.prompts.ids),
        "settings": asdict(job.settings),
    }


def _answer(job: _Job, left: list[int]) -> None:
    """Generate this rank's share of the remaining batches."""
    share = left[job.world.rank :: job.world.size]
    if not share:
        return
    engine = _load_engine(job)
    answered = sum(len(batch) for batch in job.batches) - sum(len(job.batches[number]) for number in left)
    # Only a terminal shows a progress bar. Rank 0 counts the prompts of all ranks, as their shares are similar.
    with tqdm(
        total=len(job.prompts.ids),
        initial=answered,
        unit="prompt",
        disable=not (job.world.is_main and sys.stderr.isatty()),
        leave=False,
    ) as bar:
        for turn, number in enumerate(share):
            rows = answer_batch(engine, job.prompts.ids, job.batches, number, job.settings.seed)
            append_batch(job.output, job.world.rank, number, rows)
            together = left[turn * job.world.size : (turn + 1) * job.world.size]
            bar.update(sum(len(job.batches[other]) for other in together))


def _load_engine(job: _Job) -> Engine:
    dtype = _DTYPES[job.settings.dtype]
    if job.settings.engine == "vllm":
        return VllmEngine(
            job.folder,
            job.tokenizer,
            job.decoding,
            max_new_tokens=job.max_new_tokens,
            max_length=job.settings.max_length,
            dtype=dtype,
            seed=job.settings.seed,
        )
    model = load_model(job.folder, dtype=dtype, device=job.world.device)
    return HuggingFaceEngine(model, job.tokenizer, job.decoding, max_new_tokens=job.max_new_tokens)


def _finish(job: _Job, request: dict[str, Any]) -> None:
    """Write the file, then its record, then remove the parts; an interruption in between loses nothing."""
    answers = {index: ids for rows in read_batches(job.output).values() for index, ids in rows.items()}
    missing = len(job.examples) - len(answers)
    if missing:
        raise UserError(
            f"{missing} answers are missing from {parts_folder(job.output)}: every rank must see the same folder; "
            "start the command again to have them redone"
        )
    rows = [answers[index] for index in range(len(job.examples))]
    texts = decode_answers(rows, job.tokenizer)
    lines = [answered_row(example, text) for example, text in zip(job.examples, texts, strict=True)]
    write_text(job.output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    record = {
        "teacher": job.teacher,
        "data": job.data,
        **request,
        "prompts": len(rows),
        "dropped": job.prompts.dropped,
        "truncated": job.prompts.truncated,
        "empty_answers": texts.count(""),
        "unfinished_answers": sum(ids[-1:] != [job.tokenizer.eos_token_id] for ids in rows),
        "engine": job.settings.engine,
        "generated_tokens": sum(map(len, rows)),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": _versions("llmdistill", "torch", "transformers", "vllm"),
        "output_sha256": file_sha256(job.output),
    }
    write_json(side_file(job.output), record)
    remove_parts(job.output)


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
