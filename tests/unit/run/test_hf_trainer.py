"""transformers' Trainer with our loss, against the main job."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tiny import save_decoder
from transformers import LlamaForCausalLM, TrainingArguments

import llmdistill
from llmdistill import DistillationTrainer
from llmdistill.run import assemble
from llmdistill.run.plan import make_plans
from llmdistill.runtime.distributed import World

STEPS, MICRO, ACCUMULATION = 4, 4, 2
ROWS = [
    {"prompt": f"Number {i}" + " and" * (i % 5), "completion": f"is {i % 7}" + " more" * (i % 3)} for i in range(32)
]


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    """A run of the main job, the models it began with, and its batches by step, as a collator would give them."""
    folder = tmp_path_factory.mktemp("main_job")
    teacher = LlamaForCausalLM.from_pretrained(save_decoder(folder / "teacher", num_hidden_layers=2))
    student = llmdistill.compress(teacher, rank=8)
    settings = {"steps": STEPS, "learning_rate": 1e-3, "schedule": "constant", "log_every": 1}
    settings |= {"global_batch_size": MICRO * ACCUMULATION, "micro_batch_size": MICRO}
    result = llmdistill.distill(teacher, student, ROWS, output_dir=folder / "run", **settings)
    (plan,) = make_plans(result.config)
    world = World(rank=0, size=1, device=torch.device("cpu"))
    loader = plan.task.read(plan.models).prepared(world).loader(assemble.share_of(plan, world))
    batches = [
        {key: getattr(batch, key) for key in ("input_ids", "attention_mask", "labels")}
        for step in range(STEPS)
        for batch in loader.micro_batches(step)
    ]
    return teacher, student, batches, result


def arguments(folder, **changes) -> TrainingArguments:
    values = {"max_steps": STEPS, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    values |= {"max_grad_norm": 1.0, "gradient_accumulation_steps": ACCUMULATION, "save_strategy": "no"}
    values |= {"per_device_train_batch_size": 1}  # of whole micro batches, see the collator
    values |= {"logging_steps": 1, "logging_nan_inf_filter": False, "report_to": [], "disable_tqdm": True}
    values |= {"use_cpu": True, "remove_unused_columns": False, "train_sampling_strategy": "sequential"}
    return TrainingArguments(output_dir=str(folder), **{**values, **changes})


def first(batches):
    return batches[0]


def test_a_trainer_does_what_the_main_job_does(main_job, tmp_path):
    teacher, student, batches, result = main_job
    student = copy.deepcopy(student)
    trainer = DistillationTrainer(
        student, copy.deepcopy(teacher), arguments(tmp_path), train_dataset=batches, data_collator=first
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    for name in ("loss", *trainer.distillation.method.weights):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in result.history], rel=1e-4)
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in result.history], rel=1e-3)
    trained = result.student.state_dict()
    for name, tensor in student.state_dict().items():
        assert torch.allclose(tensor, trained[name], atol=2e-5), name


def test_evaluation_and_a_checkpoint(main_job, tmp_path):
    teacher, student, batches, _ = main_job
    student = copy.deepcopy(student)
    given = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, per_device_eval_batch_size=1)
    kd = {"method": "kd", "method_settings": {"temperature": 2.0}}
    data = {"train_dataset": batches, "eval_dataset": batches[:1], "data_collator": first}
    trainer = DistillationTrainer(student, copy.deepcopy(teacher), given, **kd, **data)
    trainer.train()
    figures = trainer.evaluate()
    student.eval()
    expected = trainer.distillation(batches[0])
    assert figures["eval_loss"] == pytest.approx(float(expected.loss.detach()), rel=1e-4)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert torch.equal(loaded(batches[0]["input_ids"]).logits, student(batches[0]["input_ids"]).logits)
    assert "llmdistill_taps" not in json.dumps(loaded.config.to_dict())
