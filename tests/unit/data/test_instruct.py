import pytest
from hostile import refuses
from transformers import PreTrainedTokenizerFast

from llmdistill.data.chat_messages import Turn
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode, encode_prompts
from llmdistill.data.prompts import render_prompt
from llmdistill.data.sources import read_examples


def test_prompts_are_those_of_alpaca():
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

    def test_prompt_and_first_reference_with_the_end_token_where_it_fits(self, word_tokenizer):
        tokenizer, examples = word_tokenizer(), self.examples(3, 1)
        data = encode(examples, tokenizer, Limits(max_prompt_length=self.LENGTH + 3, max_length=self.LENGTH + 6))
        assert [text_of(tokenizer, item.prompt_ids) for item in data.items] == [*map(render_prompt, examples)]
        assert [text_of(tokenizer, item.response_ids) for item in data.items] == ["out", "out</s>"]
        assert data.counts.report() == "2 examples: 0 dropped for a long prompt, 0 prompts and 1 responses truncated."

    def test_truncation_keeps_the_end_and_the_start_token(self, word_tokenizer):
        examples = self.examples(50, 1)
        limits = {"max_prompt_length": self.LENGTH + 10, "max_length": 300, "long_prompts": "truncate"}
        plain = encode(examples, word_tokenizer(), Limits(**limits))
        started = encode(examples, word_tokenizer(with_start=True), Limits(**limits))
        whole = word_tokenizer()(render_prompt(examples[0]))["input_ids"]
        assert plain.items[0].prompt_ids == whole[-limits["max_prompt_length"] :]
        assert started.items[0].prompt_ids == [1, *whole[-limits["max_prompt_length"] + 1 :]]
        assert plain.counts.truncated_prompts == started.counts.truncated_prompts == 1
        assert started.items[1].prompt_ids[0] == 1
        assert started.items[1].response_ids[0] != 1, "a start token belongs at the start only"

    def test_a_tokenizer_that_closes_texts_does_not_close_the_prompt(self, word_tokenizer):
        data = encode(self.examples(1), word_tokenizer(with_end=True), Limits(max_prompt_length=180, max_length=200))
        assert data.items[0].prompt_ids.count(0) == 0
        assert data.items[0].response_ids.count(0) == 1


CHAT = Example("", "", ("Hello.",), "x:1", messages=(Turn("system", "Be short."), Turn("user", "Hi.")))
RAW = Example("", "", ("Hello.",), "x:2", raw_prompt="{Hi} ")
ALPACA = Example("Greet.", "", ("Hello.",), "x:3")


def text_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


class TestForms:
    LIMITS = Limits(max_prompt_length=200)

    @pytest.mark.parametrize(
        ("text", "with_start", "tokens"),
        [("{Hi} ", False, "{Hi} "), ("{Hi} ", True, "<s>{Hi} "), ("<s>Hi", True, "<s>Hi")],
    )
    def test_a_ready_prompt_stays_as_it_is(self, word_tokenizer, text, with_start, tokens):
        tokenizer, prompt = word_tokenizer(with_start=with_start), Example("", "", (), raw_prompt=text)
        assert render_prompt(prompt) == text
        [ids] = encode_prompts([prompt], tokenizer, self.LIMITS).ids
        assert text_of(tokenizer, ids) == tokens

    @pytest.mark.parametrize("affixes", [{}, {"with_start": True, "with_end": True}])
    def test_messages_get_the_template_and_one_start_token(self, word_tokenizer, affixes):
        tokenizer = word_tokenizer(chat=True, **affixes)
        prompt = "<s>[system]Be short.[user]Hi.[assistant]"
        assert render_prompt(CHAT, tokenizer) == prompt
        [item] = encode([CHAT], tokenizer, Limits(max_prompt_length=200, max_length=300)).items
        assert text_of(tokenizer, item.prompt_ids) == prompt
        assert text_of(tokenizer, item.response_ids) == "Hello.</s>"

    def test_forms_may_be_mixed_and_keep_their_order(self, word_tokenizer):
        tokenizer = word_tokenizer(with_start=True, chat=True)
        mixed = [CHAT, RAW, ALPACA, RAW, CHAT]
        alone = [encode_prompts([example], tokenizer, self.LIMITS).ids[0] for example in mixed]
        assert encode_prompts(mixed, tokenizer, self.LIMITS).ids == alone
        limits = {"max_prompt_length": len(alone[0]) - 1, "long_prompts": "drop"}
        dropped = encode_prompts(mixed, tokenizer, Limits(**limits))
        assert (dropped.indices, dropped.ids, dropped.dropped) == ([1, 3], [alone[1], alone[3]], 3)
        said = f"3 of 5 prompts are longer than data.max_prompt_length={len(alone[0]) - 1} tokens, first x:1 with"
        refuses(said, encode_prompts, mixed, tokenizer, Limits(**limits | {"long_prompts": "error"}))
        refuses("all 2 prompts", encode_prompts, [CHAT, CHAT], tokenizer, Limits(**limits))


def test_a_real_set_with_the_gpt2_tokenizer(real_data):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(real_data / "tokenizers" / "gpt2")
    tokenizer.eos_token = "<|endoftext|>"
    examples = read_examples(real_data / "instruct" / "self_inst.jsonl")
    data = encode(examples, tokenizer, Limits(max_prompt_length=256, max_length=512, long_prompts="drop"))
    # 242 is the number that MiniLLM keeps.
    assert (len(data.items), data.counts.dropped, data.counts.truncated_responses) == (242, 10, 4)
    assert sum(item.response_ids[-1] == tokenizer.eos_token_id for item in data.items) == 238
