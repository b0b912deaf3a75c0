"""What the tests of a teacher's cache share: tiny models, batches, and losses with their gradients."""

from pathlib import Path
from typing import Any

import torch
from tiny import save_decoder
from transformers import LlamaForCausalLM

from llmdistill.batch import Batch
from llmdistill.config.teacher import CacheConfig
from llmdistill.data.sampler import Share
from llmdistill.models.load import load_model
from llmdistill.step.tap_models import tap_student
from llmdistill.teachers.cache.folder import CacheFolder
from llmdistill.teachers.cache.origin import check_cache
from llmdistill.teachers.cache.teacher import CachedTeacher
from llmdistill.teachers.output_rows import Request
from llmdistill.training.plan import Plan

SMALL = CacheConfig(micro_batch_size=3, shard_tokens=150)
TOP_K = CacheConfig(content="top_k", top_k=20, micro_batch_size=4)


def model(folder: Path, seed: int, kind: type[Any] = LlamaForCausalLM) -> Path:
    """A tiny Llama with random weights and the embedded tokenizer."""
    return save_decoder(folder, seed=seed, kind=kind, num_hidden_layers=2, pad_token_id=0, eos_token_id=1)


def checked(planned, folder: Path, *arguments: str) -> None:
    check_cache(*planned("--teacher.cache", str(folder), *arguments))


def batches(plan: Plan, data: Any, size: int = 5) -> list[Batch]:
    loader = data.loader(Share(seed=0, global_batch_size=size, micro_batch_size=size))
    return [batch.with_positions(shift=True) for step in range(3) for batch in loader.micro_batches(step)]


def losses(plan: Plan, teacher: Any, batches: list[Batch]) -> list[dict[str, Any]]:
    """Each term, and the gradients of the student."""
    student = loaded(plan, "student")
    tapped = tap_student(plan.method, student, vocabulary=plan.models.vocabulary)
    results = []
    for batch in batches:
        with torch.no_grad():
            targets = teacher.compute_targets(batch, lm_head=plan.method.teacher_positions)
        learned = tapped.compute_losses(batch, plan.method.bind_terms(targets, batch))
        student.zero_grad()
        learned.total.backward()
        found = {name: each.grad for name, each in student.named_parameters() if each.grad is not None}
        terms = {name: loss.sum / loss.count for name, loss in learned.terms.items()}
        results.append(terms | {name: grad / batch.input_ids.numel() for name, grad in found.items()})
    tapped.remove()
    return results


def loaded(plan: Plan, role: str) -> Any:
    path = plan.config.student.model if role == "student" else plan.config.teacher.model
    return load_model(str(path), dtype=torch.float32, head=plan.task.head or "lm_head")


def cached(plan: Plan, folder: Path) -> CachedTeacher:
    return CachedTeacher(CacheFolder(folder), Request.of(plan.method), shift=True, device=torch.device("cpu"))
