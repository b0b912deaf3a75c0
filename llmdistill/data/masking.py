"""Masked words for an encoder to guess."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX
from llmdistill.errors import UserError

_BYTE_BLANKS = ("Ġ", "Ċ", "ĉ", "č")
"""How byte-level vocabularies write blank, newline, tabulator and carriage return."""


def mask_tokens(
    ids: np.ndarray,
    special: np.ndarray,
    *,
    rng: np.random.Generator,
    mask_share: float,
    mask_token_id: int,
    vocabulary: np.ndarray,
    word_starts: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose tokens of a sequence for the model to guess, and hide most of them (Devlin et al. 2019, section 3.1).

    As in BERT a fixed number is chosen, at least one, and of the chosen tokens each becomes the mask token with
    probability 0.8, a random token with 0.1, and stays with 0.1; so it does within whole words too. Other than in BERT
    the number is a share of the tokens that can be chosen, special ones not counted; random tokens are never special;
    and the word that crosses the number is masked whole, where BERT passes over it.

    Args:
        ids: (T,) the tokens.
        special: (T,) bool, true at those that are never chosen: special tokens and padding.
        rng: decides all.
        mask_share: share of the tokens that is chosen.
        mask_token_id: what they become.
        vocabulary: the ids that random tokens are drawn among.
        word_starts: over the whole vocabulary, whether a token begins a word, as `word_starts` says; whole words are
            chosen then, and None chooses single tokens.

    Returns:
        The tokens to be shown, (T,) as ids, and the labels, (T,) int64: the token where chosen, else IGNORE_INDEX.
    """
    labels = np.full(len(ids), IGNORE_INDEX, np.int64)
    shown = ids.copy()
    places = np.flatnonzero(~special)
    if len(places) == 0:
        return shown, labels
    number = max(1, round(mask_share * len(places)))
    if word_starts is None:
        chosen = rng.permutation(places)[:number]
    else:
        chosen = _whole_words(ids, places, number, word_starts, rng)
    labels[chosen] = ids[chosen]
    dice = rng.random(len(chosen))
    random_tokens = rng.choice(vocabulary, len(chosen))
    shown[chosen] = np.where(dice < 0.8, mask_token_id, np.where(dice < 0.9, random_tokens, ids[chosen]))
    return shown, labels


def _whole_words(
    ids: np.ndarray, places: np.ndarray, number: int, word_starts: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """The places of random words, one after the other until they are at least `number`."""
    # What follows a special token begins a word, whatever it is: the rest of the word is not in sight.
    begins = word_starts[ids[places]] | (np.diff(places, prepend=-2) > 1)
    words = np.split(places, np.flatnonzero(begins)[1:])
    order = rng.permutation(len(words))
    reached = np.cumsum([len(words[word]) for word in order])
    needed = int(np.searchsorted(reached, number)) + 1
    return np.concatenate([words[word] for word in order[:needed]])


def word_starts(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Whether each token of the vocabulary begins a word, (highest id + 1,) bool.

    In a WordPiece vocabulary the tokens that go on with a word are marked (``##``). In byte-level BPE (``Ġ``) and
    sentencepiece (``▁``) those after a blank are: a word there has the punctuation around it.

    Raises:
        UserError: the vocabulary is of another kind.
    """
    begins_word = _rule(tokenizer)
    if begins_word is None:
        raise UserError(
            f"data.text.whole_words: the vocabulary of this {type(tokenizer).__name__} does not mark where words begin "
            "(WordPiece, byte-level BPE and sentencepiece do); leave whole_words out"
        )
    vocabulary = tokenizer.get_vocab()
    starts = np.zeros(max(vocabulary.values()) + 1, dtype=bool)
    for token, number in vocabulary.items():
        starts[number] = begins_word(token)
    starts[tokenizer.all_special_ids] = True
    return starts


def _rule(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bool] | None:
    """How a token that begins a word is known; None where it cannot be."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _follows_sentencepiece if hasattr(tokenizer, "sp_model") else None
    parts = json.loads(backend.to_str())
    if parts["model"]["type"] == "WordPiece":
        prefix = parts["model"]["continuing_subword_prefix"]
        return lambda token: not token.startswith(prefix)
    if '"ByteLevel"' in json.dumps(parts["pre_tokenizer"]):
        return _follows_byte_blank
    # Metaspace names the sign as its replacement; older files write it with a normaliser.
    if "▁" in json.dumps([parts["pre_tokenizer"], parts["normalizer"]], ensure_ascii=False):
        return _follows_sentencepiece
    return None


def _follows_byte_blank(token: str) -> bool:
    return token.startswith(_BYTE_BLANKS)


def _follows_sentencepiece(token: str) -> bool:
    return token.startswith("▁")
