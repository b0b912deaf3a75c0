from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from transformers import PreTrainedTokenizerFast

from llmdistill.data import columns, example_store
from llmdistill.data.example_store import open_examples, store_examples
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate

Make = Callable[..., PreTrainedTokenizerFast]
LIMITS = Limits(max_prompt_length=12, max_length=14, long_prompts="truncate")
ROWS = [{"prompt": "p" * (1 + n % 15), "completion": "abc"[: n % 4]} for n in range(15)]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMDISTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """From its call on nothing may be tokenized."""
    return lambda: monkeypatch.setattr(example_store, "encode", lambda *_, **__: pytest.fail("it is tokenized again"))


@pytest.mark.parametrize("at_once", [1, 4, 1000])
@pytest.mark.parametrize("long_prompts", ["truncate", "drop"])
def test_items_are_those_of_encode(
    word_tokenizer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, long_prompts: Any
) -> None:
    monkeypatch.setattr(columns, "AT_ONCE", at_once)
    path, limits = write(tmp_path / "a.jsonl"), Limits(**{**vars(LIMITS), "long_prompts": long_prompts})
    found = open_examples(store_examples(path, word_tokenizer(), limits))
    expected = encode(read_examples(path), word_tokenizer(), limits)
    assert expected.counts.dropped + expected.counts.truncated_prompts > 0
    assert expected.counts.truncated_responses > 0
    assert list(found.items) == expected.items
    assert found.items[2:5] == expected.items[2:5]
    assert found.items[-1] == expected.items[-1]
    assert [found.items.length(place) for place in range(len(found.items))] == [len(item) for item in expected.items]
    assert found.counts.report() == expected.counts.report()
    with pytest.raises(IndexError):
        found.items[len(found.items)]


def test_the_embedded_set(cache: Path) -> None:
    from llmdistill.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(locate("embedded:teacher"))
    folder = store_examples(locate("embedded:valid"), tokenizer, Limits())
    expected = encode(read_examples(locate("embedded:valid")), tokenizer, Limits()).items
    found = open_examples(folder).items
    assert list(found) == expected
    assert [item.sample_id for item in found[:50]] == [item.sample_id for item in expected[:50]]
    assert pa.ipc.open_file(str(folder / "0.arrow")).schema.field("ids").type == pa.list_(pa.uint16())


class TestCache:
    def test_the_second_time_nothing_is_tokenized(
        self, word_tokenizer: Make, tmp_path: Path, untouched: Callable[[], Any]
    ) -> None:
        path = write(tmp_path / "a.jsonl")
        first = store_examples(path, word_tokenizer(), LIMITS)
        untouched()
        moved = path.rename(tmp_path / "b.jsonl")
        assert store_examples(moved, word_tokenizer(), LIMITS) == first
        assert len(open_examples(first).items) == len(ROWS)

    def test_what_decides_is_tokenized_anew(self, word_tokenizer: Make, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl")
        wider, cut = (
            Limits(max_prompt_length=13, max_length=16, long_prompts="truncate"),
            Limits(max_prompt_length=12, max_length=15, long_prompts="truncate"),
        )
        folders = [
            store_examples(path, word_tokenizer(), LIMITS),
            store_examples(path, word_tokenizer(with_start=True), LIMITS),
            store_examples(path, word_tokenizer(chat=True), LIMITS),
            store_examples(path, word_tokenizer(), wider),
            store_examples(path, word_tokenizer(), cut),
            store_examples(write(tmp_path / "b.jsonl", ROWS[1:]), word_tokenizer(), LIMITS),
        ]
        end = word_tokenizer()
        end.eos_token = "x"
        folders.append(store_examples(path, end, LIMITS))
        assert len(set(folders)) == len(folders)

    def test_a_chat_template_that_writes_the_date(self, word_tokenizer: Make, tmp_path: Path) -> None:
        rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
        path, tokenizer, days = write(tmp_path / "a.jsonl", rows), word_tokenizer(), []
        for day in ("1", "2"):
            tokenizer.chat_template = "{{ day }}{% for turn in messages %}{{ turn.content }}{% endfor %}"
            render = tokenizer.apply_chat_template
            tokenizer.apply_chat_template = lambda *args, render=render, day=day, **more: render(  # type: ignore
                *args, **{**more, "day": day}
            )
            days.append(open_examples(store_examples(path, tokenizer, LIMITS)).items[0].prompt_ids)
            del tokenizer.apply_chat_template
        assert days[0] != days[1]

    @pytest.mark.parametrize("name", ["0.arrow", "meta.json", "manifest.json"])
    def test_what_is_damaged_is_made_anew(self, word_tokenizer: Make, tmp_path: Path, name: str) -> None:
        path = write(tmp_path / "a.jsonl")
        folder = store_examples(path, word_tokenizer(), LIMITS)
        written = (folder / name).read_bytes()
        middle = len(written) // 2
        flipped = written[:middle] + bytes([written[middle] ^ 1]) + written[middle + 1 :]
        for damage in (
            written[:-2],
            bytes([written[0] ^ 1]) + written[1:],
            flipped,
            b"[]",
        ):
            (folder / name).write_bytes(damage)
            store_examples(path, word_tokenizer(), LIMITS)
            assert (folder / name).read_bytes() == written

    def test_rows_of_the_hub_are_known_by_their_content(
        self, word_tokenizer: Make, monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], Any]
    ) -> None:
        rows = [dict(row) for row in ROWS]
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
        first = store_examples("someone/rows", word_tokenizer(), LIMITS)
        rows[3]["completion"] = "new"
        changed = store_examples("someone/rows", word_tokenizer(), LIMITS)
        assert changed != first, "the owner has changed the set"
        untouched()
        assert store_examples("someone/rows", word_tokenizer(), LIMITS) == changed
