"""Moments of token embeddings, against loops over tokens with transformers' own forward pass."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaConfig, LlamaForCausalLM

from llmdistill.batch import Batch
from llmdistill.errors import UserError
from llmdistill.factorize import sampled as module
from llmdistill.factorize.install import tied_heads, token_embedding
from llmdistill.factorize.table_moments import measure_table

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 20}


def llama(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=1, initializer_range=0.5, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).eval()


def bert(kind: type) -> BertForMaskedLM:
    torch.manual_seed(0)
    return kind(BertConfig(**SIZES, initializer_range=0.5)).eval()


def make_batch() -> Batch:
    ids = torch.arange(18).reshape(3, 6) * 7 % 19 + 1
    mask = torch.tensor([[1] * n + [0] * (6 - n) for n in (5, 3, 6)])
    return Batch(input_ids=ids * mask, attention_mask=mask, labels=ids, sample_ids=((0,), (1,), (2,)))


@pytest.mark.parametrize(
    "model", [llama(tied=True), llama(tied=False), bert(BertForMaskedLM)], ids=["tied", "", "bert"]
)
def test_moments_are_those_of_a_loop_over_tokens(model) -> None:
    batch = make_batch()
    name, table = token_embedding(model)
    heads = tied_heads(model, name)
    counts, gradients = torch.zeros(20), torch.zeros(8, 8)
    inputs, outputs = torch.zeros(8, 8), torch.zeros(20)
    seen: list[torch.Tensor] = []

    def keep(_, given, output) -> None:
        output.retain_grad()
        seen.append(output)

    handle = table.register_forward_hook(keep)
    for row in range(3):
        seen.clear()
        ids = batch.input_ids[row : row + 1, : int(batch.attention_mask[row].sum())]
        read: list[torch.Tensor] = []
        hooks = [
            model.get_submodule(head).register_forward_hook(lambda _, x, __, r=read: r.append(x[0])) for head in heads
        ]
        logits = model(input_ids=ids).logits[0]
        log = logits.log_softmax(-1)
        drawn = module._uniform(batch, 1, 3)[row]
        loss = torch.zeros(())
        for token, chance in zip(log, drawn, strict=False):
            loss = loss - token[int(torch.searchsorted(token.detach().exp().cumsum(0), chance))]
        loss.backward()
        for place, number in enumerate(ids[0].tolist()):
            counts[number] += 1
            g = seen[0].grad[0, place]
            gradients += torch.outer(g, g)
            p = log[place].detach().exp()
            outputs += p * (1 - p)
            for h in read:
                inputs += torch.outer(h[0, place].detach(), h[0, place].detach())
        for hook in hooks:
            hook.remove()
    handle.remove()

    found = measure_table(model, [batch], seed=3)
    assert found.tokens == 14
    assert torch.equal(found.counts, counts)
    torch.testing.assert_close(found.gradients, gradients, rtol=1e-3, atol=1e-4 * float(gradients.abs().max()))
    if heads:
        torch.testing.assert_close(found.head_inputs, inputs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.head_outputs, outputs, rtol=1e-4, atol=1e-5)
    else:
        assert found.head_inputs is found.head_outputs is None
    assert not any(each._forward_hooks for each in model.modules())
    without = measure_table(model, [batch], gradients=False)
    assert without.gradients is without.head_outputs is None
    assert torch.equal(without.counts, counts)


def test_a_model_without_a_head_and_a_batch_that_does_not_count() -> None:
    """A rank of a sharded model repeats its batches for others; these count nothing."""
    model, batch = bert(BertModel), make_batch()
    once = measure_table(model, [batch], seed=3)
    again = measure_table(model, [batch], seed=3, rounds=3)
    assert once.head_inputs is None
    assert once.gradients is not None
    assert float(once.gradients.trace()) > 0
    assert again.tokens == once.tokens == 14
    assert torch.equal(once.gradients, again.gradients)
    with pytest.raises(UserError, match="hold no token"):
        measure_table(model, [])
