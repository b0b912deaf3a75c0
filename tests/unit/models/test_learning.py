"""The losses of a forward pass that computes them while it runs, against the same from whole taps and logits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from references import terms_of
from tiny import shaken, tiny_config, tiny_model
from torch import nn
from transformers import BertForPreTraining, LlamaForCausalLM, PreTrainedModel

from llmdistill.batch import IGNORE_INDEX, POSITIONS, Batch, Taps
from llmdistill.methods import METHODS, Method, build_method
from llmdistill.models.forward import TappedModel
from llmdistill.models.taps import Recorder
from llmdistill.objective import Objective

CHANGES: dict[str, dict[str, Any]] = {
    "makd": {"matrix_layers": "all", "layer_layers": "all", "label": 0.5, "temperature": 2.0},
    "kd": {"ratio": 0.7, "temperature": 2.0, "divergence": "skew_reverse_kl"},
    "minilm": {"teacher_layers": "uniform", "value_mse": 1.0},
    "minilmv2": {"relation_heads": 8, "relations": ("qq", "kk", "qk")},
    "distilbert": {},
    "tinybert": {"soft": 1.0},
    "kroneckerbert": {"temperature": 2.0},
}
SETTINGS: dict[str, Any] = {name: replace(METHODS[name].defaults(), **each) for name, each in CHANGES.items()}
EVERYWHERE = {name: replace(SETTINGS[name], positions="all") for name in ("makd", "kd")}
BOTH = Objective(tokens=True, sequences="classes")


def make(family: str, seed: int) -> PreTrainedModel:
    model = tiny_model(family, seed=seed)
    if family == "bert":
        model = BertForPreTraining._from_config(model.config, attn_implementation="sdpa").eval()
    return shaken(model, 0.2)  # larger than at birth, so that every term has weight


def make_batch(family: str = "llama") -> Batch:
    ids = torch.randint(3, 40, (3, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, 6:] = mask[1, :3] = 0
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, :4] = IGNORE_INDEX
    targets = torch.tensor([1, IGNORE_INDEX, 0]) if family == "bert" else None
    return Batch(ids, mask, labels, targets=targets)


def method_of(names: str, family: str, settings: dict[str, Any] = SETTINGS) -> Method:
    config = make(family, 0).config
    return build_method(names.split(), settings, config, config, BOTH if family == "bert" else Objective())


DIVISORS = dict.fromkeys(POSITIONS, torch.tensor(7))


def both_ways(method: Method, student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> SimpleNamespace:
    """Losses and gradients from whole taps and logits, and from those that are computed on the way."""
    seen = []
    for running in (False, True):
        of_teacher = TappedModel(teacher, Recorder(teacher, method.teacher_taps))
        of_student = TappedModel(student, Recorder(student, method.student_taps))
        with torch.no_grad():
            taught = of_teacher.teach(batch, lm_head=method.teacher_positions) if running else of_teacher(batch)
        kept: list[Taps] = []
        if running:
            take = of_student._recorder.take
            of_student._recorder.take = lambda take=take, kept=kept: kept.append(take())  # type: ignore[method-assign]
            learned = of_student.learn(batch, method.running(taught, batch, DIVISORS))
            losses, loss = dict(learned.terms), learned.total
            assert not any(each.sum.requires_grad for each in losses.values())
        else:
            losses = terms_of(method, of_student(batch), taught, batch)
            loss = torch.stack([method.weights[name] * each.sum / 7 for name, each in losses.items()]).sum()
        student.zero_grad()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}
        seen.append(SimpleNamespace(losses=losses, total=loss, gradients=gradients, kept=kept, taught=taught))
        for each in (of_teacher, of_student):
            each._recorder.remove()
    return SimpleNamespace(plain=seen[0], running=seen[1])


def compare(ways: SimpleNamespace) -> None:
    assert ways.running.losses.keys() == ways.plain.losses.keys()
    torch.testing.assert_close(ways.running.total, ways.plain.total, rtol=2e-5, atol=1e-6)
    for name, loss in ways.plain.losses.items():
        torch.testing.assert_close(ways.running.losses[name].sum, loss.sum, rtol=2e-5, atol=1e-6)
        assert ways.running.losses[name].count == loss.count
    for name, gradient in ways.plain.gradients.items():
        other = ways.running.gradients.get(name, torch.zeros(()))
        assert (other - gradient).abs().max() <= 1e-5 * max(1.0, gradient.abs().max()), name


@pytest.mark.parametrize(("names", "family", "settings"), [
    *((name, family, SETTINGS) for name in SETTINGS for family in ("llama", "bert")),
    *(("makd", family, SETTINGS) for family in ("gpt2", "roberta", "distilbert")),
    *((name, "bert", EVERYWHERE) for name in EVERYWHERE),
    ("makd kd", "llama", SETTINGS),
])  # fmt: skip
def test_losses_and_gradients_are_those_of_whole_taps_and_logits(names, family, settings) -> None:
    batch = replace(make_batch(family), own_answers=" " in names)
    ways = both_ways(method_of(names, family, settings), make(family, 1), make(family, 0), batch)
    compare(ways)
    for taps in (*ways.running.kept, ways.running.taught.taps):
        kept = {aspect: tensors for aspect, tensors in vars(taps).items() if tensors and aspect != "scaling"}
        assert not any(kept.pop("projected", {}).values())
        assert not kept, "something is kept that no term needs any more"


def test_a_student_without_segments_learns_from_a_teacher_that_has_them() -> None:
    teacher, student = make("bert", 0), make("distilbert", 1)
    method = build_method(["distilbert"], SETTINGS, teacher.config, student.config)
    batch = replace(make_batch(), token_type_ids=(torch.arange(9) > 4).long().expand(3, 9))
    ways = both_ways(method, student, teacher, batch)
    compare(ways)
    alone = both_ways(method, student, teacher, replace(batch, token_type_ids=None))
    assert ways.running.losses["label"].sum == alone.running.losses["label"].sum
    assert ways.running.losses["soft"].sum != alone.running.losses["soft"].sum


def test_projectors_under_checkpointing_learn_the_same() -> None:
    gradients = []
    config, wide = make("llama", 0).config, tiny_config("llama", hidden_size=32)
    method = build_method(["tinybert"], SETTINGS, wide, config)
    teacher = LlamaForCausalLM._from_config(wide, attn_implementation="sdpa").eval()
    batch = make_batch()
    of_teacher = TappedModel(teacher, Recorder(teacher, method.teacher_taps))
    for checkpointed in (False, True):
        student = make("llama", 1).train()
        if checkpointed:
            student.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        projectors = nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name, sizes in method.projections.items()})
        tapped = TappedModel(student, Recorder(student, method.student_taps, projectors))
        with torch.no_grad():
            taught = of_teacher.teach(batch, lm_head=method.teacher_positions)
        tapped.learn(batch, method.running(taught, batch, DIVISORS)).total.backward()
        gradients.append([p.grad for p in (*student.parameters(), *projectors.parameters()) if p.grad is not None])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-7)


def test_the_head_sees_only_the_rows_that_predict_a_label() -> None:
    student, batch = make("llama", 1), make_batch()
    seen = []
    student.lm_head.register_forward_hook(lambda _m, args, output: seen.append((args[0].shape, output.shape)))
    both_ways(method_of("makd", "llama"), student, make("llama", 0), batch)
    labels = int((batch.labels[:, 1:] != IGNORE_INDEX).sum())
    assert seen == [((3, 9, 16), (3, 9, 60)), ((1, labels, 16), ())]
