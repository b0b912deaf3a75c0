"""Training data that a teacher writes itself: chats of an instruct model, texts of a base model.

A chat is written as in Magpie (Xu et al. 2024, arXiv 2406.08464): from the chat template up to the user's text the
model samples the user's turn, and then the answer. Rows are tried in order, each with random numbers of its own,
and a row is kept or dropped by the rows before it, so the file depends neither on the batches nor on the ranks.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.config.generation import WriteConfig
from llmdistill.config.marks import find_marked
from llmdistill.data.begin import begin_tokens
from llmdistill.data.chat_messages import Turn
from llmdistill.data.examples import Example
from llmdistill.data.instruct import NO_LIMIT, Limits, encode_prompts
from llmdistill.data.near_duplicates import NearDuplicates
from llmdistill.data.prompts import CHAT, answer_ends
from llmdistill.data.sources import DataKind
from llmdistill.embedded import locate
from llmdistill.errors import CannotWrite, UserError
from llmdistill.files import write_json, write_text
from llmdistill.fingerprints import file_sha256, fingerprint
from llmdistill.generation import response_file
from llmdistill.generation.decode import Decoding
from llmdistill.generation.response_file import parts_folder, provenance_file
from llmdistill.generation.response_rows import final_answers, learnable_row
from llmdistill.generation.row_sampling import HuggingFaceRows, RowSampler, Sample, VllmRows
from llmdistill.generation.vllm_engine import EngineName, VllmEngine, choose_engine
from llmdistill.messages import say
from llmdistill.models.chat_templates import user_turn
from llmdistill.models.companions import download, generation_settings
from llmdistill.models.configs import load_config
from llmdistill.models.families import is_causal
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.progress import Activity
from llmdistill.runtime.devices import TORCH_DTYPES, choose_dtype, installed_versions
from llmdistill.runtime.distributed import World, gather_objects, on_main

ROWS = 1_000
"""The default number of rows."""
TEXT_TOKENS = 512
"""The default limit of a text."""
_BATCH_SIZES = {"cpu": 32, "cuda": 512, "vllm": 1024}
_NOISE = 0.85
"""A model whose samples have this share of the nats of uniform ones writes noise. SmolLM2-135M has 0.2 in chats, the
embedded teacher 0.3, and a random model 1.0."""
_FRUITLESS = 128
"""So many rows in succession that are dropped end the writing."""

Reason = Literal["unfinished", "empty", "with marks of the template", "near-duplicate"]
"""Why a row is dropped."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """How the user of a command says what is written, for messages."""

    settings: str
    """What stands before the name of a setting."""
    texts: str | None
    """Lets the model write texts."""
    data: str | None
    """Names data, so that the model writes none."""

    def advise(self, *first: str, texts: bool = False) -> str:
        """Join ways out; `texts`: that the model writes texts is one of them."""
        ways = [*first]
        if texts and self.texts is not None:
            ways.append(f"have it write texts ({self.texts})")
        if self.data is not None:
            ways.append(f"give data ({self.data})")
        return ", or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)


OF_WRITE = Flags(settings="--", texts="--kind text", data=None)
OF_RUNS = Flags(settings="--data.write.", texts="--data.kind text", data="--data.train FILE")
OF_COMPRESS = Flags(settings="", texts=None, data="--calibration.data FILE")


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One request with all settings resolved."""

    teacher: str
    kind: DataKind
    output: Path
    parts: Path
    """The folder of the rows as they were sampled, kept or not."""
    flags: Flags
    settings: WriteConfig
    engine: EngineName
    dtype: Literal["fp32", "bf16"]
    batch_size: int
    keeps_unfinished: bool
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    opening: list[int]
    """The tokens after which the model writes the user's turn, or a text."""
    turn_ends: list[int]
    """The tokens that end what it writes there."""
    turn_end_text: str
    """The text that ends a user's turn where the template ends it by no token of its own; empty where it does."""
    ends: list[int]
    """The tokens that end an answer."""
    rows: int | None
    """The number of rows to write; None if only the tokens are counted."""
    most_tokens: int
    """Largest number of tokens of the user's turn, or of a text."""
    longest: int
    """Largest number of tokens of a row, with what the template writes."""

    def decoding(self, *, of_answer: bool) -> Decoding:
        """Return how the answer, or what comes before it, is sampled."""
        settings = self.settings
        limit = settings.max_answer_tokens if of_answer else self.most_tokens
        temperature = settings.temperature if of_answer else settings.prompt_temperature
        top_p = settings.top_p if of_answer else settings.prompt_top_p
        return Decoding(True, self.longest - limit, self.longest, temperature, top_p, batch_size=self.batch_size)


class _Attempt(NamedTuple):
    """A row as it was sampled, kept or not."""

    turn: Sample
    """The user's turn, or the text."""
    answer: Sample | None
    """The answer; None in a text, and where the turn is dropped."""


@dataclass
class _Sieve:
    """Decides in their order which rows are kept."""

    job: _Job
    texts: list[str] = field(default_factory=list)
    """The user's turn, or text, of each row up to now; empty for one that is dropped."""
    dropped: Counter[Reason] = field(default_factory=Counter)
    kept: list[int] = field(default_factory=list)
    """The numbers of the rows that are kept."""
    tokens: int = 0
    """Of the rows that are kept, without what the template writes."""
    attempts: list[_Attempt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._near = NearDuplicates(self.job.settings.similarity)

    def judge_turns(self, turns: Sequence[Sample]) -> list[int]:
        """Judge the next rows by what was written first; return the places of those that stay."""
        staying = []
        for place, turn in enumerate(turns):
            text, reason = self._judge_turn(turn)
            self.texts.append(text)
            if reason is None:
                staying.append(place)
            else:
                self.dropped[reason] += 1
        return staying

    def _judge_turn(self, turn: Sample) -> tuple[str, Reason | None]:
        job, tokenizer = self.job, self.job.tokenizer
        ended = turn.ids[-1:] != [] and turn.ids[-1] in job.turn_ends
        ids = turn.ids[:-1] if ended else turn.ids
        if set(ids) & {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}:
            return "", "with marks of the template"
        text = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        if job.turn_end_text and job.turn_end_text in text:
            text, ended = text.partition(job.turn_end_text)[0], True
        is_text = job.kind == "text"
        if not ended and not (is_text and job.keeps_unfinished):
            return "", "unfinished"
        text = text.strip()
        if not text:
            return "", "empty"
        folded = tokenizer(text.casefold(), add_special_tokens=False, verbose=False)["input_ids"]
        return (text, None) if self._near.add(folded) is None else ("", "near-duplicate")

    def add(self, attempts: Sequence[_Attempt]) -> None:
        """Add the next rows, whose turns are judged, with their answers."""
        job = self.job
        for attempt in attempts:
            number = len(self.attempts)
            self.attempts.append(attempt)
            if not self.texts[number]:
                continue
            if attempt.answer is not None:
                ids = attempt.answer.ids
                if not (job.keeps_unfinished or (ids and ids[-1] in job.ends)):
                    self.dropped["unfinished"] += 1
                    continue
                if not final_answers([ids], job.tokenizer, job.ends)[0]:
                    self.dropped["empty"] += 1
                    continue
            self.kept.append(number)
            self.tokens += len(attempt.turn.ids) + (0 if attempt.answer is None else len(attempt.answer.ids))

    @property
    def is_full(self) -> bool:
        settings = self.job.settings
        rows = self.job.rows
        return (rows is not None and len(self.kept) >= rows) or (
            settings.tokens is not None and self.tokens >= settings.tokens
        )

    def chosen(self) -> list[int]:
        """Return the numbers of the rows to write: the first ones that are enough."""
        settings, tokens, chosen = self.job.settings, 0, list[int]()
        rows = self.job.rows
        for number in self.kept[:rows]:
            if settings.tokens is not None and tokens >= settings.tokens:
                break
            chosen.append(number)
            turn, answer = self.attempts[number]
            tokens += len(turn.ids) + (0 if answer is None else len(answer.ids))
        return chosen

    def share_written(self) -> float:
        """Return which share of the request is done."""
        settings = self.job.settings
        rows = self.job.rows
        shares = [0.0 if rows is None else len(self.kept) / rows]
        shares.append(0.0 if settings.tokens is None else self.tokens / settings.tokens)
        return min(1.0, max(shares))

    def sampled_tokens(self) -> int:
        return sum(len(sample.ids) for attempt in self.attempts for sample in attempt if sample is not None)

    def nats(self) -> float:
        """Return the mean negative log-probability of the tokens that were written from nothing."""
        turns = [attempt.turn for attempt in self.attempts]
        return sum(turn.nats for turn in turns) / max(1, sum(len(turn.ids) for turn in turns))


def write_data(
    model: str,
    output: Path,
    settings: WriteConfig,
    *,
    kind: DataKind | Literal["auto"] = "auto",
    flags: Flags = OF_WRITE,
    kept_parts: Path | None = None,
) -> dict[str, Any]:
    """Write a file of training data by a model; every rank must call this function.

    `response_file` describes the file's record and what exists before it. If the finished file of this request exists,
    nothing is written.

    Args:
        model: folder or hub name of a causal LM, or embedded:teacher.
        output: the JSONL file to write: rows of messages, or of a text.
        settings: what is written, and how it is sampled.
        kind: instructions for chats, text; auto: chats if the tokenizer has a chat template, else texts.
        flags: how the user says all this.
        kept_parts: a folder for the rows as they are sampled, which stays: a request for more rows by the same
            settings goes on from there. By default OUTPUT.parts, which is removed in the end.

    Returns:
        The record in OUTPUT.provenance.json, the same on every rank.

    Raises:
        UserError: the model cannot write such data, the settings do not fit it, or the output belongs to another
            request.
    """
    job = _plan_job(model, output, settings, kind, flags)
    job = replace(job, parts=kept_parts or job.parts)
    request = request_of(model, settings, job.kind)

    def claim() -> tuple[bool, dict[int, Any]]:
        finished = response_file.claim_output(
            output,
            request,
            command="llmdistill write",
            begun=request_of(model, without_length(settings), job.kind),
            kept_parts=kept_parts,
            flags=flags.settings,
        )
        return finished, {} if finished else response_file.read_batches(job.parts)

    finished, rounds = on_main(claim)
    if finished:
        say(f"{output} is written already; nothing to do.", aside=True)
    else:
        sieve = _restore(job, rounds)
        if rounds:
            there = f"{len(sieve.kept):,} rows are there already, in {job.parts}"
            say(f"{there}; going on.", aside=True)
        _write_rounds(job, sieve)
        on_main(lambda: _finish(job, sieve, request))
        if kept_parts is None:
            on_main(lambda: shutil.rmtree(job.parts, ignore_errors=True))
    record = on_main(lambda: response_file.read_provenance(output))
    assert record is not None, "the rows have just been written"
    return record


def request_of(model: str, settings: WriteConfig, kind: DataKind) -> dict[str, Any]:
    """Return what determines the rows, as plain JSON values: the model and the settings that are not only speed."""
    free = find_marked(WriteConfig, "free")
    return {
        "teacher_fingerprint": fingerprint(download(locate(model))),
        "kind": kind,
        "settings": {name: value for name, value in asdict(settings).items() if name not in free},
    }


def without_length(settings: WriteConfig) -> WriteConfig:
    """Return the settings that determine each row, however many rows are written."""
    return replace(settings, rows=None, tokens=None)


def choose_kind(model: str, kind: DataKind | Literal["auto"], flags: Flags = OF_WRITE) -> DataKind:
    """Return the kind of data that a model writes; a CannotWrite if it is not able to write that."""
    folder = locate(model)
    config = load_config(folder)
    if not is_causal(config):
        raise CannotWrite(f"{model}: {config.model_type} models write no text; take a causal language model")
    has_template = load_tokenizer(folder).chat_template is not None
    if kind == "instructions" and not has_template:
        raise CannotWrite(
            f"{model} cannot write instructions, because its tokenizer has no chat template; "
            f"{flags.advise('take an instruct model', texts=True)}"
        )
    return kind if kind != "auto" else "instructions" if has_template else "text"


def _plan_job(model: str, output: Path, settings: WriteConfig, kind: DataKind | Literal["auto"], flags: Flags) -> _Job:
    """Resolve the request, and check everything that can be checked without the weights."""
    world = World.current()
    kind, folder = choose_kind(model, kind, flags), locate(model)
    engine = choose_engine(settings.engine, folder, no_repeat_ngram_size=0, world_size=world.size)
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise CannotWrite(f"{model}: the tokenizer has no end token; set eos_token in its tokenizer_config.json")
    ends = answer_ends(tokenizer, generation_settings(folder))
    turn_ends, turn_end_text, behind = ends, "", list[int]()
    if kind == "instructions":
        try:
            turn = user_turn(tokenizer)
        except Exception as error:  # a template can raise anything
            turn, why = None, f" ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        else:
            why = ""
        if turn is None:
            raise CannotWrite(
                f"{model} cannot write instructions: its chat template does not write a text of the user{why}; "
                f"{flags.advise(texts=True)}"
            )
        opening, behind = (
            tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in (turn.opening, turn.end)
        )
        special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        if behind and behind[0] in special:
            turn_ends = list(dict.fromkeys([behind[0], *ends]))
        elif turn.end:
            turn_end_text = turn.end.split("\n")[0]
        if not opening:
            opening = begin_tokens(tokenizer)
    else:
        bos = tokenizer.bos_token_id
        opening = begin_tokens(tokenizer) or ([] if bos is None else [bos])
    opening = opening or [tokenizer.eos_token_id]  # as texts follow each other in the training of most base models
    context, around = getattr(config, "max_position_embeddings", None) or NO_LIMIT, len(opening) + len(behind)
    if kind == "text":
        most = min(TEXT_TOKENS, context - around) if settings.max_text_tokens is None else settings.max_text_tokens
        longest, limits = around + most, f"{flags.settings}max_text_tokens is {most}"
    else:
        most, answer = settings.max_prompt_tokens, settings.max_answer_tokens
        longest = around + most + answer
        limits = f"{flags.settings}max_prompt_tokens is {most} and {flags.settings}max_answer_tokens {answer}"
    if longest > context:
        remedy = "lower it" if flags.settings else flags.advise()
        raise CannotWrite(
            f"{limits}: with {around} tokens around them that is beyond the {context} of {model}; {remedy}"
        )
    return _Job(
        teacher=model,
        kind=kind,
        output=output,
        parts=parts_folder(output),
        flags=flags,
        settings=settings,
        engine=engine,
        dtype=choose_dtype(settings.dtype, world.device),
        batch_size=(
            _BATCH_SIZES["vllm" if engine == "vllm" else world.device.type]
            if settings.batch_size is None
            else settings.batch_size
        ),
        keeps_unfinished=(settings.unfinished or ("drop" if kind == "instructions" else "keep")) == "keep",
        tokenizer=tokenizer,
        vocabulary=load_config(folder).vocab_size,
        opening=opening,
        turn_ends=turn_ends,
        turn_end_text=turn_end_text,
        ends=ends,
        rows=ROWS if settings.rows is None and settings.tokens is None else settings.rows,
        most_tokens=most,
        longest=longest,
    )


def _restore(job: _Job, rounds: dict[int, Any]) -> _Sieve:
    """Return the state after the rounds that an earlier process has finished."""
    sieve = _Sieve(job)
    for first in sorted(rounds):
        if first != len(sieve.attempts):
            raise UserError(
                f"{job.parts} lacks the rows from {len(sieve.attempts)} on; remove that folder to have "
                "all written again"
            )
        samples = [
            [None if sample is None else Sample(*sample) for sample in rounds[first][n]] for n in sorted(rounds[first])
        ]
        attempts = [_Attempt(turn, answer) for turn, answer in samples if turn is not None]
        sieve.judge_turns([attempt.turn for attempt in attempts])
        sieve.add(attempts)
    return sieve


def _write_rounds(job: _Job, sieve: _Sieve) -> None:
    """Sample rows until there are enough, round by round; each is saved when it is done."""
    world = World.current()
    if sieve.is_full:
        return
    folder, dtype = locate(job.teacher), TORCH_DTYPES[job.dtype]
    done, expected = sieve.sampled_tokens(), _expect_tokens(sieve)
    with Activity("Writing", expected, "tokens", done=done) as activity:

        def written(tokens: int) -> None:
            activity.advance(tokens * world.size)  # the other ranks are about as fast
            if activity.done > (activity.total or 0):
                activity.expect(activity.done + activity.done // 10)

        sampler: RowSampler
        if job.engine == "vllm":
            decoding = job.decoding(of_answer=False)
            sampler = VllmRows(VllmEngine(folder, job.turn_ends, decoding, dtype=dtype, seed=0), written)
        else:
            pad = job.tokenizer.pad_token_id
            model = load_model(folder, dtype=dtype, device=world.device)
            # Padding is masked, so any token will do.
            sampler = HuggingFaceRows(model, job.tokenizer.eos_token_id if pad is None else pad, written)
        while not sieve.is_full:
            first, share = len(sieve.attempts), sieve.share_written()
            # The last rounds sample no more rows than are likely to be needed.
            wanted = math.inf if share == 0 else math.ceil(1.1 * first * (1 - share) / share)
            missing = math.inf if job.rows is None else 4 * max(1, job.rows - len(sieve.kept))
            size = int(min(job.batch_size * world.size, max(wanted, world.size), missing))
            turns = _sample(job, sampler, [job.opening] * size, range(first, first + size), of_answer=False)
            if first == 0:
                nats = sum(turn.nats for turn in turns) / max(1, sum(len(turn.ids) for turn in turns))
                if nats > _NOISE * math.log(job.vocabulary):
                    raise CannotWrite(
                        f"{job.teacher} writes noise: its own samples cost it {nats:.1f} nats a token, and a choice "
                        f"among all tokens alike costs {math.log(job.vocabulary):.1f}; "
                        f"{job.flags.advise('take a trained model')}"
                    )
            staying = sieve.judge_turns(turns)
            answers: dict[int, Sample] = {}
            if job.kind == "instructions" and staying:
                chats = [_chat_of(sieve.texts[first + place]) for place in staying]
                limits = Limits(max_prompt_length=NO_LIMIT - 1, max_length=NO_LIMIT, prompt=CHAT)
                prompts = encode_prompts(chats, job.tokenizer, limits).ids
                samples = _sample(job, sampler, prompts, [first + place for place in staying], of_answer=True)
                answers = dict(zip(staying, samples, strict=True))
            attempts = [_Attempt(turn, answers.get(place)) for place, turn in enumerate(turns)]
            if world.is_main:
                rows: Any = {first + place: attempt for place, attempt in enumerate(attempts)}
                response_file.append_batch(job.parts, 0, first, rows)
            sieve.add(attempts)
            activity.expect(_expect_tokens(sieve))
            # So many rows in succession were dropped that no further one is likely.
            fruitless = len(sieve.attempts) - (sieve.kept[-1] + 1 if sieve.kept else 0)
            if fruitless >= _FRUITLESS:
                reasons = ", ".join(f"{count:,} {reason}" for reason, count in sieve.dropped.most_common())
                raise CannotWrite(
                    f"{job.teacher} has written {len(sieve.kept):,} rows, and the last {fruitless:,} were all dropped "
                    f"(of all: {reasons}); ask for fewer rows, or raise the limits of tokens or the similarity of "
                    "near-duplicates"
                )


def _expect_tokens(sieve: _Sieve) -> int:
    """Return about how many tokens are sampled in all: by the share that is done, or at first by the limits."""
    job, share = sieve.job, sieve.share_written()
    if share > 0:
        return max(sieve.sampled_tokens(), round(sieve.sampled_tokens() / share))
    settings = job.settings
    rows = job.rows
    return settings.tokens if rows is None and settings.tokens is not None else (rows or 0) * job.longest // 2


def _chat_of(text: str) -> Example:
    return Example("", "", (), messages=(Turn("user", text),))


def _sample(
    job: _Job, sampler: RowSampler, prompts: list[list[int]], numbers: Sequence[int], *, of_answer: bool
) -> list[Sample]:
    """Sample after prompts of the rows with these numbers, each rank a share of them, in batches of similar length."""
    world = World.current()
    seeds = [
        np.random.SeedSequence((job.settings.seed, number, of_answer)).generate_state(1, np.uint64)
        for number in numbers
    ]
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))[world.rank :: world.size]
    own: dict[int, Sample] = {}
    for start in range(0, len(order), job.batch_size):
        places = order[start : start + job.batch_size]
        samples = sampler.sample(
            [prompts[place] for place in places],
            [int(seeds[place][0] >> np.uint64(1)) for place in places],  # 63 bits fit into int64
            job.decoding(of_answer=of_answer),
            job.ends if of_answer else job.turn_ends,
        )
        own.update(zip(places, samples, strict=True))
    gathered = {place: sample for part in gather_objects(own) for place, sample in part.items()}
    return [gathered[place] for place in range(len(prompts))]


def _finish(job: _Job, sieve: _Sieve, request: dict[str, Any]) -> None:
    """Write the file, then its record; an interruption in between loses nothing."""
    lines: list[dict[str, Any]] = []
    tokens = 0
    chosen = sieve.chosen()
    for number in chosen:
        turn, answer = sieve.attempts[number]
        tokens += len(turn.ids)
        if answer is None:
            lines.append({"text": sieve.texts[number]})
        else:
            tokens += len(answer.ids)
            [text] = final_answers([answer.ids], job.tokenizer, job.ends)
            lines.append(learnable_row(_chat_of(sieve.texts[number]), answer.ids, text, job.tokenizer, job.ends))
    write_text(job.output, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    record = {
        "teacher": job.teacher,
        **request,
        "rows": len(lines),
        "tokens": tokens,
        "sampled_rows": len(sieve.attempts),
        "sampled_tokens": sieve.sampled_tokens(),
        "dropped": dict(sorted(sieve.dropped.items())),
        "nats_per_token": round(sieve.nats(), 4),
        "engine": job.engine,
        "dtype": job.dtype,
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": installed_versions(("llmdistill", "torch", "transformers", "vllm")),
        "output_sha256": file_sha256(job.output),
    }
    write_json(provenance_file(job.output), record)  # after the file whose sha256 it has
