from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from llmdistill.data.instruct import Example, check_lengths, encode, encode_prompts, read_examples, render_prompt
from llmdistill.errors import UserError


def word_tokenizer(*, with_start: bool = False, with_end: bool = False) -> PreTrainedTokenizerFast:
    """One token per character, so that lengths can be counted by hand."""
    symbols = ["</s>", "<s>", *(chr(code) for code in range(32, 127)), "\n", "é"]
    backend = Tokenizer(models.WordLevel({symbol: n for n, symbol in enumerate(symbols)}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    single = ("<s> " if with_start else "") + "$A" + (" </s>" if with_end else "")
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("</s>", 0), ("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


ROW = {"instruction": "Add.", "input": "1 2", "output": "3"}


class TestReadExamples:
    def test_string_list_and_missing_input(self, tmp_path: Path) -> None:
        path = write(
            tmp_path / "a.jsonl",
            ROW,
            {"instruction": "Greet.", "output": ["Hello.", "Hi."], "id": 7},
            {"instruction": "Greet.", "input": None, "output": "é"},
            "",
            "",
        )
        assert read_examples(path) == [
            Example("Add.", "1 2", ("3",)),
            Example("Greet.", "", ("Hello.", "Hi.")),
            Example("Greet.", "", ("é",)),
        ]

    def test_line_separators_inside_strings_do_not_end_a_line(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes('\ufeff{"instruction": "a\u2028b", "output": "c\x85d"}\r\n'.encode())
        assert read_examples(path) == [Example("a\u2028b", "", ("c\x85d",))]

    @pytest.mark.parametrize(
        ("line", "what"),
        [
            ('{"instruction": "a", ', "not JSON"),
            ("[1, 2]", "a list, not an object"),
            ({"instruction": "a"}, 'the key "output" is missing'),
            ({"output": "a"}, 'the key "instruction" is missing'),
            ({**ROW, "instruction": 3}, '"instruction" is 3, not a string'),
            ({**ROW, "input": ["x"]}, '"input" is ["x"], not a string'),
            ({**ROW, "output": {"a": 1}}, '"output" is {"a": 1}; give a string or a list'),
            ({**ROW, "output": ["a", 1]}, '"output" is ["a", 1]; give'),
            ({**ROW, "output": []}, '"output" is []; give'),
        ],
    )
    def test_bad_line_is_named(self, tmp_path: Path, line: object, what: str) -> None:
        path = write(tmp_path / "a.jsonl", ROW, line, ROW)
        with pytest.raises(UserError) as error:
            read_examples(path)
        assert str(error.value).startswith(f"{path}:2: {what}")

    def test_missing_file_empty_file_and_binary(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
            read_examples(tmp_path / "none.jsonl")
        with pytest.raises(UserError, match="holds no example"):
            read_examples(write(tmp_path / "empty.jsonl", "", "  "))
        (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UserError, match="cannot be read as UTF-8"):
            read_examples(tmp_path / "binary.jsonl")
        with pytest.raises(UserError, match="cannot be read"):
            read_examples(tmp_path)


def test_prompts_are_those_of_alpaca() -> None:
    assert render_prompt(Example("Use {braces}.", "", ("x",))) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nUse {braces}.\n\n### Response:\n"
    )
    assert render_prompt(Example("Add.", "{1}", ("x",))) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n{1}\n\n### Response:\n"
    )


class TestEncode:
    LENGTH = len(render_prompt(Example("", "", ("",))))

    def examples(self, *lengths: int) -> list[Example]:
        return [Example("i" * n, "", ("out", "other"), f"file:{place}") for place, n in enumerate(lengths, start=1)]

    def test_prompt_and_first_reference_with_the_end_token(self) -> None:
        tokenizer = word_tokenizer()
        [example] = self.examples(3)
        data = encode([example], tokenizer, max_prompt_length=self.LENGTH + 3, max_length=self.LENGTH + 7)
        [item] = data.items
        assert tokenizer.decode(item.prompt_ids).replace(" ", "") == render_prompt(example).replace(" ", "")
        assert item.prompt_ids[-1] == tokenizer.convert_tokens_to_ids("\n")
        assert item.response_ids == [*tokenizer.convert_tokens_to_ids(list("out")), tokenizer.eos_token_id]
        assert (data.dropped, data.truncated_prompts, data.truncated_responses) == (0, 0, 0)

    def test_a_response_that_does_not_fit_is_cut_and_counted(self) -> None:
        data = encode(
            self.examples(3, 1), word_tokenizer(), max_prompt_length=self.LENGTH + 3, max_length=self.LENGTH + 6
        )
        assert [len(item.response_ids) for item in data.items] == [3, 4]
        assert data.items[0].response_ids[-1] != 0
        assert data.items[1].response_ids[-1] == 0
        assert data.truncated_responses == 1
        assert data.report() == "2 examples: 0 dropped for a long prompt, 0 prompts and 1 responses truncated."

    def test_long_prompts_stop_by_default_and_are_counted(self) -> None:
        with pytest.raises(UserError) as error:
            encode(self.examples(1, 5, 9), word_tokenizer(), max_prompt_length=self.LENGTH + 4, max_length=200)
        assert str(error.value).startswith(
            f"2 of 3 prompts are longer than data.max_prompt_length={self.LENGTH + 4} tokens, "
            f"first file:2 with {self.LENGTH + 5}; set data.long_prompts=drop"
        )

    def test_long_prompts_are_dropped(self) -> None:
        limits = {"max_prompt_length": self.LENGTH + 4, "max_length": 200, "long_prompts": "drop"}
        data = encode(self.examples(5, 1, 9), word_tokenizer(), **limits)
        assert [len(item.prompt_ids) for item in data.items] == [self.LENGTH + 1]
        assert data.dropped == 2
        with pytest.raises(UserError, match="all 2 prompts"):
            encode(self.examples(5, 9), word_tokenizer(), **limits)

    def test_truncation_keeps_the_end_and_the_start_token(self) -> None:
        examples = self.examples(50, 1)
        limits = {"max_prompt_length": self.LENGTH + 10, "max_length": 300, "long_prompts": "truncate"}
        plain = encode(examples, word_tokenizer(), **limits)
        started = encode(examples, word_tokenizer(with_start=True), **limits)
        whole = word_tokenizer()(render_prompt(examples[0]))["input_ids"]
        assert plain.items[0].prompt_ids == whole[-limits["max_prompt_length"] :]
        assert started.items[0].prompt_ids == [1, *whole[-limits["max_prompt_length"] + 1 :]]
        assert plain.truncated_prompts == started.truncated_prompts == 1
        assert started.items[1].prompt_ids[0] == 1
        assert started.items[1].response_ids[0] != 1, "a start token belongs at the start only"

    def test_a_tokenizer_that_closes_texts_does_not_close_the_prompt(self) -> None:
        data = encode(self.examples(1), word_tokenizer(with_end=True), max_prompt_length=180, max_length=200)
        assert data.items[0].prompt_ids.count(0) == 0
        assert data.items[0].response_ids.count(0) == 1

    def test_limits_and_end_token_are_checked(self) -> None:
        for lengths in ((10, 10), (0, 10)):
            with pytest.raises(UserError, match="max_prompt_length"):
                check_lengths(*lengths)
        tokenizer = word_tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(UserError, match="no end token"):
            encode(self.examples(1), tokenizer, max_prompt_length=180, max_length=200)

    def test_prompts_without_sources_are_numbered(self) -> None:
        with pytest.raises(UserError, match="first prompt 2 with 3"):
            encode_prompts(["a", "abc"], word_tokenizer(), max_prompt_length=2, long_prompts="error")


@pytest.mark.parametrize(
    ("name", "kept", "dropped", "cut"),
    [
        ("self_inst", 242, 10, 4),  # 242 is the number that MiniLLM keeps
        ("vicuna", 80, 0, 5),
        ("dolly_sample", 123, 28, 3),
        ("seed_tasks", 170, 5, 1),
    ],
)
def test_real_sets_with_the_gpt2_tokenizer(name: str, kept: int, dropped: int, cut: int) -> None:
    folder = os.environ.get("LLMDISTILL_DATA")
    if folder is None:
        pytest.skip("LLMDISTILL_DATA is unset: it names the folder of the real data")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(Path(folder) / "tokenizers" / "gpt2")
    tokenizer.eos_token = "<|endoftext|>"
    examples = read_examples(Path(folder) / "instruct" / f"{name}.jsonl")
    data = encode(examples, tokenizer, max_prompt_length=256, max_length=512, long_prompts="drop")
    assert (len(data.items), data.dropped, data.truncated_responses) == (kept, dropped, cut)
    ended = sum(item.response_ids[-1] == tokenizer.eos_token_id for item in data.items)
    assert ended == kept - cut
    assert all(len(item.prompt_ids) <= 256 for item in data.items)
    assert max(len(item.prompt_ids) + len(item.response_ids) for item in data.items) <= 512
