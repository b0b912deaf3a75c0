from __future__ import annotations

import csv
import json
import math
import shutil
import threading
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmdistill.data import corpus as module
from llmdistill.data.corpus import Corpus, tokenize
from llmdistill.errors import UserError

SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
TEXT = "One two. Three\n  four five \n\n \n\nsix\n\nseven eight\nnine"


class Counting(PreTrainedTokenizerFast):
    """Counts the texts that it is given."""

    texts = 0

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self.texts += len(text)
        return super().__call__(text, *args, **kwargs)


def letters(*, mask: bool = True, more: str = "") -> Counting:
    """One token a character; blanks at an end stay, so that it shows what was handed to it."""
    vocabulary = {**SPECIAL, **{chr(code): code for code in [10, 9, *range(32, 127), *map(ord, more)]}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return Counting(tokenizer_object=backend, **names, **({"mask_token": "[MASK]"} if mask else {}))


def read(corpus: Corpus) -> list[list[str]]:
    """The segments of each document, as text."""
    documents = []
    for first, last in pairwise(corpus.documents):
        bounds = corpus.segments[first : last + 1]
        parts = [corpus.tokens[start:stop] for start, stop in pairwise(bounds)]
        documents.append(["".join(map(chr, part)) for part in parts])
    return documents


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMDISTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def make(tmp_path: Path, cache: Path) -> Callable[..., Corpus]:
    def tokenized(text: str, name: str = "a.txt", *, mask: bool = True, **settings: Any) -> Corpus:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return tokenize(path, letters(mask=mask), **settings)

    return tokenized


class TestPlainText:
    def test_lines_are_segments_and_empty_lines_end_documents(self, make: Callable) -> None:
        corpus = make(TEXT)
        assert read(corpus) == [["One two. Three", "four five"], ["six"], ["seven eight", "nine"]]
        assert corpus.report() == "3 documents, 5 segments, 41 tokens"
        assert (corpus.segments.dtype, corpus.documents.dtype) == (np.int64, np.int64)
        assert isinstance(corpus.tokens, np.memmap), "a text larger than memory is never read as a whole"

    def test_a_decoder_learns_where_lines_end(self, make: Callable) -> None:
        expected = [["One two. Three\n", "  four five \n"], ["six\n"], ["seven eight\n", "nine"]]
        assert read(make(TEXT, mask=False)) == expected
        assert read(make(TEXT.replace("\n", "\r\n"), "b.txt", mask=False)) == expected

    def test_byte_order_mark_and_other_separators(self, tmp_path: Path, cache: Path) -> None:
        path = tmp_path / "a.md"
        path.write_bytes("\ufeffa\u2028b\n".encode())
        assert read(tokenize(path, letters(more="\u2028"))) == [["a\u2028b"]]

    def test_more_segments_than_are_tokenized_at_once(self, make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_AT_ONCE", 2)
        lines = [f"line {number}" if number % 4 else "" for number in range(1, 30)]
        expected = [part.split("\n") for part in "\n".join(lines).split("\n\n")]
        assert read(make("\n".join(lines))) == [[line for line in part if line] for part in expected]

    def test_lines_without_tokens_are_no_segments(self, make: Callable, tmp_path: Path) -> None:
        tokenizer = letters()
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace("x", "")
        path = tmp_path / "x.txt"
        path.write_text("a\nxx\nb\n\nxxx\n\nc", encoding="utf-8")
        assert read(tokenize(path, tokenizer)) == [["a", "b"], ["c"]]

    def test_a_folder_in_the_order_of_names(self, tmp_path: Path, cache: Path) -> None:
        folder = tmp_path / "texts"
        (folder / "b").mkdir(parents=True)
        (folder / "c.txt").write_text("last", encoding="utf-8")
        (folder / "b" / "x.jsonl").write_text('{"text": "second\\nrow"}\n{"text": "third"}\n', encoding="utf-8")
        (folder / "a.txt").write_text("zeroth", encoding="utf-8")
        (folder / "a2.txt").write_text("first", encoding="utf-8")
        (folder / ".hidden").write_text("hidden", encoding="utf-8")
        assert read(tokenize(folder, letters())) == [["zeroth"], ["first"], ["second", "row"], ["third"], ["last"]]

    def test_large_vocabularies_need_wider_numbers(self, make: Callable, tmp_path: Path) -> None:
        assert make("ab").tokens.dtype == np.uint16
        (tmp_path / "wide.txt").write_text("a\U00010000", encoding="utf-8")
        wide = tokenize(tmp_path / "wide.txt", letters(more="\U00010000"))
        assert wide.tokens.dtype == np.uint32
        assert read(wide) == [["a\U00010000"]]


class TestRows:
    ROWS = ("One\n\n two \nthree", "four", " \n ", "\nfive\n")

    def write(self, path: Path, key: str) -> Path:
        rows = [{key: text, "id": str(number)} for number, text in enumerate(self.ROWS)]
        if path.suffix == ".csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, [key, "id"])
                writer.writeheader()
                writer.writerows(rows)
        elif path.suffix == ".parquet":
            datasets.Dataset.from_list(rows).to_parquet(path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows), encoding="utf-8")
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    @pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet", ".csv"])
    def test_each_is_a_document(self, tmp_path: Path, cache: Path, ending: str) -> None:
        path = self.write(tmp_path / f"a{ending}", "content")
        assert read(tokenize(path, letters(), field="content")) == [["One", "two", "three"], ["four"], ["five"]]
        decoder = [["One\n\n", " two \n", "three"], ["four"], ["five\n"]]
        assert read(tokenize(path, letters(mask=False), field="content")) == decoder

    def test_from_the_hub(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
            asked.append((name, config, split, streaming))
            return [{"text": text} for text in self.ROWS]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        for _ in range(2):
            assert len(read(tokenize("someone/texts:en:train", letters()))) == 3
        assert asked == [("someone/texts", "en", "train", True)]
        tokenize("someone/texts:de:train", letters())
        assert len(asked) == 2, "another name is another text"

    @pytest.mark.parametrize(
        ("row", "what"),
        [
            ({"body": "a", "id": 1}, "the key \"text\" is missing (there are ['body', 'id']); name the key of"),
            ({"text": None}, 'the key "text" is missing'),
            ({"text": ["a"], "id": 1}, "\"text\" is a list, not a string (there are ['id', 'text']); quote it"),
        ],
    )
    def test_without_the_text(self, tmp_path: Path, cache: Path, row: dict[str, Any], what: str) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "a"}\n\n' + json.dumps(row), encoding="utf-8")
        with pytest.raises(UserError) as error:
            tokenize(path, letters())
        assert str(error.value).startswith(f"{path}:3: {what}")
        assert "data.text.field" in str(error.value)
        assert not list((cache / "corpora").iterdir()), "nothing half is left"


class TestCache:
    def test_what_a_call_leaves_in_the_tokenizer_does_not_count(self, tmp_path: Path, cache: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text(TEXT, encoding="utf-8")
        tokenizer = letters()
        tokenizer.backend_tokenizer.enable_truncation(8)
        tokenizer.backend_tokenizer.enable_padding(length=8)
        assert read(tokenize(path, tokenizer))[0] == ["One two. Three", "four five"]
        assert tokenizer.backend_tokenizer.truncation is None
        tokenize(path, tokenizer)
        assert tokenizer.texts == 5

    def test_what_decides_is_tokenized_anew(self, make: Callable, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def folders() -> int:
            return len(list((cache / "corpora").iterdir()))

        row = json.dumps({"text": "ab", "other": "cd"})
        make(row, "a.jsonl")
        assert folders() == 1
        assert read(make(row, "a.jsonl", field="other")) == [["cd"]]
        assert folders() == 2
        assert read(make(row, "a.txt")) == [[row]], "the same as plain text"
        assert folders() == 3
        assert read(make(row.replace("ab", "ba"), "a.jsonl")) == [["ba"]]
        assert folders() == 4
        make(row, "a.jsonl", mask=False)
        assert folders() == 5
        tokenize(cache.parent / "a.jsonl", letters(more="é"))
        assert folders() == 6
        monkeypatch.setattr(module, "_FORMAT", -1)
        make(row, "a.jsonl")
        assert folders() == 7

    def test_two_at_once(self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "a.txt"
        path.write_text(TEXT, encoding="utf-8")
        meeting = threading.Barrier(2, timeout=120)
        encode, made = module._encode, []

        def together(*arguments: Any) -> Any:
            meeting.wait()  # both have found no corpus by now
            return encode(*arguments)

        monkeypatch.setattr(module, "_encode", together)
        threads = [threading.Thread(target=lambda: made.append(tokenize(path, letters()))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [len(read(corpus)) for corpus in made] == [3, 3]
        assert len(list((cache / "corpora").iterdir())) == 1


def numbered(path: Path, documents: int) -> Path:
    """Each document is its number, in one or two lines."""
    texts = [f"{number}\n{number}" if number % 3 == 0 else str(number) for number in range(documents)]
    path.write_text("\n\n".join(texts), encoding="utf-8")
    return path


class TestFraction:
    """What is taken of a text whose documents are numbers."""

    def taken(self, path: Path, fraction: float, seed: int = 0, tokenizer: Counting | None = None) -> list[int]:
        corpus = tokenize(path, letters() if tokenizer is None else tokenizer, fraction=fraction, seed=seed)
        return [int(document[0]) for document in read(corpus)]

    @pytest.mark.parametrize("fraction", [0.001, 0.07, 0.1, 0.25, 0.3, 0.333, 0.5, 0.7, 0.9, 0.999])
    def test_the_number_of_documents_is_the_fraction_of_any_number(self, fraction: float) -> None:
        for number in (1, 2, 9, 10, 30, 99, 1000):
            lines = (((0, document), f"{document}-{line}") for document in range(number) for line in range(2))
            taken = [text for _, text in module.draw_documents(lines, fraction, seed=3)]
            documents = [int(text.partition("-")[0]) for text in taken[::2]]
            exact = number * Decimal(str(fraction))
            assert math.floor(exact) <= len(documents) <= math.ceil(exact)
            assert documents == sorted(set(documents))
            assert taken == [f"{document}-{line}" for document in documents for line in range(2)], "whole documents"

    def test_they_come_from_all_over_the_text_and_every_one_may_be_taken(self, tmp_path: Path, cache: Path) -> None:
        path = numbered(tmp_path / "a.txt", 40)
        drawn = [self.taken(path, 0.1, seed) for seed in range(60)]
        assert all([number // 10 for number in taken] == [0, 1, 2, 3] for taken in drawn)
        assert {number for taken in drawn for number in taken} == set(range(40))

    def test_the_seed_decides(self, tmp_path: Path, cache: Path) -> None:
        path = numbered(tmp_path / "a.txt", 200)
        first = self.taken(path, 0.1, seed=1)
        assert self.taken(path, 0.1, seed=2) != first
        for other in (path.rename(tmp_path / "b.txt"), numbered(tmp_path / "c.txt", 200)):
            assert self.taken(other, 0.1, seed=1) == first
        shutil.rmtree(cache)
        assert self.taken(path.with_name("b.txt"), 0.1, seed=1) == first, "not only out of the cache"

    def test_only_what_is_taken_is_tokenized_and_kept_apart(self, tmp_path: Path, cache: Path) -> None:
        path, tokenizer = numbered(tmp_path / "a.txt", 60), letters()
        assert self.taken(path, 1.0, tokenizer=tokenizer) == list(range(60))
        assert tokenizer.texts == 80
        taken = [self.taken(path, fraction, seed, tokenizer) for fraction in (0.1, 0.2) for seed in (0, 1)]
        texts = sum(2 if number % 3 == 0 else 1 for numbers in taken for number in numbers)
        assert tokenizer.texts == 80 + texts
        assert len(list((cache / "corpora").iterdir())) == 5
        assert self.taken(path, 1.0, 7, tokenizer) == list(range(60)), "the whole text knows no seed"
        assert self.taken(path, 0.1, 1, tokenizer) == taken[1]
        assert tokenizer.texts == 80 + texts

    def test_a_share_without_a_document(self, tmp_path: Path, cache: Path) -> None:
        path = numbered(tmp_path / "a.txt", 5)
        with pytest.raises(UserError, match=r"a\.txt: data\.text\.fraction 1e-06 takes no document of it; raise the"):
            self.taken(path, 1e-6)
        assert not list((cache / "corpora").iterdir())
