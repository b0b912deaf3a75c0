import json
import math
import shutil
from decimal import Decimal
from itertools import pairwise
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
from hostile import refuses
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmdistill.data import corpus as module
from llmdistill.data.corpus import open_corpus, store_corpus

pytestmark = pytest.mark.usefixtures("cache")
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
TEXT = "One two. Three\n  four five \n\n \n\nsix\n\nseven eight\nnine"


def tokenize(*arguments, **settings):
    return open_corpus(store_corpus(*arguments, **settings))


def letters(*, mask: bool = True, more: str = "") -> PreTrainedTokenizerFast:
    """One token a character; blanks at an end stay, so that it shows what was handed to it."""
    vocabulary = {**SPECIAL, **{chr(code): code for code in [10, 9, *range(32, 127), *map(ord, more)]}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, **({"mask_token": "[MASK]"} if mask else {}))


def read(corpus):
    """The segments of each document, as text."""
    segments = ["".join(map(chr, corpus.tokens[start:stop])) for start, stop in pairwise(corpus.segments)]
    return [segments[first:last] for first, last in pairwise(corpus.documents)]


@pytest.fixture
def texts(monkeypatch):
    given: list[str] = []
    encode = module._tokenize
    monkeypatch.setattr(module, "_tokenize", lambda texts, tokenizer: given.extend(texts) or encode(texts, tokenizer))
    return given


@pytest.fixture
def make(tmp_path):
    def tokenized(text, name="a.txt", tokenizer=None, *, mask=True, **settings):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return tokenize(path, letters(mask=mask) if tokenizer is None else tokenizer, **settings)

    return tokenized


class TestPlainText:
    @pytest.mark.parametrize("at_once", [1, 2, 512])
    def test_lines_are_segments_and_empty_lines_end_documents(self, make, monkeypatch, at_once):
        monkeypatch.setattr(module, "_AT_ONCE", at_once)
        corpus = make(TEXT)
        assert read(corpus) == [["One two. Three", "four five"], ["six"], ["seven eight", "nine"]]
        assert corpus.report() == "3 documents, 5 segments, 41 tokens"
        assert (corpus.segments.dtype, corpus.documents.dtype) == (np.int64, np.int64)
        assert isinstance(corpus.tokens, np.memmap), "a text larger than memory is never read as a whole"
        assert corpus.tokens.dtype == np.uint16

    def test_what_ends_a_line_and_what_does_not(self, make):
        expected = [["One two. Three\n", "  four five \n"], ["six\n"], ["seven eight\n", "nine"]]
        assert read(make(TEXT.replace("\n", "\r\n"), mask=False)) == expected, "a decoder learns where lines end"
        corpus = make("\ufeffa\u2028\U00010000\n", "a.md", letters(more="\u2028\U00010000"))
        assert (read(corpus), corpus.tokens.dtype) == ([["a\u2028\U00010000"]], np.uint32)
        tokenizer = letters()
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace("x", "")
        assert read(make("a\nxx\nb\n\nxxx\n\nc", tokenizer=tokenizer)) == [["a", "b"], ["c"]]

    def test_a_folder_in_the_order_of_names(self, tmp_path):
        (tmp_path / "texts" / "b").mkdir(parents=True)
        rows = '{"text": "second\\nrow"}\n{"text": "third"}\n'
        files = {"c.txt": "last", "b/x.jsonl": rows, "a.txt": "first", ".hidden": "hidden"}
        for name, text in files.items():
            (tmp_path / "texts" / name).write_text(text)
        found = read(tokenize(tmp_path / "texts", letters()))
        assert found == [["first"], ["second", "row"], ["third"], ["last"]]


class TestRows:
    TEXTS = ("One\n\n two \nthree", "four", " \n ", "\nfive\n")

    def test_each_is_a_document(self, make):
        rows = "".join(json.dumps({"content": text, "id": "7"}) + "\n" for text in self.TEXTS)
        encoder = [["One", "two", "three"], ["four"], ["five"]]
        decoder = [["One\n\n", " two \n", "three"], ["four"], ["five\n"]]
        for mask, expected in ((True, encoder), (False, decoder)):
            assert read(make(rows, "a.jsonl", mask=mask, field="content")) == expected

    def test_from_the_hub(self, monkeypatch):
        load = Mock(return_value=[{"text": text} for text in self.TEXTS])
        monkeypatch.setattr(datasets, "load_dataset", load)
        for _ in range(2):
            assert len(read(tokenize("someone/texts:en:train", letters()))) == 3
        load.assert_called_once_with("someone/texts", "en", split="train", streaming=True)
        tokenize("someone/texts:de:train", letters())
        assert load.call_count == 2, "another name is another text"

    def test_without_the_text(self, make, cache):
        first = '{"text": "a"}\n\n'
        refuses('a.jsonl:3: the key "text" is missing (there', make, first + '{"body": "a"}', "a.jsonl")
        refuses('a.jsonl:3: "text" is a list, not a string (there', make, first + '{"text": ["a"]}', "a.jsonl")
        assert not list(cache.iterdir()), "nothing half is left"


class TestCache:
    def test_what_a_call_leaves_in_the_tokenizer_does_not_count(self, make, texts):
        tokenizer = letters()
        tokenizer.backend_tokenizer.enable_truncation(8)
        tokenizer.backend_tokenizer.enable_padding(length=8)
        assert read(make(TEXT, tokenizer=tokenizer))[0] == ["One two. Three", "four five"]
        assert tokenizer.backend_tokenizer.truncation is None
        make(TEXT, tokenizer=tokenizer)
        assert len(texts) == 5

    def test_what_decides_is_tokenized_anew(self, make, cache, monkeypatch):
        row = json.dumps({"text": "ab", "other": "cd"})
        make(row, "a.jsonl")
        assert read(make(row, "a.jsonl", field="other")) == [["cd"]]
        assert read(make(row, "a.txt")) == [[row]], "the same as plain text"
        assert read(make(row.replace("ab", "ba"), "a.jsonl")) == [["ba"]]
        make(row, "a.jsonl", mask=False)
        make(row, "a.jsonl", letters(more="é"))
        monkeypatch.setattr(module, "_FORMAT", -1)
        make(row, "a.jsonl")
        assert len(list(cache.iterdir())) == 7

    def test_two_at_once(self, make, cache, monkeypatch):
        encode = module._tokenize

        def after_another(*arguments):
            monkeypatch.setattr(module, "_tokenize", encode)
            make(TEXT)  # by another process, after this one has found no corpus
            return encode(*arguments)

        monkeypatch.setattr(module, "_tokenize", after_another)
        assert len(read(make(TEXT))) == 3
        assert len(list(cache.iterdir())) == 1


class TestFraction:
    """What is taken of a text whose documents are their numbers, in one line or two."""

    def drawn(self, number: int, fraction: float, seed: int) -> list[int]:
        lines = (((0, document), f"{document}-{line}") for document in range(number) for line in range(2))
        taken = [text for _, text in module.draw_documents(lines, fraction, seed)]
        documents = [int(text.partition("-")[0]) for text in taken[::2]]
        assert taken == [f"{document}-{line}" for document in documents for line in range(2)], "whole documents"
        return documents

    @pytest.mark.parametrize("fraction", [0.001, 0.1, 0.333, 0.7])
    def test_the_number_of_documents_is_the_fraction_of_any_number(self, fraction):
        for number in (1, 10, 99, 1000):
            exact = number * Decimal(str(fraction))
            assert math.floor(exact) <= len(self.drawn(number, fraction, seed=3)) <= math.ceil(exact)

    def test_they_come_from_all_over_the_text_and_every_one_may_be_taken(self):
        drawn = [self.drawn(40, 0.1, seed) for seed in range(60)]
        assert all([number // 10 for number in taken] == [0, 1, 2, 3] for taken in drawn)
        assert {number for taken in drawn for number in taken} == set(range(40))

    def test_only_what_is_taken_is_tokenized_and_kept_apart(self, make, cache, texts):
        text = "\n\n".join(f"{number}\n{number}" for number in range(60))

        def taken(fraction: float, seed: int, name: str = "a.txt") -> list[int]:
            return [int(lines[0]) for lines in read(make(text, name, fraction=fraction, seed=seed))]

        assert taken(1.0, 0) == list(range(60))
        parts = {(fraction, seed): taken(fraction, seed) for fraction in (0.1, 0.2) for seed in (0, 1)}
        assert parts[0.1, 0] != parts[0.1, 1]
        assert len(texts) == 120 + 2 * sum(map(len, parts.values()))
        assert len(list(cache.iterdir())) == 5
        texts.clear()
        assert taken(1.0, 7) == list(range(60)), "the whole text knows no seed"
        assert taken(0.1, 1, "b.txt") == parts[0.1, 1], "known by its content, not its name"
        assert not texts
        shutil.rmtree(cache)
        assert taken(0.1, 1) == parts[0.1, 1], "not only out of the cache"
        refuses("a.txt: data.text.fraction 1e-06 takes no document of it; raise the", taken, 1e-6, 0)
        assert len(list(cache.iterdir())) == 1
