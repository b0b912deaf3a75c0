from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import refuses
from transformers import BertConfig

from llmdistill.config import ResponseConfig
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode_prompts
from llmdistill.data.prompts import render_prompt
from llmdistill.data.sources import read_examples
from llmdistill.fingerprints import file_sha256, fingerprint
from llmdistill.generation import responses
from llmdistill.generation.answers_file import parts_folder, side_file
from llmdistill.generation.decode import Decoding, generate_passes
from llmdistill.generation.responses import generate_responses
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.runtime.distributed import World

END = 0
LIMITS = {"max_prompt_length": 60, "max_length": 70}
SETTINGS = ResponseConfig(batch_size=2, seed=4, engine="hf", **LIMITS)
GREEDY = ResponseConfig(decoding="greedy", batch_size=3, engine="hf", **LIMITS)


def answers_of(teacher: Path, texts: list[str]) -> tuple[list[list[int]], list[str]]:
    """The greedy answers of up to ten tokens, as tokens and as texts: one prompt, no padding, no cache."""
    model, tokenizer = load_model(teacher, dtype=torch.float32), load_tokenizer(teacher)
    answers = []
    for text in texts:
        ids = list(prompt := tokenizer(text)["input_ids"])
        while len(ids) < len(prompt) + 10 and ids[len(prompt) :][-1:] != [END]:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers, [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def generate(teacher: Path, data: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Generates a file of the temporary folder."""

    def run(name: str = "a.jsonl", settings: ResponseConfig = SETTINGS, **changes: Any) -> dict[str, Any]:
        return generate_responses(str(teacher), str(data), tmp_path / name, replace(settings, **changes))

    return run


def batches_begun(generate: Callable, monkeypatch: pytest.MonkeyPatch, *, batches: int = 99) -> list[int]:
    """Generate, and die when so many batches are done; returns the numbers of those begun."""
    real, begun = responses.answer_batch, []

    def answer_batch(engine, prompt_ids, plan, number, seed):
        if len(begun) == batches:
            raise KeyboardInterrupt
        begun.append(number)
        return real(engine, prompt_ids, plan, number, seed)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(responses, "answer_batch", answer_batch)
        generate()
    return begun


def test_rows_are_the_teachers_greedy_answers_and_the_record_counts_them(teacher, data, tmp_path) -> None:
    tokenizer = load_tokenizer(teacher)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}Response :"
    tokenizer.save_pretrained(teacher)
    examples, given, output = read_examples(data), rows(data), tmp_path / "new" / "answers.jsonl"
    chat = [{"role": "system", "content": "a red"}, {"role": "user", "content": "Name a colour"}]
    other_forms = [
        {"messages": [*chat, {"role": "assistant", "content": "not looked at"}]},
        {"messages": chat},
        {"prompt": "Below is a colour :"},
        {"prompt": "green", "completion": "not looked at"},
    ]
    with data.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in other_forms)
    record = generate_responses(str(teacher), str(data), output, replace(GREEDY, prompt="minillm"))
    chats = ["system : a red user : Name a colour Response :"] * 2
    answers, texts = answers_of(teacher, [*map(render_prompt, examples), *chats, "Below is a colour :", "green"])
    *said, in_chat, again, completion, other = texts
    assert rows(output) == [
        *({**row, "output": text} for row, text in zip(given, said, strict=True)),
        *({"messages": [*chat, {"role": "assistant", "content": text}]} for text in (in_chat, again)),
        {"prompt": "Below is a colour :", "completion": completion},
        {"prompt": "green", "completion": other},
    ]
    unfinished = sum(ids[-1] != END for ids in answers)
    assert 0 < unfinished < len(answers), "the teacher must finish some and not others"
    expected = {
        "teacher": str(teacher),
        "teacher_fingerprint": fingerprint(teacher),
        "data": str(data),
        "prompts": 11,
        "dropped": 0,
        "truncated": 0,
        "unfinished_answers": unfinished,
        "empty_answers": texts.count(""),
        "generated_tokens": sum(map(len, answers)),
        "engine": "hf",
        "output_sha256": file_sha256(output),
    }
    assert {key: record[key] for key in expected} == expected
    assert record["settings"]["dtype"] == "fp32"
    assert json.loads(side_file(output).read_text()) == record
    assert sorted(path.name for path in output.parent.iterdir()) == ["answers.jsonl", "answers.jsonl.provenance.json"]


def test_samples_are_those_of_generate(generate: Callable, teacher: Path, data: Path, tmp_path: Path) -> None:
    generate()
    model, tokenizer = load_model(teacher, dtype=torch.float32), load_tokenizer(teacher)
    prompts = [render_prompt(example) for example in read_examples(data)]
    examples = [Example("", "", (), raw_prompt=prompt) for prompt in prompts]
    ids = encode_prompts(examples, tokenizer, Limits(max_prompt_length=60)).ids
    decoding, alone = Decoding(sample=True, batch_size=2), World.alone()
    (expected,) = generate_passes(model, tokenizer, ids, decoding, seeds=[4], world=alone, **LIMITS)
    assert [row["output"] for row in rows(tmp_path / "a.jsonl")] == expected.texts
    assert len(set(expected.texts)) > 3


def test_an_interrupted_run_goes_on_and_ends_byte_equal(generate, tmp_path, monkeypatch) -> None:
    generate("whole.jsonl")
    assert batches_begun(generate, monkeypatch, batches=2) == [0, 1]
    output, parts = tmp_path / "a.jsonl", parts_folder(tmp_path / "a.jsonl")
    finished = (parts / "rank-0.jsonl").read_text().splitlines(keepends=True)
    assert not output.exists()
    # As ranks 0 and 5 would have left it, both killed while they wrote.
    for rank, line in zip((0, 5), finished, strict=True):
        (parts / f"rank-{rank}.jsonl").write_text(line + '{"batch":3,"rows":{"1":[4')
    assert batches_begun(generate, monkeypatch) == [2, 3]
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not parts.exists()


def test_a_kill_before_the_record_is_written_loses_nothing(generate, tmp_path, monkeypatch) -> None:
    output = tmp_path / "a.jsonl"

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(responses, "write_json", die)
        generate()
    assert not side_file(output).exists()
    written = output.read_bytes()
    monkeypatch.setattr(responses, "load_model", die)  # no batch is left, so no weights are needed
    record = generate()
    assert output.read_bytes() == written
    assert record["output_sha256"] == file_sha256(output)


def test_another_request_is_refused_and_named(generate, data, tmp_path, monkeypatch) -> None:
    output = tmp_path / "a.jsonl"
    batches_begun(generate, monkeypatch, batches=1)
    output.with_name("a.jsonl.parts").rename(tmp_path / "cut.jsonl.parts")
    generate()
    monkeypatch.setattr(responses, "load_model", lambda *_, **__: pytest.fail("refused too late"))

    refuses("a.jsonl holds the answers to another request: settings.seed was 4 and is now 5;", generate, seed=5)
    said = "cut.jsonl.parts holds batches of another request: settings.seed was 4 and is now 5"
    refuses(said, generate, "cut.jsonl", seed=5)
    content = output.read_text()
    output.write_text(content + content)
    refuses("was changed after it was generated", generate)
    output.write_text(content)
    data.write_text(data.read_text().replace("colour : red", "colour : blue"), encoding="utf-8")
    for name in ("a.jsonl", "cut.jsonl"):
        refuses("data_fingerprint was sha256:", generate, name)
    side_file(output).unlink()
    refuses("did not write it; choose another --output", generate)


def test_long_prompts_are_dropped_and_the_limit_counts_prompts(generate, teacher, data, tmp_path) -> None:
    lengths = [len(load_tokenizer(teacher)(render_prompt(example))["input_ids"]) for example in read_examples(data)]
    limit = sorted(lengths[:5])[2]
    record = generate(limit=5, long_prompts="drop", max_prompt_length=limit, max_length=limit + 4)
    kept = [row["instruction"] for row, length in zip(rows(data)[:5], lengths, strict=False) if length <= limit]
    assert [row["instruction"] for row in rows(tmp_path / "a.jsonl")] == kept
    assert record["dropped"] == sum(length > limit for length in lengths[:5]) > 0


def test_misfits_are_refused_before_the_weights_are_loaded(generate, data, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(responses, "load_model", lambda *_, **__: pytest.fail("refused too late"))
    refuses("beyond the model's context of 80", generate, max_length=81)
    refuses("temperature is 0", generate, temperature=0.0)
    refuses("prompts are longer than", generate, max_prompt_length=20)
    encoder, output = tmp_path / "encoder", tmp_path / "a.jsonl"
    BertConfig().save_pretrained(encoder)
    refuses("bert models do not generate text", generate_responses, str(encoder), str(data), output, SETTINGS)
    assert not parts_folder(output).exists()
    with pytest.raises(ValueError, match="limit is 0: give 1 or more"):
        ResponseConfig(limit=0)
