"""The tokens with which a tokenizer begins a text."""

from __future__ import annotations

from contextlib import suppress
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from llmdistill.models.chat_templates import as_the_template_reads

_MARK = "\ue000"  # a character for private use, which no template writes


def begin_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the special tokens with which the tokenizer of a decoder begins a text, nearly always one or none.

    An encoder's tokenizer, which puts [CLS] there, begins no text for a decoder. A tokenizer that puts nothing there
    may still say that its model was trained with a begin token: by `add_bos_token`, or by a chat template that begins
    with it.
    """
    with_special, without_special = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (True, False))
    # A tokenizer may tokenize "a" differently behind its begin token; then only the special tokens in front count.
    first = with_special.index(without_special[0]) if without_special and without_special[0] in with_special else None
    special = set(tokenizer.all_special_ids)
    begin: list[int] = list(takewhile(special.__contains__, with_special)) if first is None else with_special[:first]
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None and begin:
        return [] if begin == [tokenizer.cls_token_id] else begin
    if bos is None or begin:
        return begin
    if getattr(tokenizer, "add_bos_token", False):
        return [bos]
    # The mark shows whether the template writes `bos_token` itself; SmolLM2's only spells out the same text.
    with suppress(Exception):  # a template can raise anything, and says so when chats are rendered
        chat = as_the_template_reads([{"role": "user", "content": "a"}], tokenizer)
        if str(tokenizer.apply_chat_template(chat, tokenize=False, bos_token=_MARK)).startswith(_MARK):
            return [bos]
    return []
