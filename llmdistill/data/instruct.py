"""Instruction data: JSONL of ``instruction, input, output``, its prompt and its tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from llmdistill.errors import UserError

LongPrompts = Literal["error", "drop", "truncate"]
"""What happens to a prompt beyond the limit."""

PROMPT_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Example:
    """One instruction with its answers."""

    instruction: str
    input: str
    """Further context; empty where there is none."""
    outputs: tuple[str, ...]
    """At least one reference answer; training learns the first, scoring takes the best match."""
    source: str = field(default="", compare=False)
    """Where it was read, as ``file:line``; only for messages."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of one example."""

    prompt_ids: list[int]
    response_ids: list[int]
    """Ends with the end token unless the response was cut."""


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts within the limit, in order."""

    ids: list[list[int]]
    kept: list[int]
    """Index into the prompts given, for each of ids."""
    dropped: int
    truncated: int


@dataclass(frozen=True)
class InstructData:
    """A training set as tokens, and what had to be left out of it."""

    items: list[Encoded]
    dropped: int
    """Examples left out because of their prompt's length."""
    truncated_prompts: int
    truncated_responses: int
    """Responses cut at the maximum length; these have no end token."""

    def report(self) -> str:
        """One sentence with every count."""
        return (
            f"{len(self.items)} examples: {self.dropped} dropped for a long prompt, "
            f"{self.truncated_prompts} prompts and {self.truncated_responses} responses truncated."
        )


def read_examples(path: str | Path) -> list[Example]:
    """Examples of a JSONL file; ``output`` is a string or a list of strings, ``input`` may be missing.

    Raises UserError with ``file:line`` where the file is missing, empty or malformed.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a JSONL file of instruction, input, output") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}); give a readable JSONL file") from error
    examples = [_parse_line(line, f"{path}:{n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not examples:
        raise UserError(f"{path}: holds no example; give at least one line of instruction, input, output")
    return examples


def _parse_line(line: str, source: str) -> Example:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{source}: not JSON ({error.msg} at column {error.colno}); write one object a line") from error
    if not isinstance(row, dict):
        raise UserError(f"{source}: a {type(row).__name__}, not an object; write one object a line")
    for key in ("instruction", "output"):
        if key not in row:
            raise UserError(f'{source}: the key "{key}" is missing (there are {sorted(row)}); add it')
    instruction, text, output = row["instruction"], row.get("input"), row["output"]
    if not isinstance(instruction, str):
        raise UserError(f'{source}: "instruction" is {_shown(instruction)}, not a string; quote it')
    if text is not None and not isinstance(text, str):
        raise UserError(f'{source}: "input" is {_shown(text)}, not a string; quote it or leave it out')
    outputs = output if isinstance(output, list) else [output]
    if not outputs or not all(isinstance(answer, str) for answer in outputs):
        raise UserError(f'{source}: "output" is {_shown(output)}; give a string or a list of strings')
    return Example(instruction, text or "", tuple(outputs), source)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def render_prompt(example: Example) -> str:
    """The Alpaca prompt, as MiniLLM writes it; it ends with ``### Response:`` and a newline."""
    # Not str.format on the example's own text: braces in it stay as they are.
    template = PROMPT_WITH_INPUT if example.input else PROMPT_WITHOUT_INPUT
    return template.format(instruction=example.instruction, input=example.input)


def encode_prompts(
    prompts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    long_prompts: LongPrompts,
    sources: list[str] | None = None,
) -> EncodedPrompts:
    """Tokens of each prompt, at most max_prompt_length; truncation loses the start, so ``### Response:`` stays.

    Raises UserError where a prompt is longer and long_prompts is "error", or where none is left.
    """
    all_ids = [_without_end(ids, tokenizer) for ids in tokenizer(prompts, verbose=False)["input_ids"]]
    long = [index for index, ids in enumerate(all_ids) if len(ids) > max_prompt_length]
    kept = list(range(len(prompts)))
    if long and long_prompts == "error":
        first = sources[long[0]] if sources else f"prompt {long[0] + 1}"
        raise UserError(
            f"{len(long)} of {len(prompts)} prompts are longer than data.max_prompt_length={max_prompt_length} tokens, "
            f"first {first} with {len(all_ids[long[0]])}; "
            "set data.long_prompts=drop or =truncate, or a larger data.max_prompt_length"
        )
    if long and long_prompts == "drop":
        kept = sorted(set(kept) - set(long))
        if not kept:
            raise UserError(
                f"all {len(prompts)} prompts are longer than data.max_prompt_length={max_prompt_length} tokens and "
                "data.long_prompts=drop leaves none; set a larger data.max_prompt_length or data.long_prompts=truncate"
            )
    ids = [_last_tokens(all_ids[index], max_prompt_length, tokenizer) for index in kept]
    is_drop = long_prompts == "drop"
    return EncodedPrompts(ids, kept, len(long) if is_drop else 0, 0 if is_drop else len(long))


def _without_end(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # Some tokenizers close every text with the end token; a prompt is to be continued.
    ends = ids and ids[-1] == tokenizer.eos_token_id
    return ids[:-1] if ends else ids


def _last_tokens(ids: list[int], length: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if len(ids) <= length:
        return ids
    # A model trained with a start token is lost without it.
    start = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return start + ids[len(ids) - length + len(start) :]


def encode(
    examples: list[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    max_length: int,
    long_prompts: LongPrompts = "error",
) -> InstructData:
    """Prompt and first reference of each example as tokens, the end token appended (and learnt) always.

    Prompt and response are tokenised apart, as MiniLLM does in effect: no token straddles the two. Prompt plus
    response have at most max_length tokens; a longer response is cut and counted. Raises UserError as
    encode_prompts does, or where the limits or the tokenizer do not fit.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
    check_lengths(max_prompt_length, max_length)
    prompts = encode_prompts(
        [render_prompt(example) for example in examples],
        tokenizer,
        max_prompt_length=max_prompt_length,
        long_prompts=long_prompts,
        sources=[example.source for example in examples],
    )
    answers = [examples[index].outputs[0] for index in prompts.kept]
    responses = tokenizer(answers, add_special_tokens=False, verbose=False)["input_ids"]
    items, truncated_responses = [], 0
    for prompt_ids, response_ids in zip(prompts.ids, responses, strict=True):
        response_ids = [*response_ids, tokenizer.eos_token_id]
        room = max_length - len(prompt_ids)
        truncated_responses += len(response_ids) > room
        items.append(Encoded(prompt_ids, response_ids[:room]))
    return InstructData(items, prompts.dropped, prompts.truncated, truncated_responses)


def check_lengths(max_prompt_length: int, max_length: int) -> None:
    """Raises UserError unless a longest prompt leaves room for at least one token of response."""
    if not 0 < max_prompt_length < max_length:
        raise UserError(
            f"data.max_prompt_length={max_prompt_length} must be at least 1 and below data.max_length={max_length}; "
            "lower the first or raise the second"
        )
