from dataclasses import replace
from functools import partial

import datasets
import pyarrow as pa
import pytest

from llmdistill.data import store, stored_examples
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.pairs import PAIRS, EncodedPair
from llmdistill.data.sources import read_examples
from llmdistill.data.stored_examples import open_examples, store_examples

from support import write_rows

pytestmark = pytest.mark.usefixtures("cache")
LIMITS = Limits(max_prompt_length=12, max_length=14, long_prompts="truncate")
ROWS = [{"prompt": "p" * (1 + n % 15), "completion": "abc"[: n % 4]} for n in range(15)]


@pytest.fixture
def untouched(monkeypatch):
    """From its call on nothing may be tokenized."""
    return lambda: monkeypatch.setattr(stored_examples, "encode", lambda *_, **__: pytest.fail("it is tokenized again"))


@pytest.mark.parametrize(("at_once", "long_prompts"), [(1, "drop"), (4, "truncate")])
def test_items_are_those_of_encode(word_tokenizer, tmp_path, monkeypatch, at_once, long_prompts):
    monkeypatch.setattr(store, "AT_ONCE", at_once)
    path, limits = write_rows(tmp_path / "a.jsonl", ROWS), replace(LIMITS, long_prompts=long_prompts)
    folder = store_examples(path, word_tokenizer(), limits)
    found = open_examples(folder)
    expected = encode(read_examples(path), word_tokenizer(), limits)
    assert expected.counts.dropped + expected.counts.truncated_prompts > 0
    assert expected.counts.truncated_responses > 0
    assert list(found.items) == expected.items
    assert [found.items.length(place) for place in range(len(found.items))] == [len(item) for item in expected.items]
    assert found.items.longest == max(map(len, expected.items))
    assert found.counts.report() == expected.counts.report()
    assert pa.ipc.open_file(str(folder / "0.arrow")).schema.field("ids").type == pa.list_(pa.uint16())


def test_an_example_is_made_only_when_it_is_asked_for(word_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "AT_ONCE", 2)
    items, made = [EncodedPair([5, 6, 7][: 1 + n % 3], None, n / 3, n + 10) for n in range(7)], []
    writer = store.SplitWriter(tmp_path, word_tokenizer())
    writer.add("train", store.in_pieces(items), PAIRS)
    allocated = pa.total_allocated_bytes()
    watched = store.Schema(make=lambda **given: made.append(given["index"]), columns=PAIRS.columns)
    found = store.MappedItems(tmp_path / "0.arrow", watched)
    assert (len(found), found.longest, found.length(2), made) == (7, 3, 3, [])
    found[4]
    assert made == [14]
    assert pa.total_allocated_bytes() == allocated, "the ranks of a node share the pages of the file"
    kept = list(store.MappedItems(tmp_path / "0.arrow", PAIRS))
    assert [repr(each) for each in kept] == [repr(each) for each in items], "plain Python numbers, not numpy's"


class TestCache:
    def test_the_second_time_nothing_is_tokenized(self, word_tokenizer, tmp_path, untouched):
        path = write_rows(tmp_path / "a.jsonl", ROWS)
        first = store_examples(path, word_tokenizer(), LIMITS)
        untouched()
        assert store_examples(path.rename(tmp_path / "b.jsonl"), word_tokenizer(), LIMITS) == first

    def test_what_decides_is_tokenized_anew(self, word_tokenizer, tmp_path):
        path = write_rows(tmp_path / "a.jsonl", ROWS)
        plain, end = word_tokenizer(), word_tokenizer()
        end.eos_token = "x"
        others = (word_tokenizer(with_start=True), word_tokenizer(chat=True), end)
        folders = [store_examples(path, tokenizer, LIMITS) for tokenizer in (plain, *others)]
        for change in ({"max_prompt_length": 13}, {"max_length": 15}):
            folders.append(store_examples(path, plain, replace(LIMITS, **change)))
        folders.append(store_examples(write_rows(path, ROWS[1:]), plain, LIMITS))
        assert len(set(folders)) == 7

    def test_a_chat_template_that_writes_the_date(self, word_tokenizer, tmp_path):
        rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
        path, tokenizer, days = write_rows(tmp_path / "a.jsonl", rows), word_tokenizer(), []
        tokenizer.chat_template = "{{ day }}{% for turn in messages %}{{ turn.content }}{% endfor %}"
        render = tokenizer.apply_chat_template
        for day in ("1", "2"):
            tokenizer.apply_chat_template = partial(render, day=day)
            days.append(open_examples(store_examples(path, tokenizer, LIMITS)).items[0].prompt_ids)
        assert days[0] != days[1]

    @pytest.mark.parametrize("name", ["0.arrow", "manifest.json"])
    def test_what_is_damaged_is_made_anew(self, word_tokenizer, tmp_path, name):
        path = write_rows(tmp_path / "a.jsonl", ROWS)
        folder = store_examples(path, word_tokenizer(), LIMITS)
        written = (folder / name).read_bytes()
        middle = len(written) // 2
        (folder / name).write_bytes(written[:middle] + bytes([written[middle] ^ 1]) + written[middle + 1 :])
        store_examples(path, word_tokenizer(), LIMITS)
        assert (folder / name).read_bytes() == written

    def test_rows_of_the_hub_are_known_by_their_content(self, word_tokenizer, monkeypatch, untouched):
        rows = [dict(row) for row in ROWS]
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
        first = store_examples("someone/rows", word_tokenizer(), LIMITS)
        rows[3]["completion"] = "new"
        changed = store_examples("someone/rows", word_tokenizer(), LIMITS)
        assert changed != first, "the owner has changed the set"
        untouched()
        assert store_examples("someone/rows", word_tokenizer(), LIMITS) == changed
