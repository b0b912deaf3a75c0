"""Masks tokens that an encoder has to predict."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX
from llmdistill.errors import UserError
from llmdistill.models.unembedded import rows_of

_BYTE_BLANKS = ("Ġ", "Ċ", "ĉ", "č")
"""The characters by which byte-level vocabularies write blank, newline, tabulator and carriage return."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Masking:
    """Chooses tokens of a sequence for the model to predict, and masks most of them (Devlin et al. 2019, section 3.1).

    As in BERT a fixed number of tokens is chosen, at least one. Each chosen token becomes the mask token with
    probability 0.8, becomes a random token with probability 0.1, and stays with probability 0.1, also within whole
    words. There are three differences from BERT: the number is a share of the tokens that can be chosen, without
    special tokens; random tokens are never special tokens; and the word that exceeds the number is masked whole, while
    BERT skips it.
    """

    mask_share: float
    """The share of the tokens that is chosen."""
    mask_token_id: int
    vocabulary: np.ndarray
    """The ids from which random tokens are drawn."""
    word_starts: np.ndarray | None = None
    """From the function `word_starts`, to choose whole words; None chooses single tokens."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, mask_share: float = 0.15, *, whole_words: bool = False) -> Masking:
        """Make the masking with a tokenizer's own tokens. Raises UserError as `word_starts` does."""
        mask: Any = tokenizer.mask_token_id
        vocabulary = np.flatnonzero(vocabulary_mask(tokenizer, lambda _: True) & ~special_mask(tokenizer))
        rows = rows_of(tokenizer)
        # A tokenizer may have tokens beyond the model's embedding matrix; a random one of those would be out of range.
        vocabulary = vocabulary if rows is None else vocabulary[vocabulary < rows]
        starts = word_starts(tokenizer) if whole_words else None
        return cls(mask_share=mask_share, mask_token_id=mask, vocabulary=vocabulary, word_starts=starts)

    def __call__(self, ids: np.ndarray, special: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Mask the tokens of a sequence (T,).

        `special`, (T,) bool, is true at tokens that are never chosen: special tokens and padding.

        Returns:
            The input tokens, (T,) as ids, and the labels, (T,) int64: the original token if it is chosen, else
            IGNORE_INDEX.
        """
        labels = np.full(len(ids), IGNORE_INDEX, np.int64)
        shown = ids.copy()
        places = np.flatnonzero(~special)
        if len(places) == 0:
            return shown, labels
        number = max(1, round(self.mask_share * len(places)))
        if self.word_starts is None:
            chosen = rng.permutation(places)[:number]
        else:
            # A token after a special token always begins a word, because the rest of the word is not in the sequence.
            begins = self.word_starts[ids[places]] | (np.diff(places, prepend=-2) > 1)
            # The first place always begins a word, so it is no place to split.
            words = np.split(places, np.flatnonzero(begins)[1:])
            order = rng.permutation(len(words))
            reached = np.cumsum([len(words[word]) for word in order])
            needed = int(np.searchsorted(reached, number)) + 1  # words until they have at least this number of tokens
            chosen = np.concatenate([words[word] for word in order[:needed]])
        labels[chosen] = ids[chosen]
        dice = rng.random(len(chosen))
        random_tokens = rng.choice(self.vocabulary, len(chosen))
        shown[chosen] = np.where(dice < 0.8, self.mask_token_id, np.where(dice < 0.9, random_tokens, ids[chosen]))
        return shown, labels


def word_starts(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return for each token of the vocabulary whether it begins a word, (highest id + 1,) bool.

    In a WordPiece vocabulary a prefix (``##``) marks the tokens that continue a word. In byte-level BPE (``Ġ``) and
    sentencepiece (``▁``) a prefix marks the tokens after a blank, so a word includes the punctuation around it.

    Raises:
        UserError: the vocabulary is of another kind.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = {} if backend is None else json.loads(backend.to_str())
    prefixes, begins = tuple[str, ...](), True
    if backend is None:
        prefixes = ("▁",) if hasattr(tokenizer, "sp_model") else ()
    elif parts["model"]["type"] == "WordPiece":
        prefixes, begins = (parts["model"]["continuing_subword_prefix"],), False
    elif '"ByteLevel"' in json.dumps(parts["pre_tokenizer"]):
        prefixes = _BYTE_BLANKS
    # Metaspace has the character as its replacement; older files have it in a normalizer.
    elif "▁" in json.dumps([parts["pre_tokenizer"], parts["normalizer"]], ensure_ascii=False):
        prefixes = ("▁",)
    if not prefixes:
        raise UserError(
            f"data.text.whole_words: the vocabulary of this {type(tokenizer).__name__} does not mark where words begin "
            "(WordPiece, byte-level BPE and sentencepiece do); leave whole_words out"
        )
    return vocabulary_mask(tokenizer, lambda token: token.startswith(prefixes) == begins) | special_mask(tokenizer)


def special_mask(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return for each token of the vocabulary whether it is special, (highest id + 1,) bool."""
    special = vocabulary_mask(tokenizer, lambda _: False)
    special[tokenizer.all_special_ids] = True
    return special


def vocabulary_mask(tokenizer: PreTrainedTokenizerBase, condition: Callable[[str], bool]) -> np.ndarray:
    """Return for each token of the vocabulary whether it fulfills the condition, (highest id + 1,) bool."""
    vocabulary = tokenizer.get_vocab()
    mask = np.zeros(max(vocabulary.values()) + 1, dtype=bool)
    mask[[number for token, number in vocabulary.items() if condition(token)]] = True
    return mask
