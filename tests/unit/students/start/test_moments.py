"""Second moments and predicted losses of cuts, against loops over tokens with transformers' own forward pass."""

import copy
import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny import shaken, tiny_config, tiny_model
from transformers import BertForQuestionAnswering, BertForSequenceClassification, BertModel

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.models.families import base_name, layers_name
from llmdistill.step.forward import TappedModel
from llmdistill.students.convert import compress_model
from llmdistill.students.counting import layer_linears
from llmdistill.students.install import matrix, tied_heads, token_embedding
from llmdistill.students.merge import merge
from llmdistill.students.start import sampled as module
from llmdistill.students.start.cuts import cut, divergences, predict_losses
from llmdistill.students.start.moments import measure_moments
from llmdistill.students.start.sampled import Sampling, watch_reads
from llmdistill.students.start.table_moments import measure_table
from llmdistill.students.start.weigh import weigh
from llmdistill.students.start.weighted import weighted_svd

from support import in_memory

SIZES = {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 20, "initializer_range": 0.5}
llama = partial(tiny_model, "llama", **SIZES)
bert = partial(tiny_model, "bert", **SIZES)
gpt2 = partial(tiny_model, "gpt2", n_embd=8, n_inner=32, vocab_size=20, initializer_range=0.5)


def make_batch(lengths=(5, 3, 6), *, first_id=0, seed=0):
    """Padded on the right."""
    ids = torch.randint(1, 20, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = torch.tensor([[1] * n + [0] * (max(lengths) - n) for n in lengths])
    names = tuple((first_id + row,) for row in range(len(lengths)))
    return Batch(input_ids=ids * mask, attention_mask=mask, labels=torch.full_like(ids, -100), sample_ids=names)


def naive(model, name, batch, loss):
    """C and G of one module, from rows without padding, for a loss of the batch, the row and its outputs."""
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
        loss(batch, row, outputs).backward()
        ((inputs, output),) = seen
        x, gradient = inputs[0].detach().double().reshape(length, -1), output.grad[0].double()
        c, g = c + x.T @ x, g + gradient.T @ gradient
    handle.remove()
    return c, g


def surprise(logits, chance):
    """Of the first class up to which the probabilities make up the chance."""
    log = logits.log_softmax(-1)
    drawn = int((log.detach().double().exp().cumsum(0) < chance).sum())
    return -log[min(drawn, len(log) - 1)]


def of_tokens(batch, row, outputs):
    return sum(map(surprise, outputs.logits[0], module.draw_uniform(batch, 1, 3)[row]))


@pytest.mark.parametrize("make", [llama, bert, gpt2])
def test_moments_are_those_of_a_loop_over_tokens(make, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_BYTES", 3 * 4 * 20)  # three rows of logits
    model, batch = make(), make_batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = list(layer_linears(model))
    found = measure_moments(model, names, [batch], Sampling(seed=3))
    assert set(found) == set(names)
    assert not any(each._forward_hooks for each in model.modules())
    for name in names:
        c, g = naive(model, name, batch, of_tokens)
        torch.testing.assert_close(found[name].inputs.double(), c, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[name].gradients.double(), g, rtol=1e-4, atol=1e-5 * float(g.abs().max()))
        assert found[name].tokens == 14
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("make", "counts"), [(llama, [3, 1, 2, 1]), (bert, [3, 1, 1, 1]), (gpt2, [1, 1, 1, 1])])
def test_what_is_shared_is_seen_in_one_forward_pass(make, counts):
    """So that passes can be planned; GPT-2's queries, keys and values are one matrix, and BERT has no gate."""
    model = make().train()
    names = list(layer_linears(model))
    groups = watch_reads(model, names, [make_batch()]).groups
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert [len(group) for group in groups] == counts * 2
    assert not any(each._forward_hooks for each in model.modules())
    assert model.training
    found = measure_moments(model, names, [make_batch()])
    assert all(found[name].inputs is found[group[0]].inputs for group in groups for name in group)


def test_moments_of_a_bf16_model_are_summed_in_fp32():
    """Of the gradients only the type is compared: rounding changes some of the sampled labels."""
    model, batches = llama(), [make_batch((40,) * 10, first_id=10 * number) for number in range(10)]
    names = list(layer_linears(model))
    whole = measure_moments(model, names, batches, Sampling(gradients=False))
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
    costs = predict_losses(model, factors, [make_batch()])
    calls = []
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
        torch.testing.assert_close(predict_losses(model, factors, [make_batch()]), costs, rtol=0, atol=0)
        assert not any("forward" in vars(layer) for layer in model.modules())


def of_class(batch, row, outputs):
    return surprise(outputs.logits[0], module.draw_uniform(batch, 1, 0)[row][0])


def of_span(batch, row, outputs):
    return sum(map(surprise, (outputs.start_logits[0], outputs.end_logits[0]), module.draw_uniform(batch, 1, 0)[row]))


def of_hidden_states(batch, row, outputs):
    hidden = outputs.last_hidden_state[0]
    return (hidden * module.draw_uniform(batch, 8, 0)[row][: len(hidden)].lt(0.5).float().mul(-2).add(1)).sum()


@pytest.mark.parametrize(("kind", "name", "loss"), [
    (BertForSequenceClassification, "bert.encoder.layer.1.output.dense", of_class),
    (BertForQuestionAnswering, "bert.encoder.layer.1.output.dense", of_span),
    (BertModel, "encoder.layer.0.attention.self.query", of_hidden_states),
])  # fmt: skip
def test_other_heads_are_sampled_as_their_output_is(kind, name, loss):
    """A class once a sequence, start and end of a span, signs on the last hidden states of a model without a head."""
    model, batch = kind(tiny_config("bert", **SIZES, num_labels=2 if loss is of_span else 3)).eval(), make_batch()
    found = measure_moments(model, [name], [batch])[name]
    _, g = naive(model, name, batch, loss)
    torch.testing.assert_close(found.gradients.double(), g, rtol=1e-4, atol=1e-6 * float(g.abs().max()))


def test_the_seed_draws_other_labels_and_no_moment_outlives_what_is_returned():
    name = "model.layers.0.mlp.up_proj"
    one, same, other = (
        measure_moments(llama(), [name], [make_batch()], Sampling(seed=seed))[name] for seed in (0, 0, 1)
    )
    assert torch.equal(one.gradients, same.gradients)
    assert not torch.allclose(one.gradients, other.gradients, rtol=1e-2)
    kept = weakref.ref(one.gradients)
    del one
    gc.collect()
    assert kept() is None


def test_data_without_tokens_and_numbers_that_are_not_finite_are_refused():
    model = llama()
    for measure in (partial(measure_moments, names=list(layer_linears(model))), measure_table):
        with pytest.raises(UserError, match="the calibration data hold no token"):
            measure(model, batches=[])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(UserError, match=r"the inputs or gradients of model\.layers\.\d\.\S+ are not finite"):
        measure_moments(model, list(layer_linears(model)), [make_batch()])


@pytest.mark.parametrize(
    ("model", "factor"),
    [
        (llama(tie_word_embeddings=True), 1),
        (llama(), 1),
        (bert(), 1),
        (tiny_model("gemma3_text", vocab_size=20, tie_word_embeddings=True), 4),
    ],
    ids=["tied", "", "bert", "gemma"],
)
def test_moments_of_embeddings_are_those_of_a_loop_over_tokens(model, factor):
    batch = make_batch()
    found, without = (
        measure_table(model, [batch], Sampling(seed=3)),
        measure_table(model, [batch], Sampling(gradients=False)),
    )
    counts = batch.input_ids[batch.attention_mask.bool()].bincount(minlength=20).float()
    assert found.tokens == 14
    assert torch.equal(found.counts, counts)
    assert torch.equal(without.counts, counts)
    assert without.gradients is without.head_outputs is None
    assert not any(each._forward_hooks for each in model.modules())
    name, _ = token_embedding(model)
    _, g = naive(model, name, batch, of_tokens)
    g *= factor**2  # of the table's rows, by which Gemma multiplies its outputs
    torch.testing.assert_close(found.gradients.double(), g, rtol=1e-3, atol=1e-4 * float(g.abs().max()))
    heads = tied_heads(model, name)
    if not heads:
        assert found.head_inputs is found.head_outputs is None
        return
    inputs, _ = naive(model, heads[0], batch, of_tokens)
    torch.testing.assert_close(found.head_inputs.double(), inputs, rtol=1e-4, atol=1e-4)
    p = torch.cat([model(ids).logits[0].softmax(-1) for ids in rows_of([batch])])
    torch.testing.assert_close(found.head_outputs, (p * (1 - p)).sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [llama(tie_word_embeddings=True), llama()], ids=["tied", ""])
def test_embedding_and_linears_are_measured_in_the_same_passes(model):
    names, batches, together = list(layer_linears(model)), [make_batch(), make_batch(seed=5)], []
    found = measure_moments(model, names, batches, Sampling(seed=3), keep_table=together.append)
    (table,) = together
    torch.testing.assert_close(vars(table), vars(measure_table(model, batches, Sampling(seed=3))))
    alone = measure_moments(model, names, batches, Sampling(seed=3))
    torch.testing.assert_close([vars(each) for each in found.values()], [vars(each) for each in alone.values()])


# Cuts tried on the loaded model, against the students themselves and transformers' own forward pass.

LENGTHS = (7, 4, 6, 7)
CALIBRATION = [make_batch(LENGTHS, seed=1), make_batch(LENGTHS, seed=2)]
TRIED = [make_batch(LENGTHS), make_batch((5, 2), seed=3)]
SETTINGS = {"vocab_size": 20, "initializer_range": 0.3}
MODELS = {
    **{name: partial(tiny_model, name, **SETTINGS) for name in ("llama", "gpt2")},
    **{f"{n} classes": partial(tiny_model, "bert", head="sequence", num_labels=n, **SETTINGS) for n in (1, 3)},
    "bert": lambda: BertModel(tiny_config("bert", **SETTINGS)),
}


def prepared(kind):
    """A model with biases that are not zero, its weighted factorization, and the student made with it."""
    model, settings = shaken(MODELS[kind]()).eval(), FactorizeConfig(rank=3, weighting="gradients")
    weighted = weigh(in_memory(model, CALIBRATION), settings)
    return model, weighted, compress_model(model, settings, weighted=weighted).eval()


def rows_of(batches):
    """The ids of each row (1, T), without its padding."""
    pairs = [pair for batch in batches for pair in zip(batch.input_ids, batch.attention_mask, strict=True)]
    return [ids[None, : int(mask.sum())] for ids, mask in pairs]


@torch.no_grad()
def naive_divergence(student, model, batches):
    """Divergence row by row."""
    total, count = 0.0, 0
    for ids in rows_of(batches):
        found = [each(input_ids=ids) for each in (model, student)]
        is_hidden = "last_hidden_state" in found[0]
        t, s = ((each.last_hidden_state if is_hidden else each.logits).flatten(0, -2).double() for each in found)
        count += len(t)
        if is_hidden or t.shape[1] == 1:
            total += float((t - s).square().sum() / 2)
        else:
            p = t.softmax(-1)
            total += float((p * (p.log() - s.log_softmax(-1))).sum())
    return total / count


@pytest.mark.parametrize("kind", MODELS)
def test_a_cut_model_is_the_student(kind):
    model, weighted, student = prepared(kind)
    before = copy.deepcopy(model.state_dict())
    given = {"input_ids": TRIED[0].input_ids, "attention_mask": TRIED[0].attention_mask}
    with torch.no_grad():
        whole = model(**given)[0]
        with cut(model, weighted):
            inside = model(**given)[0]
        torch.testing.assert_close(inside, student(**given)[0], rtol=1e-3, atol=1e-4)
        assert not torch.allclose(inside, whole, rtol=1e-2, atol=1e-2)
        assert torch.equal(model(**given)[0], whole)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    found = divergences(model, {"this": weighted, "none": weighted.with_ranks({})}, TRIED)
    assert found["this"] == pytest.approx(naive_divergence(student, model, TRIED), rel=1e-3)
    assert found["none"] == pytest.approx(0, abs=1e-6)
    assert not any(each._forward_hooks for each in model.modules())


EMBEDDINGS = {
    "tied": lambda: llama(tie_word_embeddings=True),
    "untied": llama,
    "gemma": partial(tiny_model, "gemma3_text", tie_word_embeddings=True, **SETTINGS),
    "gpt2": MODELS["gpt2"],
    "bert": MODELS["bert"],
    "3 classes": MODELS["3 classes"],
}


@pytest.mark.parametrize("shortcut", [True, False], ids=["", "logits"])
@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_a_cut_embedding_is_that_of_the_student(kind, shortcut, monkeypatch):
    model, settings = shaken(EMBEDDINGS[kind]()).eval(), FactorizeConfig(embedding_rank=5, weighting="gradients")
    weighted = weigh(in_memory(model, CALIBRATION), settings)
    student = compress_model(model, settings, weighted=weighted).eval()
    if not shortcut:  # as of an architecture whose logits may not be the output of its head
        monkeypatch.setattr(TappedModel, "shortcut", property(lambda _: False, lambda *_: None), raising=False)
    found = divergences(model, {"this": weighted, "none": replace(weighted, others={})}, TRIED)
    assert found["this"] == pytest.approx(naive_divergence(student, model, TRIED), rel=1e-3)
    assert found["this"] > 1e-3
    assert found["none"] == pytest.approx(0, abs=1e-6)


def naive_costs(student, model, batches):
    """Each cut alone in fp64: half the squared change of a score, or the Fisher norm of the change of logits."""
    exact, dense = (copy.deepcopy(each).double() for each in (student, model))
    merge(exact)
    dense.set_attn_implementation("eager")  # sdpa has no forward-mode derivative
    weights, changed = dict(dense.named_parameters()), dict(exact.named_parameters())
    costs = {}
    for name in layer_linears(dense):
        key = f"{name}.weight"
        zero = {each: torch.zeros_like(value) for each, value in weights.items()}
        total = 0.0
        for ids in rows_of(batches):

            def logits(values, ids=ids):
                return torch.func.functional_call(dense, values, (ids,)).logits

            direction = {**zero, key: changed[key] - weights[key]}
            found, change = torch.func.jvp(logits, (weights,), (direction,))
            if found.shape[-1] == 1:
                total += float(change.detach().square().sum() / 2)
            else:
                p, change = found.detach().softmax(-1), change.detach()
                total += float(((p * change.square()).sum(-1) - (p * change).sum(-1).square()).sum() / 2)
        costs[base_name(dense, name)] = total / sum(ids.shape[1] for ids in rows_of(batches))
    return costs


def whole_factors(model):
    """All factors of each matrix, whose leading three are those of `prepared`."""
    shapes = {f"*{base_name(model, name)}": min(shape) for name, shape in layer_linears(model).items()}
    return weigh(in_memory(model, CALIBRATION), FactorizeConfig(ranks=shapes, weighting="gradients")).factors


def at_rank(costs, rank):
    return {name: float(each[rank]) for name, each in costs.items()}


def test_the_predicted_losses_are_those_of_each_cut_alone():
    model, _, student = prepared("1 classes")
    factors = whole_factors(model)
    found = predict_losses(model, factors, TRIED)
    expected = naive_costs(student, model, TRIED)
    assert at_rank(found, 3) == {name: pytest.approx(cost, rel=1e-3, abs=1e-9) for name, cost in expected.items()}
    assert set(at_rank(found, -1).values()) == {0.0}, "the full rank loses nothing"
    # Two ranks sum their shares; here the other rank has the same data twice as often.
    again = predict_losses(model, factors, TRIED, reduce=lambda sums: sums.mul_(3))
    assert at_rank(again, 3) == pytest.approx(at_rank(found, 3))
    assert not any(each._forward_hooks for each in model.modules())


def test_the_predicted_losses_average_over_sampled_labels():
    model, _, student = prepared("llama")
    factors = whole_factors(model)
    batch, count = make_batch(LENGTHS), 100
    ids, mask, labels = (each.repeat(count, 1) for each in (batch.input_ids, batch.attention_mask, batch.labels))
    often = Batch(ids, mask, labels, sample_ids=tuple((row,) for row in range(len(ids))))  # each has labels of its own
    found = at_rank(predict_losses(model, factors, [often]), 3)
    for name, expected in naive_costs(student, model, [batch]).items():
        assert found[name] == pytest.approx(expected, rel=0.3), name


def test_corrected_factors_cost_what_was_measured():
    _, weighted, _ = prepared("llama")
    name = next(iter(weighted.ranks))
    corrected = weighted.with_losses({each: 0.5 for each in weighted.ranks})
    assert corrected.factors[name].costs()[3] == pytest.approx(0.5)
    assert corrected.predicted_loss == pytest.approx(0.5 * len(weighted.ranks))
    before, after = (each.factors[name].costs() for each in (weighted, corrected))
    assert after[1] / after[3] == pytest.approx(before[1] / before[3])
