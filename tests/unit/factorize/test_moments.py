"""Second moments of inputs and gradients, against loops over tokens with transformers' own forward pass."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from tiny import tiny_config, tiny_model
from transformers import BertForQuestionAnswering, BertForSequenceClassification, BertModel

from llmdistill.batch import Batch
from llmdistill.errors import UserError
from llmdistill.factorize import sampled as module
from llmdistill.factorize.counting import layer_linears
from llmdistill.factorize.cuts import cut_costs
from llmdistill.factorize.install import matrix, tied_heads, token_embedding
from llmdistill.factorize.moments import measure_moments, shared_inputs
from llmdistill.factorize.table_moments import measure_table
from llmdistill.factorize.weighted import weighted_svd
from llmdistill.models.families import base_name, layers_name

SIZES = {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 20, "initializer_range": 0.5}
llama = partial(tiny_model, "llama", **SIZES)
bert = partial(tiny_model, "bert", **SIZES)
gpt2 = partial(tiny_model, "gpt2", n_embd=8, n_inner=32, vocab_size=20, initializer_range=0.5)


def bert_of(kind, **more):
    torch.manual_seed(0)
    return kind(tiny_config("bert", **SIZES, **more)).eval()


def make_batch(lengths=(5, 3, 6), *, first_id=0) -> Batch:
    """Padded on the right; every token differs between the rows."""
    width = max(lengths)
    ids = torch.arange(len(lengths) * width).reshape(len(lengths), width) * 7 % 19 + 1
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    names = tuple((first_id + row,) for row in range(len(lengths)))
    return Batch(input_ids=ids * mask, attention_mask=mask, labels=torch.full_like(ids, -100), sample_ids=names)


def naive(model, name: str, batch: Batch, loss) -> tuple[torch.Tensor, torch.Tensor]:
    """C and G of one linear, row by row and token by token; `loss(row, outputs)` is what is differentiated."""
    linear, seen = model.get_submodule(name), []

    def hook(_, inputs, output):
        output.retain_grad()
        seen.append((inputs[0], output))

    handle = linear.register_forward_hook(hook)
    c = g = 0
    for row in range(len(batch.input_ids)):
        length = int(batch.attention_mask[row].sum())
        seen.clear()
        outputs = model(input_ids=batch.input_ids[row : row + 1, :length], output_hidden_states=True)
        loss(row, outputs).backward()
        ((inputs, output),) = seen
        for token in range(length):
            x, gradient = inputs[0, token].detach().double(), output.grad[0, token].double()
            c, g = c + torch.outer(x, x), g + torch.outer(gradient, gradient)
    handle.remove()
    return c, g


def sample(probabilities: torch.Tensor, chance: float) -> int:
    total = 0.0
    for index, value in enumerate(probabilities.tolist()):
        total += value
        if total >= chance:
            return index
    return len(probabilities) - 1


def chances(batch: Batch, row: int, width: int, seed: int) -> torch.Tensor:
    return module._uniform(batch, width, seed)[row]


@pytest.mark.parametrize("make", [llama, bert, gpt2])
def test_moments_are_those_of_a_loop_over_tokens(make, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 3 * 4 * 20)  # three rows of logits
    model, batch = make(), make_batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def loss(row, outputs):
        logs = outputs.logits[0].log_softmax(-1)
        drawn = chances(batch, row, 1, 3)
        return -sum(log[sample(log.exp().detach(), float(drawn[t, 0]))] for t, log in enumerate(logs))

    names = list(layer_linears(model))
    found = measure_moments(model, names, [batch], seed=3)
    assert set(found) == set(names)
    assert not any(each._forward_hooks for each in model.modules())
    for name in names:
        c, g = naive(model, name, batch, loss)
        torch.testing.assert_close(found[name].inputs.double(), c, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[name].gradients.double(), g, rtol=1e-4, atol=1e-5 * float(g.abs().max()))
        assert found[name].tokens == 14
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_is_shared_is_seen_in_one_forward_pass():
    """So that passes can be planned; GPT-2's queries, keys and values are one matrix, and BERT has no gate."""
    counts = {}
    for make in (llama, bert, gpt2):
        model = make().train()
        groups = shared_inputs(model, list(layer_linears(model)), make_batch())
        assert sorted(name for group in groups for name in group) == sorted(layer_linears(model))
        assert not any(each._forward_hooks for each in model.modules())
        assert model.training
        counts[make] = [len(group) for group in groups]
        found = measure_moments(model, list(layer_linears(model)), [make_batch()])
        assert all(found[name].inputs is found[group[0]].inputs for group in groups for name in group)
    assert counts == {llama: [3, 1, 2, 1] * 2, bert: [3, 1, 1, 1] * 2, gpt2: [1, 1, 1, 1] * 2}


def test_moments_of_a_bf16_model_are_summed_in_fp32():
    """Of the gradients only the type is compared: rounding changes some of the sampled labels."""
    model, batches = llama(), [make_batch((40,) * 10, first_id=10 * number) for number in range(10)]
    names = list(layer_linears(model))
    whole = measure_moments(model, names, batches, gradients=False)
    rounded = measure_moments(model.bfloat16(), names, batches)
    for name in names:
        assert rounded[name].inputs.dtype == rounded[name].gradients.dtype == torch.float32
        one, other = whole[name].inputs, rounded[name].inputs
        assert float((one - other).norm() / one.norm()) < 0.02, name


def test_the_backward_pass_ends_at_the_first_linear_that_is_measured():
    model, seen = llama(), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, output: seen.append(output.requires_grad))
    whole = measure_moments(model, list(layer_linears(model)), [make_batch()])
    assert seen == [True, True]
    upper = [name for name in layer_linears(model) if ".1." in name]
    found = measure_moments(model, upper, [make_batch()])
    assert seen[2:] == [False, True]
    assert all(torch.equal(found[name].gradients, whole[name].gradients) for name in upper)


@pytest.mark.parametrize("make", [llama, bert, gpt2])
def test_layers_that_are_computed_again_give_the_same(make, monkeypatch):
    model, names = make(), list(layer_linears(make()))
    whole = measure_moments(model, names, [make_batch()])
    factors = {}
    for name in names:
        weight = matrix(model.get_submodule(name)).detach()
        factors[base_name(model, name)] = weighted_svd(weight, whole[name], min(weight.shape))
    costs = cut_costs(model, factors, [make_batch()])
    calls: list[int] = []
    for layer in model.base_model.get_submodule(layers_name(model)):
        layer.register_forward_pre_hook(lambda layer, _: calls.append(id(layer)))
        next(iter(layer.children())).register_forward_pre_hook(lambda child, _: calls.append(id(child)))
    for tokens, again in ((9, 1), (1, 2)):  # of 18 tokens, so the first layer, or both
        monkeypatch.setattr(module, "graph_tokens", lambda _, tokens=tokens: tokens)
        calls.clear()
        found = measure_moments(model, names, [make_batch()])
        assert len(calls) == 4 + again
        for name in names:
            assert torch.equal(found[name].inputs, whole[name].inputs)
            assert torch.equal(found[name].gradients, whole[name].gradients)
        torch.testing.assert_close(cut_costs(model, factors, [make_batch()]), costs, rtol=0, atol=0)
        assert not any("forward" in vars(layer) for layer in model.modules())


def of_class(batch, row, outputs):
    log = outputs.logits[0].log_softmax(-1)
    return -log[sample(log.exp().detach(), float(chances(batch, row, 1, 0)[0, 0]))]


def of_span(batch, row, outputs):
    total = 0.0
    for place, logits in enumerate((outputs.start_logits[0], outputs.end_logits[0])):
        real = len(logits) if batch.attention_mask[row].all() else int(batch.attention_mask[row].sum())
        log = logits[:real].log_softmax(-1)
        total = total - log[sample(log.exp().detach(), float(chances(batch, row, 1, 0)[place, 0]))]
    return total


def of_hidden_states(batch, row, outputs):
    hidden = outputs.last_hidden_state[0]
    return (hidden * chances(batch, row, 8, 0)[: len(hidden)].lt(0.5).float().mul(-2).add(1)).sum()


@pytest.mark.parametrize(("kind", "name", "loss"), [
    (BertForSequenceClassification, "bert.encoder.layer.1.output.dense", of_class),
    (BertForQuestionAnswering, "bert.encoder.layer.1.output.dense", of_span),
    (BertModel, "encoder.layer.0.attention.self.query", of_hidden_states),
])  # fmt: skip
def test_other_heads_are_sampled_as_their_output_is(kind, name, loss):
    """A class once a sequence, start and end of a span, signs on the last hidden states of a model without a head."""
    model, batch = bert_of(kind, num_labels=2 if kind is BertForQuestionAnswering else 3), make_batch()
    found = measure_moments(model, [name], [batch])[name]
    _, g = naive(model, name, batch, partial(loss, batch))
    torch.testing.assert_close(found.gradients.double(), g, rtol=1e-4, atol=1e-6 * float(g.abs().max()))


def test_the_seed_draws_other_labels():
    name = "model.layers.0.mlp.up_proj"
    one, same, other = (measure_moments(llama(), [name], [make_batch()], seed=seed)[name] for seed in (0, 0, 1))
    assert torch.equal(one.gradients, same.gradients)
    assert not torch.allclose(one.gradients, other.gradients, rtol=1e-2)


def test_no_moment_outlives_what_is_returned():
    found = measure_moments(llama(), list(layer_linears(llama())), [make_batch()])
    kept = weakref.ref(found.popitem()[1].gradients)
    found.clear()
    gc.collect()
    assert kept() is None


def test_data_without_tokens_and_numbers_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match="the calibration data hold no token"):
        measure_moments(llama(), list(layer_linears(llama())), [])
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(UserError, match=r"the inputs or gradients of model\.layers\.\d\.\S+ are not finite"):
        measure_moments(model, list(layer_linears(model)), [make_batch()])


@pytest.mark.parametrize("model", [llama(tie_word_embeddings=True), llama(), bert()], ids=["tied", "", "bert"])
def test_moments_of_embeddings_are_those_of_a_loop_over_tokens(model) -> None:
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
        of_heads = [model.get_submodule(head) for head in heads]
        hooks = [head.register_forward_hook(lambda _, x, __, r=read: r.append(x[0])) for head in of_heads]
        log = model(input_ids=ids).logits[0].log_softmax(-1)
        drawn = chances(batch, row, 1, 3)
        (-sum(token[sample(token.detach().exp(), float(drawn[t, 0]))] for t, token in enumerate(log))).backward()
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
    model, batch = bert_of(BertModel), make_batch()
    once = measure_table(model, [batch], seed=3)
    again = measure_table(model, [batch], seed=3, rounds=3)
    assert once.head_inputs is None
    assert float(once.gradients.trace()) > 0
    assert again.tokens == once.tokens == 14
    assert torch.equal(once.gradients, again.gradients)
    with pytest.raises(UserError, match="hold no token"):
        measure_table(model, [])
