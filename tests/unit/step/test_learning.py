"""The losses of a forward pass that computes them while it runs, against the same from whole taps and logits."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from references import terms_of
from tiny import WORDS, shaken, tiny_config, tiny_model
from torch import nn
from transformers import BertForPreTraining, BertForQuestionAnswering, LlamaForCausalLM

from llmdistill.attention_mask import AttentionMask
from llmdistill.batch import IGNORE_INDEX, POSITIONS, Batch, LogitScale
from llmdistill.errors import UserError
from llmdistill.losses.terms import BoundTerms
from llmdistill.methods import METHODS, build_method
from llmdistill.methods.sft import make_sft
from llmdistill.models.families import family_of, has_family
from llmdistill.models.heads import CLASSES
from llmdistill.objective import Objective
from llmdistill.step.forward import TappedModel
from llmdistill.step.loss_modes import choose_loss_modes
from llmdistill.step.own_loss import measure_own_loss
from llmdistill.step.taps import Recorder

CHANGES = {
    "makd": {"matrix_layers": "all", "layer_layers": "all", "label": 0.5, "temperature": 2.0},
    "kd": {"ratio": 0.7, "temperature": 2.0, "divergence": "skew_reverse_kl"},
    "minilm": {"teacher_layers": "uniform", "value_mse": 1.0},
    "minilmv2": {"relation_heads": 8, "relations": ("qq", "kk", "qk")},
    "distilbert": {},
    "tinybert": {"soft": 1.0},
    "kroneckerbert": {"temperature": 2.0},
}
SETTINGS = {name: replace(METHODS[name].defaults(), **each) for name, each in CHANGES.items()}
EVERYWHERE = {name: replace(SETTINGS[name], positions="all") for name in ("makd", "kd")}
BOTH = Objective(tokens=True, targets=CLASSES)


def make(family, seed):
    model = tiny_model(family, seed=seed)
    if family == "bert":
        model = BertForPreTraining._from_config(model.config, attn_implementation="sdpa").eval()
    return shaken(model, 0.2)  # larger than at birth, so that every term has weight


def make_batch(family="llama"):
    ids = torch.randint(3, 40, (3, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, 6:] = mask[1, :3] = 0
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, :4] = IGNORE_INDEX
    targets = torch.tensor([1, IGNORE_INDEX, 0]) if family == "bert" else None
    return Batch(ids, mask, labels, targets=targets)


def method_of(names, family, settings=SETTINGS):
    config = make(family, 0).config
    return build_method(names.split(), settings, config, config, BOTH if family == "bert" else Objective())


DIVISORS = dict.fromkeys(POSITIONS, torch.tensor(7))


def both_ways(method, student, teacher, batch):
    """Losses and gradients from whole taps and logits, and from those that are computed on the way."""
    of_teacher = TappedModel(teacher, Recorder(teacher, method.teacher_taps))
    of_student = TappedModel(student, Recorder(student, method.student_taps))
    with torch.no_grad():
        whole, teacher_targets = of_teacher(batch), of_teacher.compute_targets(batch, lm_head=method.teacher_positions)
    losses = terms_of(method, of_student(batch), whole, batch)
    total = torch.stack([method.weights[name] * each.sum / 7 for name, each in losses.items()]).sum()
    plain = SimpleNamespace(losses=losses, total=total, gradients=gradients_of(total, student))
    recorded, pop_taps = [], of_student._recorder.pop_taps
    of_student._recorder.pop_taps = lambda: recorded.append(pop_taps())
    learned = of_student.compute_losses(batch, method.bind_terms(teacher_targets, batch, DIVISORS))
    assert not any(each.sum.requires_grad for each in learned.terms.values())
    running = SimpleNamespace(
        losses=dict(learned.terms), total=learned.total, recorded=recorded, teacher_targets=teacher_targets
    )
    running.gradients = gradients_of(learned.total, student)
    for each in (of_teacher, of_student):
        each.remove()
    return SimpleNamespace(plain=plain, running=running)


def gradients_of(total, student):
    student.zero_grad()
    total.backward()
    return {name: each.grad for name, each in student.named_parameters() if each.grad is not None}


def compare(ways):
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
def test_losses_and_gradients_are_those_of_whole_taps_and_logits(names, family, settings):
    batch = replace(make_batch(family), labels_are="samples" if " " in names else "answers")
    ways = both_ways(method_of(names, family, settings), make(family, 1), make(family, 0), batch)
    compare(ways)
    for taps in (*ways.running.recorded, ways.running.teacher_targets.taps):
        kept = {name: tensors for name, tensors in vars(taps).items() if tensors and name not in ("scaling", "mask")}
        assert not any(kept.pop("projected", {}).values())
        assert not kept, "something is kept that no term needs any more"


def test_a_student_without_segments_learns_from_a_teacher_that_has_them():
    teacher, student = make("bert", 0), make("distilbert", 1)
    method = build_method(["distilbert"], SETTINGS, teacher.config, student.config)
    batch = replace(make_batch(), token_type_ids=(torch.arange(9) > 4).long().expand(3, 9))
    ways = both_ways(method, student, teacher, batch)
    compare(ways)
    alone = both_ways(method, student, teacher, replace(batch, token_type_ids=None))
    assert ways.running.losses["label"].sum == alone.running.losses["label"].sum
    assert ways.running.losses["soft"].sum != alone.running.losses["soft"].sum


def test_projectors_under_checkpointing_learn_the_same():
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
            teacher_targets = of_teacher.compute_targets(batch, lm_head=method.teacher_positions)
        tapped.compute_losses(batch, method.bind_terms(teacher_targets, batch, DIVISORS)).total.backward()
        gradients.append([p.grad for p in (*student.parameters(), *projectors.parameters()) if p.grad is not None])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-7)


def test_the_head_sees_only_the_rows_that_predict_a_label():
    student, batch = make("llama", 1), make_batch()
    seen = []
    student.lm_head.register_forward_hook(lambda _m, args, output: seen.append((args[0].shape, output.shape)))
    both_ways(method_of("makd", "llama"), student, make("llama", 0), batch)
    labels = int((batch.labels[:, 1:] != IGNORE_INDEX).sum())
    assert seen == [((3, 9, 16), (3, 9, 60)), ((1, labels, 16), ())]


# What the forward pass itself does.


def test_spans_do_not_depend_on_padding():
    model = BertForQuestionAnswering(tiny_config("bert")).eval()
    tapped = TappedModel(model, Recorder(model, {}))
    ids = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    both = tapped(Batch(ids, mask, torch.full_like(ids, IGNORE_INDEX))).sequence_logits
    first = ids[:1, :3]
    alone = tapped(Batch(first, torch.ones_like(first), torch.full_like(first, IGNORE_INDEX))).sequence_logits
    assert both.shape == (2, 2, 5)
    assert torch.allclose(both[:1].softmax(-1)[..., :3], alone.softmax(-1), atol=1e-6)
    assert (both[0, :, 3:] == -torch.inf).all()


def test_a_total_without_terms_on_tokens_reaches_every_parameter():
    model = BertForPreTraining(tiny_config("bert"))
    ids = torch.tensor([[1, 2, 3]])
    terms = BoundTerms(layer_terms=(), token_terms=(), sequence_terms=(), teacher=None, factors={})
    TappedModel(model, Recorder(model, {})).compute_losses(
        Batch(ids, torch.ones_like(ids), ids), terms
    ).total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_padding_is_no_key_and_sees_all():
    """A source of one token with a target of one, padded on the left and on the right."""
    real, visible_until = torch.tensor([[0, 1, 1, 0]]), torch.tensor([[4, 2, 3, 4]])
    seen = AttentionMask(real, visible_until_BT=visible_until).dense()
    assert seen.long().tolist() == [[[[1, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]]]


# The loss of a model through its LM head is its own loss, or its own logits are taken.

SCALED = {"granite": {}, "gemma2": {"final_logit_softcapping": 2.0}, "cohere": {}}
"""Architectures whose logits are more than the product of their head: a divisor, a softcap, a factor."""


def batch_of(*, shift=True):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, WORDS, (4, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = mask[2, 8:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    labels = ids.masked_fill((mask == 0) | (torch.arange(9) < 4), IGNORE_INDEX)
    return Batch(ids, mask, labels).with_positions(shift=shift)


def tapped_model(name, **settings):
    model = tiny_model(name, scale=3.0, **settings)
    return TappedModel(model, Recorder(model, {}))


def stock_loss(tapped, batch):
    """The loss that transformers itself computes from labels."""
    return tapped.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss


def our_loss(tapped, batch):
    return tapped.compute_losses(batch, make_sft(causal=tapped.shift).bind_terms(None, batch, batch.divisors())).total


@pytest.mark.parametrize("name", [*SCALED, "llama", "phi3", "gpt2", "opt", "qwen3_moe", "bert", "mpnet", "deberta-v2"])
def test_the_loss_after_the_check_is_the_models_own(name, capsys):
    tapped = tapped_model(name, **SCALED.get(name, {}))
    batch = batch_of(shift=tapped.shift)
    choose_loss_modes({"student": tapped}, batch)
    assert "are more than the product of its LM head" not in capsys.readouterr().out
    assert tapped.shortcut
    config = tapped.model.config
    assert tapped.makes_mask == (not has_family(config) or family_of(config).makes_mask)
    parameters = list(tapped.model.parameters())
    ours, own = our_loss(tapped, batch), stock_loss(tapped, batch)
    torch.testing.assert_close(ours, own, atol=2e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(each, parameters, allow_unused=True) for each in (ours, own)]
    for found, expected in zip(*gradients, strict=True):
        if expected is not None:
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-3)
    if name in SCALED:
        assert abs(measure_own_loss(tapped, batch).of_product - own.item()) > 1e-4, "the scale does nothing here"


@pytest.mark.parametrize("name", SCALED)
def test_divergences_from_scaled_logits_are_those_of_the_models_own(name):
    """Teacher and student by their own logits, and by the inputs of their heads."""
    student, teacher = (tapped_model(name, seed=seed, **SCALED[name]) for seed in (0, 1))
    batch = batch_of()
    entry = METHODS["kd"]
    method = entry.build(entry.settings(), student.model.config, teacher.model.config)
    found = []
    for shortcut in (True, False):
        with student.modes(shortcut=shortcut, makes_mask=True), teacher.modes(shortcut=shortcut, makes_mask=True):
            targets = teacher.compute_targets(batch, lm_head=method.teacher_positions)
            losses = student.compute_losses(batch, method.bind_terms(targets, batch, batch.divisors()))
        gradients = torch.autograd.grad(losses.total, list(student.model.parameters()))
        found.append([losses.total.detach(), *gradients])
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)


def test_a_softcap_is_seen_while_the_logits_are_small(capsys):
    """A cap that the config does not tell."""
    model = tiny_model("gemma2", scale=0.1)
    tapped = TappedModel(model, Recorder(model, {}))
    tapped.logit_scale = LogitScale()
    loss = measure_own_loss(tapped, batch_of())
    assert abs(loss.own - loss.of_product) < 1e-4, "the losses alone would not show it"
    assert not loss.has_plain_head
    choose_loss_modes({"student": tapped}, batch_of())
    assert "the logits of gemma2 are more than the product of its LM head" in capsys.readouterr().out
    assert not tapped.shortcut
    torch.testing.assert_close(our_loss(tapped, batch_of()), stock_loss(tapped, batch_of()), atol=2e-5, rtol=1e-5)


def test_other_masks_are_seen(monkeypatch):
    """A window that llmdistill does not know gives another loss, so the model's own masks are taken."""
    monkeypatch.setattr("llmdistill.step.forward.layer_values", lambda *_: [])
    tapped = tapped_model("mistral")
    batch = batch_of()
    loss = measure_own_loss(tapped, batch)
    assert loss.has_plain_head
    assert not loss.is_ours
    choose_loss_modes({"student": tapped}, batch)
    assert not tapped.shortcut
    assert tapped.makes_mask
    torch.testing.assert_close(our_loss(tapped, batch), stock_loss(tapped, batch), atol=2e-5, rtol=1e-5)


def test_packed_rows_need_our_masks():
    tapped = tapped_model("phi3")
    ids = torch.arange(5, 17)[None]
    mask = (torch.arange(12) // 6 + 1)[None]
    batch = Batch(ids, mask, ids, position_ids=(torch.arange(12) % 6)[None]).with_positions(shift=True)
    with pytest.raises(UserError, match=r"data\.packing to false"):
        choose_loss_modes({"student": tapped}, batch)
