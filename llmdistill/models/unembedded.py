"""Tokens without an embedding: Gemma 3 of text alone has a token for images, for which it has no row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from textwrap import shorten

from transformers import PreTrainedTokenizerBase

from llmdistill.errors import UserError

_ROWS = "llmdistill_rows"


def set_rows(tokenizer: PreTrainedTokenizerBase, rows: int | None) -> None:
    """Record that a tokenizer's model has embeddings only for its first `rows` tokens; None for all."""
    setattr(tokenizer, _ROWS, rows)


def rows_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the number of tokens that have an embedding; None if all have one."""
    rows: int | None = getattr(tokenizer, _ROWS, None)
    return rows


def check_token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[Sequence[int]], place: Callable[[int, str], str]
) -> None:
    """Raise a UserError for the first text, as token ids, with a token that has no embedding.

    `place` returns where a text is, or the text, from its number and the token.
    """
    rows = rows_of(tokenizer)
    if rows is None:
        return
    for number, ids in enumerate(texts):
        index = max(ids, default=0)
        if index >= rows:
            token = str(tokenizer.convert_ids_to_tokens(index))
            where = shorten(place(number, token), 300, placeholder=" ...")
            raise UserError(
                f"{where}: {token!r} is a token without an embedding (its id is {index}, and the model has {rows} "
                "embeddings): take it out of the text, or resize the model's embeddings"
            )
