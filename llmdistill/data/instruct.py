"""From examples to tokens: their prompts, the limits on length, and the end token that is always learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from transformers import PreTrainedTokenizerBase

from llmdistill.data.examples import Example
from llmdistill.data.sample_ids import sample_id
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
class Encoded:
    """The tokens of one example."""

    prompt_ids: list[int]
    response_ids: list[int]
    """Ends with the end token unless the response was cut."""

    @cached_property
    def sample_id(self) -> int:
        """See `data.sample_ids`."""
        return sample_id(self.prompt_ids, self.response_ids)

    def __len__(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


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


def render_prompt(example: Example, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """The text in front of the answer.

    An instruction gets the Alpaca prompt, as MiniLLM writes it; it ends with ``### Response:`` and a newline. A ready
    prompt stays as it is. Messages get the tokenizer's chat template, up to where the assistant begins to speak.

    Raises:
        UserError: messages, but no chat template, or one that refuses them.
    """
    if example.messages:
        return _render_chat(example, tokenizer)
    if example.raw_prompt is not None:
        return example.raw_prompt
    # Not str.format on the example's own text: braces in it stay as they are.
    template = PROMPT_WITH_INPUT if example.input else PROMPT_WITHOUT_INPUT
    return template.format(instruction=example.instruction, input=example.input)


def _render_chat(example: Example, tokenizer: PreTrainedTokenizerBase | None) -> str:
    from jinja2 import TemplateError

    where = f"{example.source}: " if example.source else ""
    if tokenizer is None or tokenizer.chat_template is None:
        raise UserError(
            f"{where}messages, but the tokenizer has no chat template; "
            "give one in tokenizer_config.json or rows of instruction, input, output"
        )
    messages = [{"role": role, "content": content} for role, content in example.messages]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise UserError(f"{where}the tokenizer's chat template refuses the messages ({error}); change them") from error


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
    names = sources or [""] * len(prompts)
    encoded = _limit(_plain_ids(prompts, tokenizer), names, tokenizer, max_prompt_length, long_prompts)
    _check_any_left(encoded, max_prompt_length)
    return encoded


def encode_example_prompts(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    long_prompts: LongPrompts,
) -> EncodedPrompts:
    """`render_prompt` and `encode_prompts` of each example; one that is messages gets no second start token.

    Raises:
        UserError: as those two do.
    """
    names = [example.source for example in examples]
    encoded = _limit(_example_ids(examples, tokenizer), names, tokenizer, max_prompt_length, long_prompts)
    _check_any_left(encoded, max_prompt_length)
    return encoded


def _example_ids(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokens of each example's prompt, whatever their number."""
    texts = [render_prompt(example, tokenizer) for example in examples]
    plain = [text for text, example in zip(texts, examples, strict=True) if not example.messages]
    chats = [text for text, example in zip(texts, examples, strict=True) if example.messages]
    plain_ids = iter(_plain_ids(plain, tokenizer))
    # A chat template writes the start token itself, and an end token in it is the template's own.
    chat_ids = iter(tokenizer(chats, add_special_tokens=False, verbose=False)["input_ids"] if chats else [])
    return [next(chat_ids) if example.messages else next(plain_ids) for example in examples]


def _plain_ids(prompts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    if not prompts:
        return []
    return [_as_prompt(ids, tokenizer) for ids in tokenizer(prompts, verbose=False)["input_ids"]]


def _as_prompt(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # A ready prompt may be written with the start token that the tokenizer adds too.
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    # Some tokenizers close every text with the end token; a prompt is to be continued.
    ends = ids and ids[-1] == tokenizer.eos_token_id
    return ids[:-1] if ends else ids


def _limit(
    all_ids: list[list[int]],
    names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    long_prompts: LongPrompts,
) -> EncodedPrompts:
    """What long_prompts says, done to the prompts that are too long; perhaps none is left."""
    long = [index for index, ids in enumerate(all_ids) if len(ids) > max_prompt_length]
    if long and long_prompts == "error":
        raise _too_long(names[long[0]] or f"prompt {long[0] + 1}", all_ids, long, max_prompt_length)
    is_drop = long_prompts == "drop"
    left_out = set(long) if is_drop else set()
    kept = [index for index in range(len(all_ids)) if index not in left_out]
    ids = [_last_tokens(all_ids[index], max_prompt_length, tokenizer) for index in kept]
    return EncodedPrompts(ids, kept, len(left_out), 0 if is_drop else len(long))


def _too_long(first: str, all_ids: list[list[int]], long: list[int], max_prompt_length: int) -> UserError:
    length, limit = len(all_ids[long[0]]), f"data.max_prompt_length={max_prompt_length}"
    many = f"{len(long)} of {len(all_ids)} prompts are longer than {limit} tokens, first {first} with {length}"
    # Of a stream only one is in sight.
    one = f"{first}: the prompt has {length} tokens and is longer than {limit}"
    remedy = "set data.long_prompts=drop or =truncate, or a larger data.max_prompt_length"
    return UserError(f"{one if len(all_ids) == 1 else many}; {remedy}")


def _check_any_left(prompts: EncodedPrompts, max_prompt_length: int) -> None:
    if prompts.dropped and not prompts.kept:
        raise none_left(prompts.dropped, max_prompt_length)


def none_left(dropped: int, max_prompt_length: int) -> UserError:
    """The error for a set whose every prompt is dropped."""
    return UserError(
        f"all {dropped} prompts are longer than data.max_prompt_length={max_prompt_length} tokens and "
        "data.long_prompts=drop leaves none; set a larger data.max_prompt_length or data.long_prompts=truncate"
    )


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
    encode_example_prompts does, or where the limits or the tokenizer do not fit.
    """
    check_encodable(tokenizer, max_prompt_length, max_length)
    data = encode_each(
        examples,
        tokenizer,
        max_prompt_length=max_prompt_length,
        max_length=max_length,
        long_prompts=long_prompts,
    )
    if data.dropped and not data.items:
        raise none_left(data.dropped, max_prompt_length)
    return data


def encode_each(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    max_length: int,
    long_prompts: LongPrompts,
) -> InstructData:
    """`encode` of a part of a set, which may be dropped as a whole; `check_encodable` is the caller's.

    Raises:
        UserError: a prompt is too long and long_prompts is "error".
    """
    names = [example.source for example in examples]
    prompts = _limit(_example_ids(examples, tokenizer), names, tokenizer, max_prompt_length, long_prompts)
    answers = [examples[index].outputs[0] for index in prompts.kept]
    responses = tokenizer(answers, add_special_tokens=False, verbose=False)["input_ids"] if answers else []
    items, truncated_responses = [], 0
    for prompt_ids, response_ids in zip(prompts.ids, responses, strict=True):
        response_ids = [*response_ids, tokenizer.eos_token_id]
        room = max_length - len(prompt_ids)
        truncated_responses += len(response_ids) > room
        items.append(Encoded(prompt_ids, response_ids[:room]))
    return InstructData(items, prompts.dropped, prompts.truncated, truncated_responses)


def check_encodable(tokenizer: PreTrainedTokenizerBase, max_prompt_length: int, max_length: int) -> None:
    """Raises UserError where the tokenizer has no end token or the limits do not fit each other."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
    check_lengths(max_prompt_length, max_length)


def check_lengths(max_prompt_length: int, max_length: int) -> None:
    """Raises UserError unless a longest prompt leaves room for at least one token of response."""
    if not 0 < max_prompt_length < max_length:
        raise UserError(
            f"data.max_prompt_length={max_prompt_length} must be at least 1 and below data.max_length={max_length}; "
            "lower the first or raise the second"
        )
