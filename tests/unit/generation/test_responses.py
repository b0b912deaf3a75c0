"""Answers of a teacher as training data: what is written, after an interruption too, by transformers or by vLLM."""

import contextlib
import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from chat_templates import TEMPLATES
from damage import flip
from hostile import refuses
from references import greedy_answer
from transformers import GenerationConfig, LlamaConfig

from llmdistill.config import ResponseConfig
from llmdistill.data.instruct import Limits
from llmdistill.data.prompts import render_prompt
from llmdistill.data.sources import read_examples
from llmdistill.data.stored_examples import open_examples, store_examples
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.fingerprints import file_sha256, fingerprint
from llmdistill.generation import response_file, responses
from llmdistill.generation.response_file import check_teacher, parts_folder, provenance_file, read_batches
from llmdistill.generation.responses import generate_responses
from llmdistill.generation.vllm_engine import choose_engine, tensor_parallel_size
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer

from stand_in_vllm import StandInLLM, install
from support import ThreadRanks, write_rows

END = 0
LIMITS = {"max_prompt_length": 60, "max_length": 70}
SETTINGS = ResponseConfig(batch_size=2, seed=4, engine="hf", **LIMITS)
GREEDY = ResponseConfig(decoding="greedy", batch_size=3, engine="hf", **LIMITS)


def answers_of(teacher, texts):
    """The greedy answers of up to ten tokens, as tokens and as texts."""
    model, tokenizer = load_model(teacher, dtype=torch.float32), load_tokenizer(teacher)
    answers = [greedy_answer(model, tokenizer(text)["input_ids"], 10, END) for text in texts]
    return answers, [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def generate(teacher, data, tmp_path):
    """Generates a file of the temporary folder."""

    def run(name="a.jsonl", settings=SETTINGS, **changes):
        return generate_responses(str(teacher), str(data), tmp_path / name, replace(settings, **changes))

    return run


def batches_begun(generate, monkeypatch, *, batches=99):
    """Generate, and die when so many batches are done; returns the numbers of those that are done."""
    real, done = responses.answer_batches, []

    def answer_batches(*arguments):
        for number, rows in real(*arguments):
            if len(done) == batches:
                raise KeyboardInterrupt
            done.append(number)
            yield number, rows

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(responses, "answer_batches", answer_batches)
        generate()
    return done


def test_rows_are_the_teachers_greedy_answers_and_the_record_counts_them(teacher, data, tmp_path):
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
    hashes = {"teacher_fingerprint": fingerprint(teacher), "output_sha256": file_sha256(output)}
    counts = {"prompts": 11, "dropped": 0, "truncated": 0, "empty_answers": texts.count("")}
    counts |= {"unfinished_answers": unfinished, "generated_tokens": sum(map(len, answers))}
    assert record.items() >= {"teacher": str(teacher), "data": str(data), "engine": "hf", **hashes, **counts}.items()
    assert record["settings"]["dtype"] == "fp32"
    assert json.loads(provenance_file(output).read_text()) == record
    assert sorted(path.name for path in output.parent.iterdir()) == ["answers.jsonl", "answers.jsonl.provenance.json"]


@pytest.mark.parametrize("reasoning", ["keep", "drop"])
def test_a_student_learns_the_tokens_that_a_reasoning_teacher_wrote(reasoning, tmp_path, monkeypatch):
    """From the answers in a file to the tokens of training: with a template as Qwen3's, and with an instruction."""
    teacher = tmp_path / "teacher"
    shutil.copytree(locate("embedded:teacher"), teacher)
    tokenizer = load_tokenizer(teacher)
    tokenizer.chat_template = TEMPLATES["closed"].replace("<|im_end|>", tokenizer.eos_token)
    tokenizer.save_pretrained(teacher)
    question = "Where does Anna live?"
    chat = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    chat = [*chat, {"role": "user", "content": question}]
    data = write_rows(tmp_path / "data.jsonl", [{"instruction": question, "input": ""}, {"messages": chat}])
    thought, written = tokenizer("<think>\nHm.\n</think>\n\n", add_special_tokens=False)["input_ids"], {}
    real = responses.answer_batches

    def reasoned(*arguments):
        for number, rows in real(*arguments):
            for index, ids in rows.items():
                words = [each for each in ids if each != tokenizer.eos_token_id]
                written[index] = [*thought, *words, tokenizer.eos_token_id]
            yield number, {index: written[index] for index in rows}

    monkeypatch.setattr(responses, "answer_batches", reasoned)
    limits = {"max_prompt_length": 180, "max_length": 190}
    settings = ResponseConfig(decoding="greedy", engine="hf", prompt="chat", reasoning=reasoning, **limits)
    generate_responses(str(teacher), str(data), tmp_path / "answers.jsonl", settings)
    stored = store_examples(
        tmp_path / "answers.jsonl",
        tokenizer,
        Limits(max_prompt_length=500, max_length=600, prompt="chat"),
        cache_dir=tmp_path,
    )
    asked = [[{"role": "user", "content": question}], chat]
    for index, (item, messages) in enumerate(zip(open_examples(stored).items, asked, strict=True)):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        ids = written[index]
        if reasoning == "drop":  # the template writes an empty block
            ids = [*tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"], *ids[len(thought) :]]
        learned = item.ids[item.borders[0] : item.borders[1]]
        assert tokenizer.decode(learned) == tokenizer.decode(ids)
        assert (item.ids[: item.borders[0]], learned) == (prompt, ids)
        assert len(item.borders) == 2, "the earlier answer is given"


def test_an_interrupted_run_goes_on_and_ends_byte_equal(generate, tmp_path, monkeypatch):
    generate("whole.jsonl")
    generate("other.jsonl", seed=5)
    whole, other = ([row["output"] for row in rows(tmp_path / f"{name}.jsonl")] for name in ("whole", "other"))
    assert whole != other
    assert len(set(whole)) > 3
    assert batches_begun(generate, monkeypatch, batches=2) == [0, 1]
    output, parts = tmp_path / "a.jsonl", parts_folder(tmp_path / "a.jsonl")
    finished = (parts / "rank-0.jsonl").read_text().splitlines(keepends=True)
    assert not output.exists()
    # As ranks 0 and 5 would have left it, both killed while they wrote.
    for rank, line in zip((0, 5), finished, strict=True):
        (parts / f"rank-{rank}.jsonl").write_text(line + '{"batch":3,"rows":{"1":[4')
    assert sorted(batches_begun(generate, monkeypatch)) == [2, 3]  # the batch whose last answer ends first is first
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not parts.exists()


def test_every_rank_is_told_which_answers_are_missing(teacher, data, tmp_path, monkeypatch):
    ranks, output = ThreadRanks(2), tmp_path / "a.jsonl"
    ranks.replace_group(monkeypatch)
    monkeypatch.setattr(responses, "_answer", lambda job, left: None)

    def generate(rank):
        with pytest.raises(UserError, match=r"7 answers are missing from .*every rank must see the same folder"):
            generate_responses(str(teacher), str(data), output, SETTINGS)

    ranks.run(generate)
    assert not output.exists()


def test_a_kill_before_the_record_is_written_loses_nothing(generate, tmp_path, monkeypatch):
    output = tmp_path / "a.jsonl"

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(responses, "write_json", die)
        generate()
    assert not provenance_file(output).exists()
    written = output.read_bytes()
    monkeypatch.setattr(responses, "load_model", die)  # no batch is left, so no weights are needed
    record = generate()
    assert output.read_bytes() == written
    assert record["output_sha256"] == file_sha256(output)


def test_another_request_is_refused_and_named(generate, data, tmp_path, monkeypatch):
    output = tmp_path / "a.jsonl"
    batches_begun(generate, monkeypatch, batches=1)
    output.with_name("a.jsonl.parts").rename(tmp_path / "cut.jsonl.parts")
    generate()
    monkeypatch.setattr(responses, "load_model", lambda *_, **__: pytest.fail("refused too late"))

    refuses("a.jsonl holds the answers to another request: --seed was 4 and is now 5;", generate, seed=5)
    said = "cut.jsonl.parts holds batches of another request: --seed was 4 and is now 5"
    refuses(said, generate, "cut.jsonl", seed=5)
    content = output.read_text()
    output.write_text(content + content)
    refuses("was changed after it was generated", generate)
    output.write_text(content)
    data.write_text(data.read_text().replace("colour : red", "colour : blue"), encoding="utf-8")
    for name in ("a.jsonl", "cut.jsonl"):
        refuses("the content of the prompts' file differs (sha256:", generate, name)
    provenance_file(output).unlink()
    refuses("did not write it; choose another --output", generate)


def test_long_prompts_are_dropped_and_the_limit_counts_prompts(generate, teacher, data, tmp_path):
    lengths = [len(load_tokenizer(teacher)(render_prompt(example))["input_ids"]) for example in read_examples(data)]
    limit = sorted(lengths[:5])[2]
    record = generate(limit=5, long_prompts="drop", max_prompt_length=limit, max_length=limit + 4)
    kept = [row["instruction"] for row, length in zip(rows(data)[:5], lengths, strict=False) if length <= limit]
    assert [row["instruction"] for row in rows(tmp_path / "a.jsonl")] == kept
    assert record["dropped"] == sum(length > limit for length in lengths[:5]) > 0


def test_misfits_are_refused_before_the_weights_are_loaded(generate, tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "load_model", lambda *_, **__: pytest.fail("refused too late"))
    refuses("beyond the model's context of 80", generate, max_length=81)
    refuses("prompts are longer than", generate, max_prompt_length=20)
    assert not parts_folder(tmp_path / "a.jsonl").exists()


def test_only_the_teacher_that_wrote_the_answers_passes_and_only_if_it_is_known(teacher, data):
    def write_record(**record):
        provenance_file(data).write_text(json.dumps({"output_sha256": file_sha256(data), "teacher": "t", **record}))

    hash_now = fingerprint(teacher)
    assert "there is no prompts.jsonl.provenance.json beside it" in (check_teacher(data, teacher) or "")
    write_record(teacher_fingerprint="sha256:abc")
    said = f"{data}: its answers were written by t (sha256:abc), not by the teacher {teacher} ({hash_now})."
    assert check_teacher(str(data), str(teacher)) == said
    write_record(teacher_fingerprint=hash_now)
    assert check_teacher(data, teacher) is None
    before = file_sha256(data)
    data.write_text(data.read_text() + "\n")
    said = f"it changed after it was generated (sha256 {before} then, {file_sha256(data)} now)"
    assert said in (check_teacher(data, teacher) or "")
    provenance_file(data).write_text("[")
    refuses("provenance.json: not valid JSON", response_file.read_provenance, data)


def test_a_line_that_is_no_finished_batch_is_named(tmp_path):
    output = tmp_path / "answers.jsonl"
    parts_folder(output).mkdir()
    response_file.append_batch(parts_folder(output), 0, 3, {7: [1, 22, 3]})
    response_file.append_batch(parts_folder(output), 0, 4, {8: [5]})
    assert read_batches(parts_folder(output)) == {3: {7: [1, 22, 3]}, 4: {8: [5]}}
    with flip(parts_folder(output) / "rank-0.jsonl", -2, 6):
        refuses("rank-0.jsonl:2: not a finished batch; remove the line", read_batches, parts_folder(output))


# vLLM, whose interface is played by a stand-in that decodes with the same tiny model, greedily or not at all.


@pytest.fixture
def vllm(monkeypatch):
    """Install the stand-in on a machine with two GPUs; returns what it is called with."""
    return install(monkeypatch)


def test_vllm_writes_the_file_that_transformers_writes(vllm, teacher, data, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        settings = ResponseConfig(decoding="greedy", dtype="fp32", **LIMITS)
        first = generate_responses(str(teacher), str(data), tmp_path / "hf.jsonl", settings)
    monkeypatch.setattr(responses, "load_model", lambda *_, **__: pytest.fail("vLLM loads the model itself"))
    second = generate_responses(str(teacher), str(data), tmp_path / "vllm.jsonl", settings)
    assert (first["engine"], second["engine"]) == ("hf", "vllm")
    assert (first["settings"]["batch_size"], second["settings"]["batch_size"]) == (32, 1024)
    assert (tmp_path / "vllm.jsonl").read_bytes() == (tmp_path / "hf.jsonl").read_bytes()
    assert second["generated_tokens"] == first["generated_tokens"]
    engine, request, *_ = vllm
    assert (engine["tensor_parallel_size"], engine["trust_remote_code"], engine["max_model_len"]) == (2, False, 70)
    assert request["max_tokens"] == 10


def test_both_engines_stop_at_the_end_tokens_of_the_model(vllm, teacher, data, tmp_path, monkeypatch):
    whole, texts = answers_of(teacher, map(render_prompt, read_examples(data)))
    longest = max(whole, key=len)
    GenerationConfig(eos_token_id=[END, longest[2]]).save_pretrained(teacher)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = ResponseConfig(decoding="greedy", dtype="fp32", **LIMITS)
    ended = [next((n for n, token in enumerate(ids) if token in (END, longest[2])), len(ids)) for ids in whole]
    tokenizer = load_tokenizer(teacher)
    expected = [tokenizer.decode(ids[:end]).strip() for ids, end in zip(whole, ended, strict=True)]
    assert expected != texts
    for engine in ("hf", "vllm"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda engine=engine: engine == "vllm")
        record = generate_responses(str(teacher), str(data), tmp_path / f"{engine}.jsonl", settings)
        assert record["engine"] == engine
        assert [row["output"] for row in rows(tmp_path / f"{engine}.jsonl")] == expected
        assert record["unfinished_answers"] == sum(end == 10 for end in ended)


def test_every_prompt_has_its_own_seed(vllm, teacher, data, tmp_path, monkeypatch):
    asked = []

    def generate(_, prompts, sampling_params, use_tqdm):
        asked.extend(sampling_params)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(4, 0))]) for _ in prompts]

    monkeypatch.setattr(StandInLLM, "generate", generate)
    settings = ResponseConfig(temperature=0.7, top_p=0.9, batch_size=3, engine="vllm", dtype="fp32", **LIMITS)
    generate_responses(str(teacher), str(data), tmp_path / "a.jsonl", settings)
    seeds = {params["seed"] for params in asked}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert asked[0].items() >= {"temperature": 0.7, "top_p": 0.9, "top_k": -1}.items()


def test_vllm_is_refused_with_the_reason_and_auto_does_without_it(vllm, teacher, tmp_path, monkeypatch):
    def check(pattern, folder=teacher, ngram=0, ranks=1):
        arguments = {"no_repeat_ngram_size": ngram, "world_size": ranks}
        assert choose_engine("auto", folder, **arguments) == ("vllm" if pattern is None else "hf")
        assert choose_engine("hf", folder, **arguments) == "hf"
        if pattern is not None:
            refuses(pattern, choose_engine, "vllm", folder, **arguments)

    check(None)
    check("no no_repeat_ngram_size", ngram=6)
    check("drives all GPUs from one process", ranks=2)
    config = json.loads((teacher / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "llmdistill", "method": "svd", "modules": {}}
    for name, content, pattern in (("config", config, "is factorized"), ("adapter_config", {}, "is an adapter")):
        student = tmp_path / name
        student.mkdir()
        (student / f"{name}.json").write_text(json.dumps(content))
        check(pattern, student)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        check("no GPU")
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check("not installed")


@pytest.mark.parametrize(("heads", "groups", "gpus", "expected"), [(32, 8, 6, 4), (9, 3, 2, 1), (16, 2, 8, 8)])
def test_the_heads_decide_over_how_many_gpus_a_model_is_split(heads, groups, gpus, expected):
    config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=groups, hidden_size=heads * 8)
    assert tensor_parallel_size(config, gpus) == expected
