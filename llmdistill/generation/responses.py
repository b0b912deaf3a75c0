"""Generates a teacher's answers as training data (sequence-level distillation, Kim & Rush 2016).

The generation can be resumed, and a provenance record beside the answers says which model wrote them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from llmdistill.config import ResponseConfig
from llmdistill.data.examples import Example
from llmdistill.data.instruct import EncodedPrompts, Limits, encode_prompts
from llmdistill.data.prompts import answer_ends, is_chat
from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.files import write_json, write_text
from llmdistill.fingerprints import content_fingerprint, file_sha256, fingerprint
from llmdistill.generation import decode, response_file
from llmdistill.generation.decode import Decoding, Engine, HuggingFaceEngine, answer_batches
from llmdistill.generation.response_file import parts_folder, provenance_file
from llmdistill.generation.response_rows import (
    answered_row,
    final_answers,
    learnable_row,
    prompt_row,
    without_learned_turns,
)
from llmdistill.generation.vllm_engine import VllmEngine, choose_engine
from llmdistill.messages import say
from llmdistill.models.companions import download, generation_settings
from llmdistill.models.configs import load_config
from llmdistill.models.families import is_causal
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.progress import Activity
from llmdistill.runtime.devices import TORCH_DTYPES, choose_dtype, installed_versions
from llmdistill.runtime.distributed import World, barrier, on_main

# vLLM schedules prompts itself, so its batch is only what an interruption may lose.
_BATCH_SIZES = {"hf": 32, "vllm": 1024}


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One request with all settings resolved."""

    teacher: str
    data: str
    output: Path
    settings: ResponseConfig
    """The settings, with engine, dtype, batch_size and prompt resolved where they were auto or None."""
    examples: list[Example]
    """The examples whose prompts are within the limit, in order."""
    prompts: EncodedPrompts
    batches: list[list[int]]
    tokenizer: PreTrainedTokenizerBase
    ends: list[int]
    """The tokens that end an answer."""


def generate_responses(
    model: str,
    data: str,
    output: Path,
    settings: ResponseConfig,
) -> dict[str, Any]:
    """Write the model's answer to every prompt of a set, in a file that can be used as data.train.

    The file has one row per prompt within the limit, in the set's order and format: instruction, input, output; or
    prompt, completion; or messages that end with the answer. It is written when all answers are generated;
    `response_file` describes the files beside it, and those before it exists. If the finished file of this request
    exists, nothing is generated.

    Args:
        model: folder or hub name of a causal LM, or embedded:teacher.
        data: a set as in data.train; its answers, if it has any, are ignored.
        output: the JSONL file to write.
        settings: the settings of the generation.

    Returns:
        The record in OUTPUT.provenance.json, the same on every rank.

    Raises:
        UserError: the settings, prompts or model are invalid (which shows before the weights are loaded), or the output
            belongs to another request.
    """
    job = _plan_job(model, data, output, settings)
    # Rank 0 decides what is left, because all ranks share the batches by their place in one list.
    request, finished, done = on_main(lambda: _claim(job))
    if finished:
        say(f"{output} holds these answers already; nothing to do.", aside=True)
    else:
        left = [number for number in range(len(job.batches)) if number not in done]
        if done:
            there = f"{len(done)} of {len(job.batches)} batches are there already, in {parts_folder(output)}"
            say(f"{there}; going on.", aside=True)
        _answer(job, left)
        barrier()  # rank 0 reads the files of all ranks
        on_main(lambda: _finish(job, request))
    record = on_main(lambda: response_file.read_provenance(output))
    assert record is not None, "the answers have just been written"
    return record


def _plan_job(model: str, data: str, output: Path, settings: ResponseConfig) -> _Job:
    """Resolve the request, and check everything that can be checked without the weights."""
    world = World.current()
    folder = locate(model)
    engine = choose_engine(
        settings.engine, folder, no_repeat_ngram_size=settings.no_repeat_ngram_size, world_size=world.size
    )
    dtype = choose_dtype(settings.dtype, world.device)
    batch_size = _BATCH_SIZES[engine] if settings.batch_size is None else settings.batch_size
    config = load_config(folder)
    if not is_causal(config):
        raise UserError(f"{folder}: {config.model_type} models do not generate text; give a causal language model")
    decode.check_context(config, settings.max_length)
    examples = read_examples(data, needs_answer=False)[: settings.limit]
    tokenizer = load_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{model}: the tokenizer has no end token; set eos_token in its tokenizer_config.json")
    limits = Limits.of(settings, [tokenizer])
    prompts = encode_prompts(examples, tokenizer, limits)
    return _Job(
        teacher=model,
        data=data,
        output=output,
        settings=replace(settings, engine=engine, dtype=dtype, batch_size=batch_size, prompt=limits.prompt),
        examples=[examples[index] for index in prompts.indices],
        prompts=prompts,
        batches=decode.plan_batches(prompts.ids, batch_size),
        tokenizer=tokenizer,
        ends=answer_ends(tokenizer, generation_settings(folder)),
    )


def _claim(job: _Job) -> tuple[dict[str, Any], bool, set[int]]:
    """Return the request, whether its output is finished, and the finished batches."""
    request = {
        "teacher_fingerprint": fingerprint(download(locate(job.teacher))),
        "data_fingerprint": content_fingerprint([prompt_row(example) for example in job.examples]),
        # The ids of the prompts also depend on the tokenizer and its chat template.
        "prompt_ids_fingerprint": content_fingerprint(job.prompts.ids),
        "settings": asdict(job.settings),
    }
    finished = response_file.claim_output(job.output, request)
    return request, finished, set() if finished else set(response_file.read_batches(parts_folder(job.output)))


def _answer(job: _Job, left: list[int]) -> None:
    """Generate this rank's share of the remaining batches."""
    # In turn, because batches are sorted by length: neighbors take about the same time.
    share = left[World.current().rank :: World.current().size]
    # Before the weights are loaded.
    if not share:
        return
    settings, folder, dtype = job.settings, locate(job.teacher), TORCH_DTYPES[job.settings.dtype]
    decoding = Decoding(
        sample=settings.decoding == "sample",
        max_prompt_length=settings.max_prompt_length,
        max_length=settings.max_length,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        no_repeat_ngram_size=settings.no_repeat_ngram_size,
    )
    engine: Engine
    if settings.engine == "hf":
        model = load_model(folder, dtype=dtype, device=World.current().device)
        engine = HuggingFaceEngine(model, job.tokenizer, decoding)
    else:
        engine = VllmEngine(folder, job.ends, decoding, dtype=dtype, seed=settings.seed)
    answered = sum(len(batch) for batch in job.batches) - sum(len(job.batches[number]) for number in left)
    # Rank 0 alone shows the progress, so it counts the prompts of all ranks, assuming that they are about as fast.
    with Activity("Answering", len(job.prompts.ids), "prompts", done=answered) as activity:
        finished = answer_batches(engine, job.prompts.ids, job.batches, share, settings.seed)
        for round_number, (number, rows) in enumerate(finished):
            response_file.append_batch(parts_folder(job.output), World.current().rank, number, rows)
            together = left[round_number * World.current().size : (round_number + 1) * World.current().size]
            activity.advance(sum(len(job.batches[other]) for other in together))


def _finish(job: _Job, request: dict[str, Any]) -> None:
    """Write the file, then its record, then remove the parts; an interruption in between loses nothing."""
    batches = response_file.read_batches(parts_folder(job.output))
    answers = {index: ids for rows in batches.values() for index, ids in rows.items()}
    missing = len(job.examples) - len(answers)
    if missing:
        raise UserError(
            f"{missing} answers are missing from {parts_folder(job.output)}: every rank must see the same folder; "
            "start the command again to have them redone"
        )
    rows = [answers[index] for index in range(len(job.examples))]
    texts = final_answers(rows, job.tokenizer, job.ends)
    lines = []
    for example, ids, text in zip(map(without_learned_turns, job.examples), rows, texts, strict=True):
        if job.settings.reasoning == "keep" and is_chat(example, str(job.settings.prompt)):
            lines.append(learnable_row(example, ids, text, job.tokenizer, job.ends))
        else:
            lines.append(answered_row(example, text))
    write_text(job.output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    record = {
        "teacher": job.teacher,
        "data": job.data,
        **request,
        "prompts": len(rows),
        "dropped": job.prompts.dropped,
        "truncated": job.prompts.truncated,
        "empty_answers": texts.count(""),
        "unfinished_answers": sum(not ids or ids[-1] not in job.ends for ids in rows),
        "engine": job.settings.engine,
        "generated_tokens": sum(map(len, rows)),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": installed_versions(("llmdistill", "torch", "transformers", "vllm")),
        "output_sha256": file_sha256(job.output),
    }
    # The record comes after the file whose sha256 it has, and the parts stay until both are there.
    write_json(provenance_file(job.output), record)
    shutil.rmtree(parts_folder(job.output), ignore_errors=True)
