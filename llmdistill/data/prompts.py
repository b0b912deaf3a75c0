"""Prompts of a model: MiniLLM's, its tokenizer's chat template, or a custom text; and the ends of its answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from llmdistill.data.chats import render_chats, source_prefix
from llmdistill.data.examples import Example
from llmdistill.errors import UserError
from llmdistill.files import read_json, write_json
from llmdistill.internals.transformers_names import is_from_config
from llmdistill.models.chat_templates import end_of_turn

MINILLM, CHAT = "minillm", "chat"
"""Values of `data.prompt`; any other is a text with the field {instruction}, and usually {input}."""

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

_MARK = "INSTRUCTION"
_RECORD = "llmdistill_prompt"
"""Key of a student's tokenizer_config.json: the prompt that it was trained with. Tokenizers keep keys they do not know,
so the record stays with the tokenizer, whoever saves it again."""


def recorded_prompt(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the prompt that a student of ours was trained with; None for other models."""
    prompt = tokenizer.init_kwargs.get(_RECORD)
    return prompt if isinstance(prompt, str) else None


def record_prompt(folder: Path, prompt: str) -> None:
    file = folder / "tokenizer_config.json"
    write_json(file, {**(read_json(file) if file.is_file() else {}), _RECORD: prompt})


def resolve_prompt(setting: str | None, tokenizers: Sequence[PreTrainedTokenizerBase]) -> str:
    """Return the prompt of instructions, the same for all models that see them.

    Args:
        setting: `data.prompt`. None prompts a model as it was trained: a student of ours with the prompt of its
            training, another model with its chat template, and one without a template with MiniLLM's prompt.
        tokenizers: those of the models; the first one, the teacher's, decides for None.

    Raises:
        UserError: the text has no field {instruction}, or a tokenizer has no chat template.
    """
    without = next((tokenizer for tokenizer in tokenizers if tokenizer.chat_template is None), None)
    prompt = setting
    if prompt is None:
        prompt = recorded_prompt(tokenizers[0]) if tokenizers else MINILLM
        prompt = prompt or CHAT
        # A student with another tokenizer, which learns from the teacher's text, may have none.
        return MINILLM if prompt == CHAT and without is not None else prompt
    if prompt == CHAT and without is not None:
        raise UserError(
            f"data.prompt is chat, but the tokenizer of {without.name_or_path or 'the model'} has no chat template; "
            "give one in its tokenizer_config.json, or set data.prompt=minillm"
        )
    if prompt not in (MINILLM, CHAT) and "{instruction}" not in prompt:
        raise UserError(f"data.prompt is {prompt!r}: give minillm, chat, or a text with {{instruction}} in it")
    return prompt


def describe_prompt(prompt: str) -> str:
    if prompt in (MINILLM, CHAT):
        name = "MiniLLM's prompt" if prompt == MINILLM else "the tokenizer's chat template"
        return f"{name} (data.prompt={prompt})"
    text = json.dumps(prompt, ensure_ascii=False)
    return f"a custom text (data.prompt={text if len(text) <= 80 else text[:77] + '...'})"


def check_chat_keys(examples: Sequence[Example], prompt: str) -> None:
    """Raise a UserError for an instruction with a key, such as system, that the resolved prompt has no place for."""
    example = next((example for example in examples if example.chat_key), None)
    if example is not None and prompt != CHAT:
        raise UserError(
            f'{source_prefix(example)}"{example.chat_key}" has a place in a chat template alone, but the prompt is '
            f"{describe_prompt(prompt)}; set data.prompt to chat, or take the key out of the rows"
        )


def is_chat(example: Example, prompt: str) -> bool:
    """Return whether the chat template renders an example, given the resolved prompt."""
    return bool(example.messages) or (prompt == CHAT and example.raw_prompt is None)


def as_chat(example: Example) -> Example:
    """Return an instruction as one user turn, its input after a blank line; messages stay as they are."""
    if example.messages:
        return example
    return replace(example, instruction="", input="", messages=(example.user_turn(),))


def render_prompt(example: Example, tokenizer: PreTrainedTokenizerBase | None = None, prompt: str = MINILLM) -> str:
    """Return the text before the answer of an example.

    An instruction is rendered by the resolved `prompt`: MiniLLM's, which is Alpaca's and ends with ``### Response:``
    and a newline, the chat template, or a text. A prompt without template stays as it is, and messages get the
    tokenizer's chat template, up to the beginning of the assistant's turn.

    Raises:
        UserError: a chat template is needed, and there is none or it refuses the messages; or the example has an input,
            and the text has no field for it.
    """
    check_chat_keys([example], prompt)
    if is_chat(example, prompt):
        return render_chats([as_chat(example)], tokenizer)[0]
    if example.raw_prompt is not None:
        return example.raw_prompt
    if prompt == MINILLM:
        prompt = PROMPT_WITH_INPUT if example.input else PROMPT_WITHOUT_INPUT
    elif example.input and "{input}" not in prompt:
        raise UserError(f"{source_prefix(example)}an input, but data.prompt has no {{input}} to put it; add the field")
    # One substitution instead of str.format: braces in the example, and other braces of the prompt, stay as they are.
    return re.sub(r"\{(instruction|input)\}", lambda field: str(getattr(example, field[1])), prompt)


def text_around(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[str, str]:
    """Return what a resolved prompt writes before and after an instruction; empty texts if it refuses one alone."""
    try:
        before, _, after = render_prompt(Example(_MARK, "", ("",)), tokenizer, prompt).partition(_MARK)
    except UserError:  # a chat template that needs a system turn, say
        return "", ""
    return before, after


def answer_ends(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None = None) -> list[int]:
    """Return the tokens at which an answer stops: of the tokenizer, its chat template and the model's settings."""
    named = None if generation is None else generation.eos_token_id
    if isinstance(named, int):
        # transformers fills in the architecture's default if a model has no generation_config.json, and the tokenizer
        # may not have that token.
        named = [] if generation is None or is_from_config(generation) else [named]
    return list(dict.fromkeys([tokenizer.eos_token_id, end_of_turn(tokenizer), *(named or [])]))


def tokenizer_gaps(teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase) -> list[str]:
    """Return how the training of a teacher of the same tokens differed from its student's, each with its consequence.

    Both read the tokens that the student's tokenizer makes: for example, the end token of a base student, while the
    teacher's answers end with another one.
    """
    gaps = []
    (theirs, their_end), (ours, our_end) = (
        (tokenizer.chat_template, tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)))
        for tokenizer in (teacher, student)
    )
    if their_end != our_end:
        gaps.append(
            f"the answers that are learned end with {our_end!r}, those of the teacher with {their_end!r}: a student "
            "that learns from the teacher's distribution does not learn to stop"
        )
    if theirs is not None and theirs != ours:
        has = "has none" if ours is None else "has another one"
        gaps.append(f"the teacher has a chat template and the student {has}, by which the teacher is asked here too")
    starts = [tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] for tokenizer in (teacher, student)]
    if starts[0] != starts[1]:
        token = (teacher if starts[0] else student).bos_token
        gaps.append(
            f"texts begin with {token!r} for the {'teacher' if starts[0] else 'student'} alone, and here "
            f"{'without it for both' if starts[0] else 'with it for both'}"
        )
    return gaps
