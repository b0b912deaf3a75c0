"""The loss of a model through its LM head is its own loss, or its own logits are taken."""

from __future__ import annotations

import pytest
import torch
from tiny import WORDS, tiny_model
from torch import Tensor

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.errors import UserError
from llmdistill.methods.sft import make_sft
from llmdistill.models.families import family_of, has_family
from llmdistill.models.forward import TappedModel
from llmdistill.models.own_loss import own_loss
from llmdistill.models.taps import Recorder
from llmdistill.run.loss_check import check_losses
from llmdistill.runtime.distributed import World

SCALED = ("granite", "gemma2", "cohere")
"""Architectures whose logits are more than the product of their head: a divisor, a softcap, a factor."""


def make_batch(*, shift: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, WORDS, (4, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = mask[2, 8:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    labels = ids.masked_fill((mask == 0) | (torch.arange(9) < 4), IGNORE_INDEX)
    return Batch(ids, mask, labels).with_label_rows(shift=shift)


def tapped_model(name: str, **settings: object) -> TappedModel:
    model = tiny_model(name, scale=3.0, **settings)
    return TappedModel(model, Recorder(model, {}))


def stock_loss(tapped: TappedModel, batch: Batch) -> Tensor:
    """The loss that transformers itself computes from labels."""
    return tapped.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss


def our_loss(tapped: TappedModel, batch: Batch) -> Tensor:
    return tapped.learn(batch, make_sft(causal=tapped.shift).running(None, batch, batch.divisors())).total


@pytest.mark.parametrize("name", [*SCALED, "llama", "phi3", "gpt2", "opt", "qwen3_moe", "bert", "mpnet", "deberta-v2"])
def test_the_loss_after_the_check_is_the_models_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tapped = tapped_model(name)
    batch = make_batch(shift=tapped.shift)
    assert tapped.shortcut == (name not in SCALED), "the config says it already"
    check_losses({"student": tapped}, batch, World.alone())
    said = f"the logits of {name} are more than the product of its LM head"
    assert capsys.readouterr().out.count(said) == (name in SCALED)
    assert tapped.shortcut == (name not in SCALED)
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
        with tapped.modes(shortcut=True, makes_mask=True):
            assert abs((our_loss(tapped, batch) - own).item()) > 1e-4, "the shortcut is no mistake here"


def test_a_softcap_is_seen_while_the_logits_are_small() -> None:
    model = tiny_model("gemma2", scale=0.1)
    loss = own_loss(TappedModel(model, Recorder(model, {})), make_batch())
    assert abs(loss.own - loss.of_product) < 1e-4, "the losses alone would not show it"
    assert not loss.has_plain_head


def test_other_masks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that llmdistill does not know gives another loss, so the model's own masks are taken."""
    monkeypatch.setattr("llmdistill.models.forward._sequences", lambda *_: None)
    tapped = tapped_model("mistral")
    batch = make_batch()
    loss = own_loss(tapped, batch)
    assert loss.has_plain_head
    assert not loss.is_ours
    check_losses({"student": tapped}, batch, World.alone())
    assert not tapped.shortcut
    assert tapped.makes_mask
    torch.testing.assert_close(our_loss(tapped, batch), stock_loss(tapped, batch), atol=2e-5, rtol=1e-5)


def test_packed_rows_need_our_masks() -> None:
    tapped = tapped_model("phi3")
    ids = torch.arange(5, 17)[None]
    mask = (torch.arange(12) // 6 + 1)[None]
    batch = Batch(ids, mask, ids, position_ids=(torch.arange(12) % 6)[None]).with_label_rows(shift=True)
    with pytest.raises(UserError, match=r"data\.packing to false"):
        check_losses({"student": tapped}, batch, World.alone())
