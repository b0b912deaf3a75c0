"""Renders conversations by a tokenizer's chat template, and finds the token that ends their answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from transformers import PreTrainedTokenizerBase

from llmdistill.data.examples import Example
from llmdistill.errors import UserError


def render_chats(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Return the messages of each example as the text up to the beginning of the assistant's turn.

    transformers renders a template in jinja's sandbox, which has no files, commands or inner attributes.

    Raises:
        UserError: there is no chat template, or it raises an error.
    """
    if tokenizer is None or tokenizer.chat_template is None:
        raise UserError(
            f"{_place(examples[0])}messages, but the tokenizer has no chat template; "
            "give one in tokenizer_config.json or rows of instruction, input, output"
        )
    texts = []
    for example in examples:
        messages = [{"role": role, "content": content} for role, content in example.messages]
        try:
            texts.append(str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)))
        except Exception as error:  # a template can raise anything
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(
                f"{_place(example)}the tokenizer's chat template refuses the messages ({reason}); change one of them"
            ) from error
    return texts


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends an answer in a chat: what the chat template writes after it, else the end token.

    The two differ in some models, such as Gemma, whose turns end with <end_of_turn> and whose texts with <eos>.
    """
    end: int = tokenizer.eos_token_id
    if getattr(tokenizer, "chat_template", None) is None:
        return end
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}]
    with suppress(Exception):  # a template can raise anything, and says so when the examples are rendered
        tail = str(tokenizer.apply_chat_template(chat, tokenize=False)).rpartition("yes")[2]
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids: list[int] = tokenizer(tail, add_special_tokens=False)["input_ids"]
        return next((index for index in ids if index in added), end)
    return end


def answer_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens at which the generation of an answer stops: the end token and the end of a turn."""
    return list(dict.fromkeys([tokenizer.eos_token_id, end_of_turn(tokenizer)]))


def tokenizer_gaps(teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase) -> list[str]:
    """Return what a teacher of the same tokens was taught otherwise than its student is, each with what comes of it.

    Both read the tokens that the student's tokenizer makes: a base student's end token, for example, under a teacher
    whose answers end with another one.
    """
    gaps = []
    (theirs, their_end), (ours, our_end) = (
        (each.chat_template, each.convert_ids_to_tokens(end_of_turn(each))) for each in (teacher, student)
    )
    if their_end != our_end:
        gaps.append(
            f"the answers that are learned end with {our_end!r}, those of the teacher with {their_end!r}: a student "
            "that learns from the teacher's distribution does not learn to stop"
        )
    if theirs is not None and theirs != ours:
        has = "has none" if ours is None else "has another one"
        gaps.append(f"the teacher has a chat template and the student {has}, by which the teacher is asked here too")
    starts = [each("a")["input_ids"][:1] == [each.bos_token_id] for each in (teacher, student)]
    if starts[0] != starts[1]:
        token = (teacher if starts[0] else student).bos_token
        gaps.append(
            f"texts begin with {token!r} for the {'teacher' if starts[0] else 'student'} alone, and here "
            f"{'without it for both' if starts[0] else 'with it for both'}"
        )
    return gaps


def _place(example: Example) -> str:
    return f"{example.source}: " if example.source else ""
