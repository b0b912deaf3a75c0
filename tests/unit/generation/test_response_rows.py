"""The rows of a teacher's answers: a student that learns from them learns the tokens that the teacher wrote."""

import pytest
from byte_tokenizers import byte_level
from chat_templates import TEMPLATES, chatting

from llmdistill.data.chat_messages import Turn
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.prompts import answer_ends
from llmdistill.data.rows import parse_row
from llmdistill.generation.response_rows import final_answers, learnable_row, without_learned_turns

LONG = Limits(max_prompt_length=4000, max_length=6000)
ASKED = (Turn("user", "Name a river."), Turn("assistant", "The Rhine."), Turn("user", "Another one?"))
END, BLOCK = "<|im_end|>", "<think>\n\n</think>\n\n"
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
FORGETFUL = "{{ bos_token }}" + TEMPLATES["open"].replace("<think>\n{{ r }}\n</think>\n\n", "")
CALLING = "{{ bos_token }}" + TEMPLATES["channels"]

WRITTEN = {
    "chatml": ("chatml", "The Elbe." + END, "The Elbe."),
    "spaces": ("chatml", " The Elbe. \n" + END, "The Elbe."),
    "closed": ("closed", "<think>\nHm.\n</think>\n\nThe Elbe." + END, "The Elbe."),
    "no block": ("closed", BLOCK + "The Elbe." + END, "The Elbe."),
    "open": ("open", "Hm.\n</think>\n\nThe Elbe." + END, "The Elbe."),
    "channels": ("channels", f"{ANALYSIS}An easy one.{NEXT}{FINAL}The Rhine.<|return|>", "The Rhine."),
    "one channel": ("channels", f"{FINAL}The Rhine.<|return|>", "The Rhine."),
    "a call": (CALLING, f"{ANALYSIS}Hm.{NEXT} to=river<|channel|>commentary<|message|>{{}}<|call|>", None),
    "own reasoning": ("chatml", "<think>\nHm.\n</think>\n\nThe Elbe." + END, "The Elbe."),
    "special": ("chatml", "The <|user|> Elbe." + END, None),
    "forgotten": (FORGETFUL, "Hm.\n</think>\n\nThe Elbe." + END, "The Elbe."),
    "ordinary end": ("ordinary_end", "The Elbe.</turn>", "The Elbe."),
    "no end": ("glm", "\n<think></think>\nThe Elbe.<|user|>", "The Elbe."),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_tokens_that_were_written_are_learned(name):
    template, written, answer = WRITTEN[name]
    tokenizer = chatting(TEMPLATES.get(template, template))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    tokenizer.eos_token = END if template == FORGETFUL else tokenizer.eos_token
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    ends = [*answer_ends(tokenizer), tokenizer.convert_tokens_to_ids("<|call|>")]
    [text] = final_answers([ids], tokenizer, ends)
    assert answer is None or text == answer
    example = without_learned_turns(Example("", "", (), messages=ASKED))
    row = learnable_row(example, ids, text, tokenizer, ends)
    asked = [turn.as_message() for turn in ASKED]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    [whole] = encode([parse_row(row, "")], tokenizer, LONG).items
    # A completion has the end token of the tokenizer after it.
    more = [tokenizer.eos_token_id] if name == "a call" else []
    assert whole.ids[: whole.borders[-1]] == [*prompt, *ids, *more]
    if "messages" in row:
        assert [turn.get("weight", 1) for turn in row["messages"] if turn["role"] == "assistant"] == [0, 1]


def test_an_instruction_keeps_its_form_and_reasoning_that_is_cut_has_no_answer():
    tokenizer = chatting(TEMPLATES["closed"])
    ids = tokenizer("<think>\nHm.\n</think>\n\nThe Elbe." + END, add_special_tokens=False)["input_ids"]
    ends = answer_ends(tokenizer)
    row = learnable_row(Example("Name a river.", "", ()), ids, "The Elbe.", tokenizer, ends)
    expected = {"instruction": "Name a river.", "input": "", "output": "The Elbe.", "reasoning_content": "Hm."}
    assert row == expected
    assert final_answers([ids[:6], []], tokenizer, ends) == ["", ""]


def test_without_a_template_special_tokens_are_left_out():
    tokenizer = byte_level(300, start="<begin>")
    ids = tokenizer("The <begin>Elbe.", add_special_tokens=False)["input_ids"]
    assert final_answers([ids], tokenizer, [tokenizer.eos_token_id]) == ["The Elbe."]
