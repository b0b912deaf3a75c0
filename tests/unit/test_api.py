"""llmdistill from Python, on tiny random models in memory."""

import copy
import importlib
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import datasets
import pytest
import torch
from tiny import save_decoder, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import llmdistill
from llmdistill import UserError
from llmdistill.embedded import locate
from llmdistill.train import run as main_job

from support import log_rows

TOKENIZER = locate("embedded:teacher")
ROWS = [{"instruction": f"Where does number {i} live?", "input": "", "output": f"In town {i % 7}."} for i in range(32)]


@pytest.fixture
def model(folder) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(folder)
    model.name_or_path = model.config._name_or_path = ""  # as one that was made in memory
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TOKENIZER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("model"), num_hidden_layers=2, tie_word_embeddings=False)


ANSWERS = {"decoding": "greedy", "limit": 4, "max_length": 60, "max_prompt_length": 50}
STEPS = {"steps": 3, "global_batch_size": 8, "learning_rate": 1e-3, "log_every": 1}
IDS = torch.arange(3, 40)[None]


def copied(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model, before: dict[str, torch.Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)


def test_torchao_is_quiet_unless_somebody_wants_to_hear_it():
    found = logging.getLogger("torchao")
    before = found.level
    try:
        for given, expected in ((logging.NOTSET, logging.ERROR), (logging.INFO, logging.INFO)):
            found.setLevel(given)
            assert callable(llmdistill.compress)
            assert found.level == expected
    finally:
        found.setLevel(before)


def test_a_student_leaves_its_teacher_as_it_was_and_has_its_mode_and_dtype(model):
    before = copied(model)
    assert type(llmdistill.compress(model, rank=8)) is LlamaForCausalLM
    assert unchanged(model, before)
    assert getattr(model.config, "quantization_config", None) is None
    student = llmdistill.compress(model.train().bfloat16(), ranks={"*.up_proj": 4})
    assert student.training
    assert {parameter.dtype for parameter in student.parameters()} == {torch.bfloat16}
    held = {tensor.data_ptr() for tensor in model.parameters()}
    assert not held & {tensor.data_ptr() for tensor in student.parameters()}
    assert student.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)
    with pytest.raises(UserError, match="already"):
        llmdistill.compress(student, rank=4)


def test_sizes_are_those_of_the_student(model, folder):
    found = llmdistill.sizes(model, rank=8)
    assert found == llmdistill.sizes(folder, rank=8)
    student = llmdistill.compress(model, rank=8)
    assert found["student_params"] == sum(parameter.numel() for parameter in student.parameters())
    assert found["ratio"] == found["student_params"] / found["teacher_params"] < 1
    searched = llmdistill.sizes(model, method="kronecker", target_params="80%")
    assert searched["candidates"][0]["params"] == searched["student_params"]
    best = llmdistill.compress(model, method="kronecker", **searched["settings"])
    assert sum(parameter.numel() for parameter in best.parameters()) == searched["student_params"]


def test_export_in_memory_and_by_name_gives_the_students_logits(model, folder, tokenizer, tmp_path):
    student = llmdistill.compress(model, rank=8)
    found = llmdistill.export(student, tmp_path / "one", tokenizer=tokenizer)
    assert (found["output"], found["params"]) == (str(tmp_path / "one"), model.num_parameters())
    llmdistill.compress(folder, rank=8, output=tmp_path / "student")
    assert llmdistill.export(tmp_path / "student", tmp_path / "two") == {**found, "output": str(tmp_path / "two")}
    for name in ("one", "two"):
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert type(stock.model.layers[0].mlp.up_proj) is torch.nn.Linear
        assert torch.allclose(stock(IDS).logits, student(IDS).logits, atol=1e-4)
    with pytest.raises(UserError, match="no factorized student"):
        llmdistill.export(folder, tmp_path / "three")


class TestEvaluate:
    def test_in_memory_and_by_name_alike(self, model, folder, tokenizer, tmp_path):
        scores = llmdistill.evaluate(model, ROWS, tokenizer=tokenizer, **ANSWERS)
        assert 0 <= scores["rougeL"] <= 100
        assert scores["examples"] == 4
        sets = {"one": datasets.Dataset.from_list(ROWS), "two": [{"prompt": "Say:", "completion": "so"}]}
        named = llmdistill.evaluate(folder, sets, output=tmp_path, **ANSWERS)
        assert named["one"]["per_seed"] == scores["per_seed"]
        assert named["two"]["examples"] == 1
        answers = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
        assert [row["references"] for row in answers] == [[row["output"]] for row in ROWS[:4]]

    def test_a_task_of_glue_by_its_name(self, tmp_path, tokenizer, model):
        (tmp_path / "RTE").mkdir()
        answers = enumerate(["entailment", "not_entailment", "entailment"])
        rows = [f"{i}\tThe town lies by lake {i}.\tIt lies there.\t{label}\n" for i, label in answers]
        for split in ("train", "dev"):
            (tmp_path / "RTE" / f"{split}.tsv").write_text("".join(["index\tsentence1\tsentence2\tlabel\n", *rows]))
        sizes = {"vocab_size": model.config.vocab_size, "max_position_embeddings": 512}
        classifier = tiny_model("bert", head="sequence", **sizes).train()
        torch.nn.init.constant_(classifier.classifier.weight, 0)
        classifier.classifier.bias.data = torch.tensor([1.0, 0.0])  # it answers with the first class, entailment
        given = {"tokenizer": tokenizer, "data_dir": tmp_path}
        scores = llmdistill.evaluate(classifier, "rte", output=tmp_path / "answers", **given)
        assert scores["dev"] == {"RTE": {"accuracy": pytest.approx(200 / 3)}}
        written = (tmp_path / "answers" / "data" / "dev.tsv").read_text().splitlines()
        assert written[1:] == ["0\t0\t0", "1\t0\t1", "2\t0\t0"]
        assert classifier.training
        classifier.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        assert llmdistill.evaluate(tmp_path / "model", {"a": "RTE"}, data_dir=tmp_path) == {"a": scores}
        for data, scored, said in (
            ("stsb", classifier, "it has no folder STS-B"),
            ("rte", model, "model is a LlamaForCausalLM without classifier"),
            ({"rte": "rte", "rows": ROWS}, classifier, "need different heads"),
        ):
            with pytest.raises(UserError, match=said):
                llmdistill.evaluate(scored, data, **given)


class TestDistill:
    def test_it_is_the_main_job(self, model, tokenizer, tmp_path, capsys):
        student = llmdistill.compress(model, rank=8)
        before, environment = [copied(model), copied(student)], dict(os.environ)
        result = llmdistill.distill(
            model, student, ROWS, tokenizer=tokenizer, output_dir=tmp_path / "here", temperature=2.0, **STEPS
        )
        assert unchanged(model, before[0])
        assert unchanged(student, before[1])
        assert dict(os.environ) == environment
        command = "llmdistill.distill(LlamaForCausalLM, LlamaForCausalLM, list, method='makd', ...)"
        assert result.metrics["run"]["command"] == command

        for name, each in (("teacher", model), ("student", student)):
            each.save_pretrained(tmp_path / name)
            tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        (tmp_path / "recipe.yaml").write_text(
            f"teacher: {{model: {tmp_path / 'teacher'}}}\nstudent: {{model: {tmp_path / 'student'}}}\n"
            f"data: {{train: {tmp_path / 'rows.jsonl'}}}\nscoring: {{models: []}}\nmakd: {{temperature: 2.0}}\n"
            "train: {steps: 3, global_batch_size: 8, learning_rate: 1.0e-3, log_every: 1}\n"
        )
        where = ["--ds_config", "ds_configs/zero2.json", "--output_dir", str(tmp_path / "there")]
        main_job(["--recipe", str(tmp_path / "recipe.yaml"), *where])
        there = AutoModelForCausalLM.from_pretrained(tmp_path / "there" / "student")
        assert unchanged(result.student, there.state_dict())
        log = log_rows(tmp_path / "there")
        assert [row["loss"] for row in result.history] == [row["loss"] for row in log]
        assert result.folder == tmp_path / "here"
        assert result.config.train.steps == 3
        assert not unchanged(student, copied(result.student))

    def test_the_same_call_goes_on_where_it_was(self, model, tokenizer, tmp_path):
        student = llmdistill.compress(model, rank=8)
        arguments = {"tokenizer": tokenizer, "output_dir": tmp_path / "run", "method": "kd", **STEPS}
        first = llmdistill.distill(model, student, ROWS, **arguments)
        weights = tmp_path / "run" / "student" / "model.safetensors"
        written = weights.stat().st_mtime_ns
        again = copy.deepcopy(model)
        second = llmdistill.distill(again, llmdistill.compress(again, rank=8), list(ROWS), **arguments)
        assert weights.stat().st_mtime_ns == written
        assert unchanged(second.student, copied(first.student))
        with pytest.raises(UserError, match=r"data\.train"):
            llmdistill.distill(model, student, ROWS[:16], **arguments)

    def test_texts(self, model, tokenizer, tmp_path, monkeypatch):
        monkeypatch.setenv("LLMDISTILL_CACHE", str(tmp_path / "cache"))
        texts = ["The town lies by a lake. " * 5] * 20
        result = llmdistill.distill(
            model, llmdistill.compress(model, rank=8), texts, "kd", tokenizer=tokenizer, max_length=32, **STEPS
        )
        assert result.config.data.kind == "text"
        assert len(result.history) == 3
        assert not (result.folder / "checkpoints").exists()


@pytest.mark.parametrize(("call", "said"), [
    (lambda model, _: llmdistill.compress(model, rnak=8), r"rnak.*did you mean rank"),
    (lambda model, _: llmdistill.compress(model, rank=8, shapes={"*": "2x2"}), r"shapes.*kronecker"),
    (lambda model, _: llmdistill.compress(model, rank=8, settings=["rank"]), "settings is a list: give a dict"),
    (lambda model, _: llmdistill.evaluate(model, ROWS), "tokenizer is missing"),
    (lambda model, _: llmdistill.export(model, "out", data=ROWS), "data is a list: give a file, or the name of a set"),
    (lambda model, _: llmdistill.export(model, "out", group_size=0), "group_size are for 'int8' and 'int4'"),
    (lambda model, _: llmdistill.distill(None, model, ROWS), "teacher is None: give a transformers PreTrainedModel"),
    (lambda *_: llmdistill.evaluate(None, ROWS), "model is None: give a transformers PreTrainedModel"),
    (lambda model, _: llmdistill.sizes(torch.compile(model), rank=8), r"model is a OptimizedModule.*\._orig_mod"),
    (lambda _, folder: llmdistill.evaluate(folder, [ROWS[0], {"instruction": "What?"}]), 'row 2: the key "output"'),
    (lambda _, folder: llmdistill.evaluate(folder, ROWS, decodin="greedy"), "did you mean decoding"),
    (lambda _, folder: llmdistill.distill(folder, folder, ROWS, stesp=3), "stesp.*did you mean train.steps"),
    (
        lambda _, folder: llmdistill.distill(folder, folder, ROWS, settings={"train.micro_batch_sise": 1}),
        "train.micro_batch_sise.*train.micro_batch_size",
    ),
    (lambda _, folder: llmdistill.distill(torch.nn.Linear(2, 2), folder, ROWS), "teacher is a Linear"),
])  # fmt: skip
def test_what_does_not_fit(model, folder, tmp_path, monkeypatch, call, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        call(model, folder)


@pytest.mark.parametrize(("prompt", "said"), [(None, "chat"), ("Q: {instruction}{input}\nA:", "Q: {instruction}")])
def test_all_models_of_a_run_are_asked_alike_and_the_student_remembers(folder, tmp_path, capsys, prompt, said):
    teacher = tmp_path / "teacher"
    shutil.copytree(folder, teacher)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(teacher)
    lengths = {key: ANSWERS[key] for key in ("decoding", "max_length", "max_prompt_length")}
    call = {"tests": {"t": ROWS[:2]}, "valid": datasets.Dataset.from_list(ROWS[:4]), "output_dir": tmp_path / "run"}
    call |= {**lengths, **STEPS, "steps": 1, "ds_config": {"zero_optimization": {"stage": 1}}}
    call["settings"] = {"student.factorize.rank": 8}
    given = {} if prompt is None else {"prompt": prompt}
    result = llmdistill.distill(teacher, None, ROWS, "kd", **call, **given)
    assert "valid_loss" in result.history[-1]
    assert said in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Prompt "))
    asked = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["data"]["prompt"]
    assert asked == (prompt or "chat")
    # HeldOutQuestion in another way, the models would have other perplexities.
    for model, measured, prompt in ((teacher, "teacher", asked), (tmp_path / "run" / "student", "student", None)):
        alike = llmdistill.evaluate(model, ROWS[:2], prompt=prompt, **ANSWERS)["perplexity"]
        other = llmdistill.evaluate(model, ROWS[:2], prompt="minillm", **ANSWERS)["perplexity"]
        assert alike == pytest.approx(result.metrics[measured]["perplexity"]["t"], rel=1e-4)
        assert abs(alike - other) > 1e-3 * alike
    card = (tmp_path / "run" / "student" / "README.md").read_text()
    assert "## How to ask it" in card
    assert ("apply_chat_template" if asked == "chat" else "```text\nQ: {instruction}{input}\nA:\n```") in card
    with pytest.raises(UserError, match=r"data\.prompt was .* and is now minillm"):
        llmdistill.distill(teacher, None, ROWS, "kd", **call, prompt="minillm")


@pytest.mark.parametrize(("old", "name", "new"), [
    ("llmdistill.factorize.modules", "LowRankLinear", "llmdistill.students.modules"),
    ("llmdistill.tasks.glue_files", "GLUE_TASKS", "llmdistill.tasks.glue"),
    ("llmdistill.models.sentences", "read_sentence_settings", "llmdistill.models.pooling"),
    ("llmdistill.data.sentences", "read_sentences", "llmdistill.data.pairs"),
    ("llmdistill.tasks.forward", "compute_values", "llmdistill.tasks.item_outputs"),
    ("llmdistill.teachers.sources", "TEACHERS", "llmdistill.teachers.choice"),
])  # fmt: skip
def test_old_names_that_pages_and_examples_had_say_the_new_ones(old, name, new):
    sys.modules.pop(old, None)  # a module warns when it is first imported
    with pytest.warns(FutureWarning, match=rf"{old} is {new} now"):
        module = importlib.import_module(old)
    assert getattr(module, name) is getattr(importlib.import_module(new), name)
