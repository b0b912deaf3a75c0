"""Rows that hold several sequences, against each sequence alone, in both ways that their attention is computed."""

import pytest
import torch
from tiny import tiny_model
from torch import nn
from torch.nn import functional

from llmdistill.batch import IGNORE_INDEX, Batch, Sequences
from llmdistill.methods.sft import make_sft
from llmdistill.models.families import FAMILIES, layers_of
from llmdistill.step import packed
from llmdistill.step.forward import TappedModel
from llmdistill.step.packed import packed_attention
from llmdistill.step.taps import Recorder

from support import shapes_of_results

CHANGES = {
    "qwen2": {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
    "smollm3": {"no_rope_layer_interval": 2},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
"""Some layers with windows or positions, and no dropout."""
NAMES = [name for name, family in FAMILIES.items() if family.causal and not family.makes_mask]
SEGMENTS = torch.tensor([[1] * 5 + [2] * 4 + [3] * 4, [1] * 2 + [2] * 8 + [0] * 3])


def attend(query, key, value, scale, seen):
    """One sequence, (n, heads, D): each token sees so many tokens before and after it; -1 is all of them."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
    before, after = (len(query) if each == -1 else each for each in seen)
    hidden = (distance > before) | (distance < -after)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def kernel(query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
    """What torch documents of varlen_attn, whose kernel no CPU has."""
    assert starts_q.dtype == torch.int32
    assert torch.equal(starts_q, starts_k)
    assert longest_q == longest_k == int(starts_q.diff().max())
    assert enable_gqa or query.shape[1] == key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    parts = zip(*(each.split(starts_q.diff().tolist()) for each in (query, key, value)), strict=True)
    return torch.cat([attend(*part, scale, window_size) for part in parts])


WAYS = ("by sequence", "in one call")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "in one call":
        monkeypatch.setattr(packed, "has_kernel", lambda _: True)
        monkeypatch.setattr(packed, "varlen_attn", kernel)


def make(name):
    return tiny_model(name, scale=5.0, **CHANGES.get(name, {})).double().train()


def make_batch():
    ids = torch.randint(3, 40, SEGMENTS.shape, generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill((SEGMENTS == 0) | (SEGMENTS.roll(1, 1) != SEGMENTS), IGNORE_INDEX)
    positions = torch.cat([torch.arange(length) for length in (5, 4, 4, 2, 8, 3)]).view(ids.shape)
    return Batch(ids, SEGMENTS, labels, position_ids=positions)


def sequences_of(batch):
    """Row, place and tokens (1, n) of each sequence."""
    bounds = [(0, 0, 5), (0, 5, 9), (0, 9, 13), (1, 0, 2), (1, 2, 10)]
    return [(row, slice(first, end), batch.input_ids[row : row + 1, first:end]) for row, first, end in bounds]


def every_aspect(model):
    layers = frozenset(range(len(layers_of(model))))
    return dict.fromkeys(("query", "key", "value", "hidden", "ffn_down"), layers)


@pytest.mark.parametrize(("way", "name", "checkpointing"), [
    *(("in one call", name, False) for name in NAMES),
    *((way, name, True) for way in WAYS for name in ("llama", "mistral")),
], indirect=["way"])  # fmt: skip
@pytest.mark.usefixtures("way")
def test_losses_and_gradients_are_those_of_the_stock_model_on_each_sequence(name, checkpointing):
    model, batch = make(name), make_batch()
    for row, place, ids in sequences_of(batch):
        logits = model(input_ids=ids, use_cache=False).logits[0]
        functional.cross_entropy(logits[:-1], batch.labels[row, place][1:], reduction="sum").backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = batch.with_positions(shift=True)
    tapped = TappedModel(model, Recorder(model, every_aspect(model)))
    tapped.compute_losses(batch, make_sft().bind_terms(None, batch)).total.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    exact = 1e-5 if name == "gemma3_text" else 1e-9  # Gemma's norms compute in fp32, whatever the dtype
    torch.testing.assert_close(found, expected, rtol=exact, atol=exact)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_taps_are_those_of_each_sequence(name):
    model, batch = make(name).eval(), make_batch()
    recorder = Recorder(model, every_aspect(model))
    with torch.no_grad():
        ours = TappedModel(model, recorder)(batch)
        for row, place, ids in sequences_of(batch):
            with recorder.recording():  # the stock model, with the mask that it makes
                logits = model(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(ours.logits[row, place], logits[0], rtol=1e-12, atol=1e-12)
            taps = recorder.pop_taps()
            for aspect, layers in every_aspect(model).items():
                for layer in layers:
                    mine, stock = (getattr(each, aspect)[layer] for each in (ours.taps, taps))
                    torch.testing.assert_close(mine[row, ..., place, :], stock[0], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_padding_on_the_left_changes_no_sequence(name):
    """As the student's own answers have it."""
    model = make(name).eval()
    ids = torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    with torch.no_grad():
        logits = TappedModel(model, Recorder(model, {}))(Batch(ids, mask, ids)).logits
        stock = model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(7)[None], use_cache=False).logits
    torch.testing.assert_close(logits[mask == 1], stock[mask == 1], rtol=1e-12, atol=1e-12)


def test_no_tensor_of_tokens_by_tokens_is_made():
    model, batch = make("mistral"), make_batch().with_positions(shift=True)
    tapped = TappedModel(model, Recorder(model, {"query": frozenset({0})}))

    def has_squares(forward):
        return any(shape[-2:] == (13, 13) for _, shape in shapes_of_results(lambda: forward().sum().backward()))

    assert not has_squares(lambda: tapped.compute_losses(batch, make_sft().bind_terms(None, batch)).total)
    stock = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
    tapped.remove()
    assert has_squares(lambda: model(**stock).logits), "transformers' own mask is not found"


def test_attention_dropout_does_not_go_to_the_kernel_that_has_none(monkeypatch):
    monkeypatch.setattr(packed, "has_kernel", lambda _: True)
    monkeypatch.setattr(packed, "varlen_attn", None)
    given = [torch.randn(2, 4, 13, 8)] * 3
    first, second = (packed_attention(nn.Module(), *given, Sequences.of(SEGMENTS), dropout=0.5)[0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_gives_what_the_calls_by_sequence_give(window):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 13, 64) for heads in (4, 2, 2)]
    exact = [torch.randn(shape, generator=generator).bfloat16().cuda().requires_grad_() for shape in shapes]
    sequences, module = Sequences.of(SEGMENTS).to("cuda"), nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    if not packed.has_kernel(exact[0]):
        pytest.skip("torch or the GPU has no such kernel")
    found = []
    for dtype in (torch.bfloat16, torch.float32):  # the kernel, and one call a sequence
        leaves = [each.detach().to(dtype).requires_grad_() for each in exact]
        output, _ = packed_attention(module, *leaves, sequences, sliding_window=window)
        output.float().square().sum().backward()
        found.append([output.float(), *(leaf.grad.float() for leaf in leaves)])
    for ours, right in zip(*found, strict=True):
        assert (ours - right).norm() < 2e-2 * right.norm()
