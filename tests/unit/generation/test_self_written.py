"""Training data that a teacher writes itself: what is sampled, kept and dropped, and the errors."""

import contextlib
import json
import re
import threading
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from chat_templates import TEMPLATES, chatting
from hostile import refuses
from tiny import tiny_model
from transformers import TopPLogitsWarper

from llmdistill.config.generation import WriteConfig
from llmdistill.data.sources import read_examples
from llmdistill.errors import UserError
from llmdistill.generation import self_written
from llmdistill.generation.response_file import check_teacher, parts_folder
from llmdistill.generation.row_draws import cut_to_top_p
from llmdistill.generation.self_written import OF_COMPRESS, OF_RUNS, OF_WRITE, write_data
from llmdistill.models.chat_templates import user_turn
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer

from stand_in_vllm import install
from support import ThreadRanks

END = 0
TEMPLATE = (
    "{% for m in messages %}{{ 'Input' if m.role == 'user' else 'Response' }} : {{ m.content }} </s> {% endfor %}"
)
TEMPLATE += "{% if add_generation_prompt %}Response :{% endif %}"
SETTINGS = WriteConfig(rows=9, max_prompt_tokens=7, max_answer_tokens=12, batch_size=4, seed=3, engine="hf")


@pytest.fixture
def chatter(teacher):
    """The tiny teacher with a chat template."""
    tokenizer = load_tokenizer(teacher)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(teacher)
    return teacher


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def sampled(model, prompt, seed, limit, temperature, top_p):
    """Sample token by token without a cache, by the numbers of SplitMix64."""
    [state] = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    state, ids = int(state) >> 1, []
    while len(ids) < limit and ids[-1:] != [END]:
        logits = model(torch.tensor([[*prompt, *ids]])).logits[:, -1].float()
        logits = TopPLogitsWarper(top_p)(None, logits.log_softmax(-1) / temperature) if top_p < 1 else logits
        state += 0x9E3779B97F4A7C15
        bits = state
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            bits = (bits % 2**64 ^ bits % 2**64 >> shift) * factor
        sums = accumulate(logits[0].double().softmax(-1).tolist())
        ids.append(next(token for token, total in enumerate(sums) if total > (bits >> 11) / 2**53))
    return ids


def test_rows_are_the_samples_of_the_model_after_the_prefix_of_its_template(chatter, tmp_path):
    model, tokenizer = load_model(chatter, dtype=torch.float32), load_tokenizer(chatter)
    record = write_data(str(chatter), tmp_path / "a.jsonl", SETTINGS)
    expected, seen, dropped, number = [], [], Counter(), 0
    while len(expected) < 9:
        opening = tokenizer("Input :", add_special_tokens=False)["input_ids"]
        turn = sampled(model, opening, (3, number, 0), 7, 1.0, 0.98)
        text = tokenizer.decode(turn, skip_special_tokens=True).strip()
        marks = set(turn[:-1]) & set(tokenizer.all_special_ids)
        folded = tokenizer(text.casefold())["input_ids"]
        pieces = {tuple(folded[at : at + 3]) for at in range(max(1, len(folded) - 2))}
        if marks or turn[-1] != END or not text:
            dropped["marks" if marks else "unfinished" if turn[-1] != END else "empty"] += 1
        elif any(len(pieces & other) / len(pieces | other) >= 0.5 for other in seen):
            dropped["near"] += 1
        else:
            seen.append(pieces)
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            answer = sampled(model, prompt, (3, number, 1), 12, 0.9, 0.95)
            said = tokenizer.decode(answer, skip_special_tokens=True).strip()
            if answer[-1] != END or not said:
                dropped["cut answer" if answer[-1] != END else "empty"] += 1
            else:
                expected.append((text, tokenizer.decode(answer[:-1])))
        number += 1
    written = rows(tmp_path / "a.jsonl")
    assert [tuple(turn["content"].strip() for turn in row["messages"]) for row in written] == expected
    assert [tuple(turn["role"] for turn in row["messages"]) for row in written] == [("user", "assistant")] * 9
    assert record["rows"] == 9
    assert record["sampled_rows"] >= number
    assert len(dropped) > 3, "the teacher must do all that is dropped"
    assert sum(record["dropped"].values()) >= sum(dropped.values())
    assert len(read_examples(tmp_path / "a.jsonl")) == 9
    assert check_teacher(tmp_path / "a.jsonl", chatter) is None


def test_neither_batches_nor_ranks_nor_a_kill_change_the_rows(chatter, tmp_path, monkeypatch):
    write_data(str(chatter), tmp_path / "a.jsonl", SETTINGS)
    whole = (tmp_path / "a.jsonl").read_bytes()
    write_data(str(chatter), tmp_path / "b.jsonl", replace(SETTINGS, batch_size=3))
    assert (tmp_path / "b.jsonl").read_bytes() == whole
    real, begun = self_written._sample, []

    def killed(*arguments, **more):
        if len(begun) == 3:
            raise KeyboardInterrupt
        begun.append(1)
        return real(*arguments, **more)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(self_written, "_sample", killed)
        write_data(str(chatter), tmp_path / "c.jsonl", SETTINGS)
    [part] = parts_folder(tmp_path / "c.jsonl").glob("rank-*.jsonl")
    assert 0 < len(part.read_text().splitlines()) < 4
    with part.open("a") as file:
        file.write('{"batch":12,"rows":{"12":[[[4')  # as a kill leaves it
    write_data(str(chatter), tmp_path / "c.jsonl", SETTINGS)
    assert (tmp_path / "c.jsonl").read_bytes() == whole
    assert not parts_folder(tmp_path / "c.jsonl").exists()
    ranks = ThreadRanks(2)
    ranks.replace_group(monkeypatch)
    # transformers replaces a method of a class while it loads a model, which threads would do at the same time.
    lock = threading.Lock()

    def load_one_by_one(*arguments, **more):
        with lock:
            return load_model(*arguments, **more)

    monkeypatch.setattr(self_written, "load_model", load_one_by_one)
    monkeypatch.setattr(self_written, "gather_objects", ranks.collect)
    ranks.run(lambda rank: write_data(str(chatter), tmp_path / "d.jsonl", SETTINGS))
    assert (tmp_path / "d.jsonl").read_bytes() == whole


def test_a_finished_file_is_not_written_again_and_another_request_is_refused(chatter, tmp_path, monkeypatch):
    record = write_data(str(chatter), tmp_path / "a.jsonl", SETTINGS)
    monkeypatch.setattr(self_written, "load_model", lambda *_, **__: pytest.fail("written again"))
    assert write_data(str(chatter), tmp_path / "a.jsonl", replace(SETTINGS, batch_size=99)) == record
    other = replace(SETTINGS, temperature=1.0)
    refuses("--temperature was 0.9 and is now 1.0", write_data, str(chatter), tmp_path / "a.jsonl", other)


def test_texts_go_on_from_the_begin_token_and_count_their_tokens(teacher, tmp_path):
    settings = WriteConfig(tokens=60, max_text_tokens=15, batch_size=4, engine="hf", similarity=1.0)
    record = write_data(str(teacher), tmp_path / "a.jsonl", settings)
    model, tokenizer = load_model(teacher, dtype=torch.float32), load_tokenizer(teacher)
    # Without a begin token a text follows the end of another.
    first = [sampled(model, [END], (0, number, 0), 15, 1.0, 0.98) for number in range(record["sampled_rows"])]
    texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in first if not {1, 2} & {*ids}]
    written = [row["text"] for row in rows(tmp_path / "a.jsonl")]
    assert written == list(dict.fromkeys(text for text in texts if text))[: len(written)]
    assert 60 <= record["tokens"] < 75
    cut = write_data(str(teacher), tmp_path / "b.jsonl", replace(settings, unfinished="drop"))
    assert cut["dropped"]["unfinished"] > 0


def test_vllm_samples_the_rows_where_it_is_installed(chatter, tmp_path, monkeypatch):
    made = install(monkeypatch)
    record = write_data(str(chatter), tmp_path / "a.jsonl", replace(SETTINGS, engine="vllm", dtype="fp32", rows=3))
    assert (record["engine"], record["rows"]) == ("vllm", 3)
    asked = [each for each in made if "max_tokens" in each]
    assert {(each["temperature"], each["top_p"], each["max_tokens"]) for each in asked} == {
        (1.0, 0.98, 7),
        (0.9, 0.95, 12),
    }
    assert len({each["seed"] for each in asked}) == len(asked)


def test_a_model_that_cannot_write_is_told_so(teacher, chatter, tmp_path):
    output = tmp_path / "a.jsonl"
    few = replace(SETTINGS, max_prompt_tokens=80)
    refuses("with 5 tokens around them that is beyond the 80 of", write_data, str(chatter), output, few)
    same = replace(SETTINGS, rows=500, similarity=0.01)
    refuses("rows, and the last 1", write_data, str(chatter), tmp_path / "b.jsonl", same)
    noise = tiny_model("llama", vocab_size=15, eos_token_id=0, bos_token_id=None, pad_token_id=None)
    noise.save_pretrained(chatter)
    refuses("writes noise: its own samples cost it 2.7 nats", write_data, str(chatter), output, SETTINGS)
    tokenizer = load_tokenizer(teacher)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    tokenizer.save_pretrained(teacher)
    refuses("its chat template does not write a text of the user", write_data, str(teacher), output, SETTINGS)
    (teacher / "chat_template.jinja").unlink()
    refuses("has no chat template", write_data, str(teacher), output, SETTINGS, kind="instructions")


@pytest.mark.parametrize(("flags", "ways"), [
    (OF_WRITE, ("take an instruct model, or have it write texts (--kind text)", "take a trained model")),
    (OF_RUNS, (
        "take an instruct model, have it write texts (--data.kind text), or give data (--data.train FILE)",
        "take a trained model, or give data (--data.train FILE)",
    )),
    (OF_COMPRESS, (
        "take an instruct model, or give data (--calibration.data FILE)",
        "take a trained model, or give data (--calibration.data FILE)",
    )),
])  # fmt: skip
def test_a_refusal_names_the_flags_of_the_command(teacher, tmp_path, flags, ways):
    output, chats = tmp_path / "a.jsonl", {"kind": "instructions", "flags": flags}
    with pytest.raises(UserError, match=f"no chat template; {re.escape(ways[0])}$"):
        write_data(str(teacher), output, SETTINGS, **chats)
    tiny_model("llama", vocab_size=15, eos_token_id=0, bos_token_id=None, pad_token_id=None).save_pretrained(teacher)
    with pytest.raises(UserError, match=f"writes noise.*; {re.escape(ways[1])}$"):
        write_data(str(teacher), output, SETTINGS, flags=flags)


def test_a_file_of_another_request_is_refused_by_what_the_user_typed(teacher, tmp_path):
    output, settings = tmp_path / "a.jsonl", replace(SETTINGS, rows=2, max_text_tokens=8)
    write_data(str(teacher), output, settings)
    for flags, changed, said in (
        (OF_WRITE, {"rows": 3}, ": --rows was 2 and is now 3; choose another --output"),
        (OF_WRITE, {"rows": None, "tokens": 9}, ": --rows was 2 and is now not given (and 1 more);"),
        (OF_RUNS, {"seed": 4}, ": --data.write.seed was 3 and is now 4;"),
    ):
        refuses(said, write_data, str(teacher), output, replace(settings, **changed), flags=flags)
    model = load_model(teacher, dtype=torch.float32)
    model.lm_head.weight.data += 1
    model.save_pretrained(teacher)
    refuses(": the model differs (sha256:", write_data, str(teacher), output, settings)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_prefix_and_the_end_of_a_users_turn_are_those_of_the_template(name):
    tokenizer = chatting(TEMPLATES[name])
    turn = user_turn(tokenizer)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why?"}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition("Why?")
    assert turn.opening == before.rstrip(" ")
    assert turn.end.startswith(after.strip())


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_keeps_the_tokens_that_transformers_keeps(top_p):
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * torch.arange(1, 7)[:, None]
    expected = TopPLogitsWarper(top_p)(None, logits)
    assert torch.equal(cut_to_top_p(logits, top_p), expected)
    assert torch.equal(cut_to_top_p(logits, top_p, most=5), expected)
