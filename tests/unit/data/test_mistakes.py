"""What is wrong with a set, a text or a tokenizer is one sentence, with its file and line or the setting."""

import re

import pytest
from hostile import refuses
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from llmdistill.config import DataConfig
from llmdistill.config.command_line import with_values
from llmdistill.config.data import RolloutConfig, TextConfig
from llmdistill.data.corpus import store_corpus
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.masking import word_starts
from llmdistill.data.prompts import render_prompt, resolve_prompt
from llmdistill.data.sources import examples_of, read_examples, write_rows
from llmdistill.data.stored_examples import store_examples
from llmdistill.data.stream import check_stream
from llmdistill.data.targets import Marks, TargetExample, encode_targets
from llmdistill.tasks.text import _list_parts

GOOD = '{"instruction": "Add.", "input": "1 2", "output": "3"}'
ROWS: list[tuple[str, str]] = [
    ('{"instruction": "a", ', "not JSON"),
    ("[1, 2]", "a list, not an object"),
    ('{"instruction": "a"}', 'the key "output" is missing'),
    ('{"instruction": "a", "output": "\\ud800"}', "not JSON (a \\ud... escape without its other half"),
]


def bare(**names: str) -> PreTrainedTokenizerFast:
    """A tokenizer that marks no beginnings of words, and has the special tokens that are named."""
    backend = Tokenizer(models.WordLevel({"w0": 0, "w1": 1, "w2": 2}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.mark.parametrize(("row", "said"), ROWS, ids=lambda each: each[:30])
def test_a_row(tmp_path, word_tokenizer, row, said):
    lines = tmp_path / "a.jsonl"
    lines.write_text(f"{GOOD}\n\n{row}\n{GOOD}")
    refuses(f"a.jsonl:3: {said}", read_examples, lines)
    refuses(f"a.jsonl:3: {said}", store_examples, lines, word_tokenizer(), Limits(), cache_dir=tmp_path / "cache")
    assert not [*tmp_path.glob("cache/instructions/*")], "a mistake leaves nothing in the cache"
    lines.write_text(row)
    refuses(f"a.jsonl:1: {said}", check_stream, lines, word_tokenizer(), Limits())


def test_a_json_file(tmp_path):
    for text, said in (
        (f'[{GOOD}, {{"instruction": "a"}}]', 'a.json: item 2: the key "output" is missing'),
        (f"[{GOOD}, 3]", "a.json: item 2: a int, not an object"),
        (f'{{"rows": [{GOOD}]}}', "a.json: holds no array"),
        ("[\n{,}]", "a.json:2: not JSON"),
    ):
        (tmp_path / "a.json").write_text(text)
        refuses(said, read_examples, tmp_path / "a.json")


def test_a_file_of_rows_that_is_none(tmp_path, word_tokenizer):
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    (tmp_path / "taken").write_text("a file")
    for name, said in (("binary.jsonl", ":1: cannot be read as UTF-8"), ("empty.jsonl", ": holds no example")):
        refuses(name + said, read_examples, tmp_path / name)
        refuses(name + said, check_stream, tmp_path / name, word_tokenizer(), Limits())
    (tmp_path / "a.jsonl").write_text(GOOD)
    cache = {"cache_dir": tmp_path / "taken"}
    refuses("folder as data.cache_dir", store_examples, tmp_path / "a.jsonl", word_tokenizer(), Limits(), **cache)


def test_rows_in_memory_with_half_a_character(tmp_path):
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "a", "output": "\ud800"}]
    refuses("data: row 2: it holds half of a surrogate pair", examples_of, rows)
    refuses("data: row 1: it holds half of a surrogate pair", write_rows, ["\udfff"], tmp_path)


def test_a_text(tmp_path, word_tokenizer):
    for content, said in (
        (b" \n\n", "a.txt: holds no text; give at least one line of it"),
        (b"caf\xe9\n", "a.txt:1: cannot be read as UTF-8 text (invalid continuation byte"),
    ):
        (tmp_path / "a.txt").write_bytes(content)
        refuses(said, store_corpus, tmp_path / "a.txt", word_tokenizer(), cache_dir=tmp_path / "cache")
    assert not [*tmp_path.glob("cache/corpora/*")]


def test_languages_are_files_and_folders_of_one_folder(tmp_path):
    folder = tmp_path / "corpus"
    settings = DataConfig(kind="text", train=str(folder), text=TextConfig(sampling_exponent=0.3))
    refuses("is no folder", _list_parts, settings)
    (folder / "en").mkdir(parents=True)
    refuses("has 1 parts", _list_parts, settings)
    for name in ("de.txt", ".cache"):
        (folder / name).touch()
    assert sorted(_list_parts(settings)) == ["de", "en"]
    (folder / "de.jsonl").touch()
    refuses("two parts of one name", _list_parts, settings)


MARKS = {"cls_token": "w1", "sep_token": "w2", "pad_token": "w0"}
HINTED = [TargetExample("w1", "w1 w1 w1 w1", "w1")]
INPUT = Example("Hi", "you", ("x",), "rows:3")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: encode([INPUT], bare(), Limits()), "the tokenizer has no end token; set eos_token"),
        (lambda: Limits(max_prompt_length=9, max_length=9), "data.max_prompt_length=9 must be at least 1 and below"),
        (lambda: render_prompt(INPUT, prompt="Q: {instruction}"), "rows:3: an input, but data.prompt has no {input}"),
        (lambda: resolve_prompt("chat", [bare()]), "is chat, but the tokenizer of the model has no chat template"),
        (lambda: resolve_prompt("alpaca", [bare()]), "is 'alpaca': give minillm, chat, or a text with {instruction}"),
        (lambda: word_starts(bare()), "does not mark where words begin"),
        (lambda: Marks.of(bare(**MARKS)), "the tokenizer has no mask_token"),
        (lambda: encode_targets(HINTED, bare(**MARKS, mask_token="w0"), max_source=3, max_target=3), "no room in them"),
        (lambda: with_values(RolloutConfig(), {"url": "a:1"}, key="data.rollout"), "data.rollout.url is a:1: give"),
    ],
    ids=lambda each: each[:30] if isinstance(each, str) else "",
)
def test_settings_and_tokenizers_that_do_not_fit(call, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        call()
