"""The student around DeepSpeed: learning rates, and what is trained, saved and written. DeepSpeed: tests/dist."""

import json

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from plain_engine import PlainEngine
from safetensors.torch import load_file
from tiny import tiny_model
from transformers import PreTrainedModel, get_scheduler

from llmdistill.config import FactorizeConfig, LoraConfig, StudentConfig, TrainConfig
from llmdistill.models.adapters import add_lora
from llmdistill.models.load import load_model
from llmdistill.runtime.engine import Template, build_engine, learning_rate, parameter_groups, save_student
from llmdistill.students.convert import compress_folder
from llmdistill.training.checkpoints import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.usefixtures("cpu_world")
LORA = LoraConfig(rank=2, alpha=4.0)
STUDENT = StudentConfig(lora=LORA)
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture
def student(tmp_path):
    """A factorized student with a tied head."""
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    compress_folder(tmp_path / "base", tmp_path / "untrained", StudentConfig(factorize=FactorizeConfig(rank=5)))
    return tmp_path / "untrained"


def adapted(folder, *, train: bool = True) -> PreTrainedModel:
    model = load_model(folder, dtype=torch.float32)
    add_lora(model, LORA, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if train and parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model


def test_biases_and_norms_do_not_decay_and_what_is_not_trained_is_left_out(student):
    model = adapted(student)
    (group,) = parameter_groups(model, 0.1)
    assert {id(p) for p in group["params"]} == {id(p) for name, p in model.named_parameters() if "lora_" in name}
    model = torch.nn.TransformerEncoderLayer(8, 2)
    decay = {id(each): group["weight_decay"] for group in parameter_groups(model, 0.1) for each in group["params"]}
    found = {name: decay[id(each)] for name, each in model.named_parameters()}
    assert found == {name: 0.0 if "bias" in name or "norm" in name else 0.1 for name in found}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_the_adapters(student, monkeypatch, checkpointing):
    monkeypatch.setattr("deepspeed.initialize", lambda *, model, **_: (PlainEngine(model),))
    engine = build_engine(adapted(student), {}, TrainConfig(activation_checkpointing=checkpointing))
    engine.module(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    grads = {name: p.grad for name, p in engine.module.named_parameters() if p.requires_grad}
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads.values())
    assert engine.module.model.layers[0].gradient_checkpointing == checkpointing


def written(model: PreTrainedModel, source) -> PreTrainedModel:
    """The student that is written, loaded again."""
    output = source.with_name("student")
    template = Template(source, lambda dtype: load_model(source, new_head=True, dtype=dtype))
    save_student(PlainEngine(model), output=output, template=template, settings=STUDENT)
    return load_model(output, dtype=torch.float32)


def test_a_student_that_is_an_adapter_folder(tmp_path, student):
    peft = PeftConfig(r=2, target_modules=["down_proj.A"], init_lora_weights=False)
    get_peft_model(load_model(student, dtype=torch.float32), peft).save_pretrained(tmp_path / "adapter")
    (student / "tokenizer.json").write_text("{}")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "../untrained"}))
    trained = adapted(tmp_path / "adapter")
    expected = trained(TOKENS).logits
    assert torch.allclose(written(trained, tmp_path / "adapter")(TOKENS).logits, expected, atol=1e-5)
    assert (tmp_path / "student" / "tokenizer.json").is_file()


def test_checkpoints_hold_the_adapters_and_nothing_else_and_the_student_is_written_with_them(student, tmp_path):
    model = adapted(student)
    expected = model(TOKENS).logits
    save_checkpoint(PlainEngine(model), tmp_path / "run", 3, keep=1)
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-3" / "rank-00000.safetensors")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert saved.keys() == {f"weight/0/{name}" for name in trained}  # not the tied head under its second name either

    fresh = adapted(student, train=False)
    assert load_checkpoint(PlainEngine(fresh), tmp_path / "run") is not None
    assert torch.equal(fresh(TOKENS).logits, expected)
    assert torch.allclose(written(model, student)(TOKENS).logits, expected, atol=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_is_that_of_transformers(schedule):
    settings = TrainConfig(steps=20, warmup_steps=5, learning_rate=0.3, schedule=schedule)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    reference = get_scheduler(schedule, optimizer, num_warmup_steps=5, num_training_steps=20)
    rates = []
    for _ in range(20):
        rates.append(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
    # transformers starts its warm-up at 0, a step that learns nothing; ours at 1/warmup.
    assert [learning_rate(settings, step) for step in range(5, 20)] == pytest.approx(rates[5:])
    assert [learning_rate(settings, step) for step in range(4)] == pytest.approx(rates[1:5])


def test_constant_and_minimum():
    constant, falling = TrainConfig(steps=10, schedule="constant"), TrainConfig(steps=10, min_learning_rate=1e-4)
    assert {learning_rate(constant, step) for step in range(10)} == {constant.peak_learning_rate}
    rates = [learning_rate(falling, step) for step in range(10)]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1] > 1e-4) == (falling.peak_learning_rate, True)
