"""A task of another package brings its head as a row in HEADS, and nothing else changes: here tags of words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from entities_task import NAMES, TAGS, WORDS, Entities, EntityData
from torch.nn import functional
from transformers import BertForTokenClassification
from transformers.models.auto import modeling_auto
from word_models import save_bert, save_tokenizer

import llmdistill
from llmdistill.batch import Batch
from llmdistill.config import DataConfig, RunConfig, TaskConfig
from llmdistill.data.sampler import Share
from llmdistill.methods import build_method
from llmdistill.methods.kd import KdConfig
from llmdistill.models.heads import HEADS, find_head
from llmdistill.models.load import load_model
from llmdistill.objective import Objective
from llmdistill.step.tap_models import tap_student, tap_teacher
from llmdistill.tasks.base import Models

SIZE = 8
"""Sentences in the global batch."""


@pytest.fixture
def models(tmp_path):
    """Folders of a teacher and a student that give tags, with other weights."""
    folders = tmp_path / "teacher", tmp_path / "student"
    for seed, folder in enumerate(folders):
        save_tokenizer(folder, WORDS)
        save_bert(folder, WORDS, BertForTokenClassification, num_labels=len(NAMES), initializer_range=0.3 + 0.3 * seed)
    return folders


def load(path) -> BertForTokenClassification:
    return load_model(path, dtype=torch.float32, head="tags")


def read(folder: Path) -> EntityData:
    config, paths = load(folder).config, {"teacher_path": folder, "tokenizer_path": folder}
    task = Entities(RunConfig(ds_config="", data=DataConfig(kind="task", task=TaskConfig(name="entities"))))
    return task.read(Models(teacher=config, student=config, causal=False, objective=Objective(False, TAGS), **paths))


def plain_loss(teacher, student, batch: Batch) -> torch.Tensor:
    """KL(T||S) and cross-entropy, half of each, as the mean over the words."""
    is_word = batch.labels != -100
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    with torch.no_grad():
        log_p = teacher(**inputs).logits[is_word].log_softmax(-1)
    logits = student(**inputs).logits[is_word]
    divergence = (log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1).mean()
    return 0.5 * divergence + 0.5 * functional.cross_entropy(logits, batch.labels[is_word])


@pytest.mark.parametrize(("head", "names"), [
    ("sequence", modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    ("span", modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
    ("tags", modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
], ids=["sequence", "span", "tags"])  # fmt: skip
def test_a_head_is_known_by_the_name_of_every_class_that_has_it(head, names):
    for name in names.values():
        for one in [name] if isinstance(name, str) else name:
            assert find_head(type(one, (), {})()) is HEADS[head], one


def test_a_step_is_that_of_a_plain_loop(models):
    teacher, student, plain_student = load(models[0]), load(models[1]), load(models[1])
    (batch,) = read(models[0]).loader(Share(seed=0, global_batch_size=SIZE, micro_batch_size=SIZE)).micro_batches(0)
    expected = plain_loss(teacher, plain_student, batch)
    expected.backward()

    objective = Objective(tokens=False, targets=TAGS)
    method = build_method(["kd"], {"kd": KdConfig(ratio=0.5)}, teacher.config, student.config, objective)
    assert method.positions == {"tag_forward_kl": "labels", "tag_label": "labels"}
    teaching, learning = tap_teacher(method, teacher), tap_student(method, student)
    with torch.no_grad():
        outputs = teaching.compute_targets(batch, lm_head=method.teacher_positions)
    losses = learning.compute_losses(batch, method.bind_terms(outputs, batch, batch.divisors()))
    losses.total.backward()
    torch.testing.assert_close(losses.total, expected)
    for (name, parameter), plain in zip(student.named_parameters(), plain_student.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, plain.grad, msg=name)


def test_a_loss_in_a_loop_of_ones_own_finds_the_head_by_the_class_of_the_model(models):
    teacher, student = load(models[0]), load(models[1])
    batch = read(models[0]).collate(read(models[0]).items)
    expected = plain_loss(teacher, student, batch)
    loss = llmdistill.DistillationLoss(teacher, student, "kd", ratio=0.5)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}
    torch.testing.assert_close(loss(inputs).loss, expected)


def test_an_entry_point_brings_the_task_and_its_head(models, tmp_path):
    """A run trains a step, saves and scores the student; plan and check know the head too."""
    packages, root = tmp_path / "packages", Path(__file__).resolve().parents[3]
    info = packages / "entities-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entities\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[llmdistill.tasks]\nentities = entities_task:Entities\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (packages, root, root / "tests")))}
    settings = {"teacher.model": models[0], "student.model": models[1], "data.task.name": "entities", "kd.ratio": 0.5}
    settings |= {"train.steps": 1, "train.epochs": "null", "train.global_batch_size": SIZE, "train.log_every": 1}
    settings |= {"data.max_length": 16, "output_dir": tmp_path / "run", "method": "kd"}
    words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "llmdistill.train", "--recipe", "finetune", "--ds_config", "zero1", *words]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr

    loader = read(models[0]).loader(Share(seed=0, global_batch_size=SIZE, micro_batch_size=SIZE))
    (row,) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    expected = plain_loss(load(models[0]), load(models[1]), loader.micro_batches(0)[0])
    assert row["loss"] == pytest.approx(expected.item(), rel=1e-5)
    metrics = json.loads((tmp_path / "run/metrics.json").read_text(encoding="utf-8"))
    assert metrics["student"]["accuracy"] > 0
    card = (tmp_path / "run/student/README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: token-classification" in card
    assert "AutoModelForTokenClassification" in card
