"""Renders conversations by a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Sequence

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


def _place(example: Example) -> str:
    return f"{example.source}: " if example.source else ""
