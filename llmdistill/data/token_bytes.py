"""The bytes that the tokens of a tokenizer stand for, by which the tokens of two tokenizers are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.data.prompts import end_of_turn
from llmdistill.errors import UserError


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """A tokenizer whose tokens are pieces of UTF-8: byte-level BPE, or sentencepiece's BPE and Unigram."""

    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def pieces(self) -> list[bytes]:
        """Return the bytes of each token by its id; none for special tokens and for ids without a token.

        Raises:
            UserError: the tokenizer's tokens are no pieces of a text, such as those of WordPiece.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        decoder: Any = None if backend is None else json.loads(backend.to_str())["decoder"]
        kinds = {part["type"] for part in ([] if decoder is None else decoder.get("decoders", [decoder]))}
        if not kinds & {"ByteLevel", "Metaspace", "ByteFallback"}:
            raise UserError(
                f"the tokenizer of {self.tokenizer.name_or_path or 'the model'} is a {type(self.tokenizer).__name__}, "
                "whose tokens are no pieces of the text: another tokenizer than the teacher's needs byte-level BPE or "
                "sentencepiece on both sides; learn from the teacher's text: llmdistill generate, then --method seqkd"
            )
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        added = self.tokenizer.added_tokens_decoder
        vocabulary = self.tokenizer.get_vocab()
        # Vocabularies may have gaps, which stand for nothing.
        pieces = [b""] * (max(vocabulary.values()) + 1)
        for token, index in vocabulary.items():
            if index in added:
                pieces[index] = b"" if added[index].special else added[index].content.encode()
            elif "ByteLevel" in kinds:  # each byte is written as a printable character (GPT-2)
                is_bytes = byte_of.keys() >= set(token)
                pieces[index] = bytes(byte_of[character] for character in token) if is_bytes else token.encode()
            else:  # sentencepiece: ▁ is a space, and <0x0A> a byte
                is_byte = _is_byte(token)
                pieces[index] = bytes.fromhex(token[3:5]) if is_byte else token.replace("▁", " ").encode()
        return pieces

    @cached_property
    def written(self) -> dict[bytes, int]:
        """Return the token that encoding writes for each piece of text.

        Several tokens may stand for the same bytes, such as "." and <0x2E>; the latter comes first in many
        vocabularies, but encoding never writes it.
        """
        tokens: dict[bytes, list[int]] = {}
        for index, piece in enumerate(self.pieces):
            if piece:
                tokens.setdefault(piece, []).append(index)
        written = {piece: ids[0] for piece, ids in tokens.items()}
        for piece, ids in ((piece, ids) for piece, ids in tokens.items() if len(ids) > 1):
            choice = None
            with suppress(UnicodeDecodeError):
                text = piece.decode()
                contexts = (text, f"a{text}", f"{text}a", f"a{text}a")  # alone it may be part of another token
                choice = next((index for context in contexts for index in self.encode(context) if index in ids), None)
            if choice is None:
                names = self.tokenizer.convert_ids_to_tokens(ids)
                choice = next((index for index, name in zip(ids, names, strict=True) if not _is_byte(name)), ids[0])
            written[piece] = choice
        return written

    @cached_property
    def special(self) -> frozenset[int]:
        return frozenset(index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The end token, and the token that ends a turn of a chat; often they are the same.

        Raises:
            UserError: the tokenizer has no end token.
        """
        if self.tokenizer.eos_token_id is None:
            name = self.tokenizer.name_or_path or "the model"
            raise UserError(f"the tokenizer of {name} has no end token; set eos_token in its tokenizer_config.json")
        return self.tokenizer.eos_token_id, end_of_turn(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens around it."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def split(self, ids: Sequence[int], text: str | None = None) -> list[bytes]:
        """Return the bytes of each token at the beginning of a text, without a space that the tokenizer has added.

        Without the `text`, a first space counts as added if the tokenizer adds one to every text.
        """
        parts = [self.pieces[index] if index < len(self.pieces) else b"" for index in ids]
        # sentencepiece puts a space of its own before a text.
        if not parts or not parts[0].startswith(b" ") or not self.pieces[self.encode("a")[0]].startswith(b" "):
            return parts
        if text is None or b"".join(parts).startswith(b" " + text.encode()):
            parts[0] = parts[0][1:]
        return parts


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def shared_tokens(one: TokenBytes, other: TokenBytes) -> dict[int, int]:
    """Return the tokens that two tokenizers share: ids of `one` -> ids of `other`.

    They are written for the same bytes, or are special and have the same name. The end tokens, whatever their names,
    are the same token too.
    """
    shared = {index: other.written[piece] for piece, index in one.written.items() if piece in other.written}
    names = {token.content: index for index, token in other.tokenizer.added_tokens_decoder.items() if token.special}
    named = ((index, one.tokenizer.added_tokens_decoder[index].content) for index in sorted(one.special))
    shared |= {index: names[name] for index, name in named if name in names}
    return shared | dict(zip(one.ends, other.ends, strict=True))


def equal_spans(one: Sequence[bytes], other: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Number the spans of equal bytes of one text in two tokenizations: the span of each token, on either side.

    A span is as short as it can be: both sides begin and end it at the same byte. It is -1 for tokens from the first
    byte in which the two differ, and for the last ones if one side goes on where the other has ended within a token.
    """
    texts = [b"".join(parts) for parts in (one, other)]
    ends, others_ends = (np.cumsum([len(part) for part in parts], dtype=np.int64) for parts in (one, other))
    equal = min(map(len, texts))
    if texts[0][:equal] != texts[1][:equal]:
        equal = next(place for place in range(equal) if texts[0][place] != texts[1][place])
    # Bytes at which both sides end a token; a span ends at each of them.
    common = np.intersect1d(ends, others_ends)
    common = common[common <= equal]
    # The span of a token is the number of common ends before its own end.
    spans, others_spans = (np.searchsorted(common, side_ends) for side_ends in (ends, others_ends))
    return np.where(spans < len(common), spans, -1), np.where(others_spans < len(common), others_spans, -1)
