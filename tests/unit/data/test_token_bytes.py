"""Tokens as bytes, and the spans of two tokenizations, against the ends that their tokens share."""

import random
from itertools import accumulate, pairwise

import pytest
from byte_tokenizers import byte_level, sentencepiece_like
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from word_models import word_tokenizer

from llmdistill.data.token_bytes import TokenBytes, equal_spans, shared_tokens
from llmdistill.errors import UserError

SCRIPTS = ("abcdefgh ,.", "абвгдежз ", "αβγδεζηθ ", "日本語中文字の ", "नमस्ते भारत ", "🙂🚀é ñ")


def cut_at_random(text: bytes, chance: random.Random) -> list[bytes]:
    """Pieces of one to five bytes, which need not end where a character does."""
    places = [0, *accumulate(chance.choices(range(1, 6), k=len(text)))]
    return [text[start:stop] for start, stop in pairwise(places) if start < len(text)]


def spans_of_shared_ends(one: list[bytes], other: list[bytes]) -> list[list[int]]:
    """A span ends wherever a token of each side does, as far as the texts are the same."""
    texts = b"".join(one), b"".join(other)
    same = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    ends = [list(accumulate(map(len, side))) for side in (one, other)]
    shared = [end for end in ends[0] if end in ends[1] and end <= same]
    return [[sum(s < end for s in shared) if end <= max(shared, default=0) else -1 for end in side] for side in ends]


def test_spans_end_where_tokens_of_both_do():
    chance = random.Random(0)
    for number in range(10_000):
        text = "".join(chance.choices(SCRIPTS[number % len(SCRIPTS)], k=chance.randint(0, 30))).encode()
        one, other = cut_at_random(text, chance), cut_at_random(text, chance)
        if number % 4 == 0:  # one side ends earlier or is empty, or reads another text from some byte on
            other = other[:-1] + cut_at_random(b"?", chance)
        assert [each.tolist() for each in equal_spans(one, other)] == spans_of_shared_ends(one, other), (one, other)


@pytest.mark.parametrize("tokenizer", [byte_level(300), sentencepiece_like()], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("text", ["a plain text", "Ünïcödé, 日本語 🙂", "  two  spaces\n\tand more\n"])
def test_the_bytes_of_the_tokens_of_a_text_are_its_bytes(tokenizer, text):
    tokens = TokenBytes(tokenizer)
    assert b"".join(tokens.split(tokens.encode(text), text)) == text.encode()


def test_special_tokens_and_ids_without_a_token_have_no_bytes():
    tokens = TokenBytes(byte_level(300))
    assert tokens.pieces[tokens.ends[0]] == b""
    assert tokens.split([10_000]) == [b""]


def test_tokens_are_shared_by_their_bytes_and_the_end_by_its_meaning():
    one, other = TokenBytes(byte_level(300, end="<stop>")), TokenBytes(sentencepiece_like(end="</s>"))
    shared = shared_tokens(one, other)
    ends = shared.pop(one.ends[0])
    assert ends == other.ends[0]
    assert all(one.pieces[index] == other.pieces[its] != b"" for index, its in shared.items())
    assert shared.keys() == {n for n, piece in enumerate(one.pieces) if piece and piece in set(other.pieces)}
    same = shared_tokens(one, one)
    assert same == {index: index for index in range(300)}


def llama_like(*, bytes_first: bool = True, added: str = ""):
    """A BPE with byte fallback, whose byte tokens stand before or behind the characters, as in Llama and elsewhere."""
    characters = [*"▁.,abé", "▁a", "ab"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "</s>", *(fallback + characters if bytes_first else characters + fallback)]
    backend = Tokenizer(
        models.BPE({token: n for n, token in enumerate(tokens)}, [("▁", "a"), ("a", "b")], byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    found.add_tokens([AddedToken(each, normalized=False) for each in added])
    return found


@pytest.mark.parametrize("bytes_first", [True, False])
@pytest.mark.parametrize("added", ["", "\n."])
def test_of_tokens_of_the_same_bytes_that_is_shared_which_encoding_writes(bytes_first, added):
    texts = ["a.b", "ab, é", " a .", "\n", "ž.", "a b\na"]
    one, other = TokenBytes(byte_level(300, texts=texts)), TokenBytes(llama_like(bytes_first=bytes_first, added=added))
    written = {index for text in texts for index in other.encode(text)}
    names = other.tokenizer.convert_ids_to_tokens(sorted(written))
    assert {".", "▁", "é"} <= set(names), "what encoding writes"
    assert ("<0x0A>" in names) == (added == "")
    there, back = shared_tokens(one, other), shared_tokens(other, one)
    for index in written:
        piece = other.pieces[index]
        assert one.pieces.index(piece) in there if piece in one.pieces else index not in back
        if piece in one.pieces:
            assert there[one.pieces.index(piece)] == index
            assert back[index] == one.pieces.index(piece)
    # A byte that nothing writes otherwise is its byte token.
    (zero,) = other.tokenizer.convert_tokens_to_ids(["<0x00>"])
    assert there[one.pieces.index(b"\0")] == zero
    assert all(there[index] == its for its, index in back.items())


def test_word_pieces_are_refused():
    with pytest.raises(UserError, match=r"tokens are no pieces of the text.*seqkd"):
        _ = TokenBytes(word_tokenizer(["[UNK]", "a"], marked=False)).pieces


def test_a_tokenizer_without_an_end_token_is_refused():
    tokenizer = byte_level(300)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="has no end token; set eos_token"):
        _ = TokenBytes(tokenizer).ends
