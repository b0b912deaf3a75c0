import pytest
import torch
from tiny import SETTINGS, tiny_config, tiny_model

from llmdistill.errors import UserError
from llmdistill.models.families import FAMILIES, family_of, layers_of
from llmdistill.step.taps import Recorder

LAYERS = 3
CONFIGS = {name: tiny_config(name, num_hidden_layers=LAYERS) for name in SETTINGS if name in FAMILIES}
EVERY = frozenset(range(LAYERS))
SCALES = {"granite": 1.0, "opt": 1.0, "gemma3_text": 256**-0.5}
"""Factors on query·key that are not the root of the head width."""
INSIDE = {
    "gemma2": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "mpnet": ("attention.attn", ("q", "k", "v")),
    "deberta-v2": ("attention.self", ("query_proj", "key_proj", "value_proj")),
}
"""The attention and its projections, where the projections are tapped."""
DISTANCES = {"max_relative_positions": 4, "position_buckets": 4, "norm_rel_ebd": "layer_norm"}


def make(name):
    return tiny_model(name, seed=3, num_hidden_layers=LAYERS)


def make_inputs():
    ids = torch.randint(5, 60, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 5:] = mask[1, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def record(model, request, inputs):
    recorder = Recorder(model, request)
    with recorder.recording():
        logits = model(**inputs).logits
    taps = recorder.pop_taps()
    recorder.remove()
    return logits, taps


@pytest.mark.parametrize("name", CONFIGS)
def test_taps_are_what_the_modules_compute(name):
    model = make(name)
    inputs = make_inputs()
    family = family_of(model.config)
    aspects = ["query", "key", "value", "ffn_down", "hidden"]
    aspects += ["ffn_up"] if family.ffn_up is not None else []
    aspects += ["ffn_gate"] if family.ffn_gate is not None else []
    logits, taps = record(model, {**dict.fromkeys(aspects, EVERY), "embedding": frozenset({0})}, inputs)
    heads, groups = 4, getattr(model.config, "num_key_value_heads", 4)
    width = getattr(model.config, "head_dim", None) or 4
    wide = 48 if name in ("modernbert", "phi3") else 24  # with its gate
    for layer in EVERY:
        assert taps.query[layer].shape == (3, heads, 7, width)
        assert taps.key[layer].shape == taps.value[layer].shape == (3, groups, 7, width)
        assert family.ffn_up is None or taps.ffn_up[layer].shape == (3, 7, wide)
        assert taps.ffn_down[layer].shape == taps.hidden[layer].shape == (3, 7, 16)
        assert name in INSIDE or taps.scaling[layer] == pytest.approx(SCALES.get(name, width**-0.5))
    assert set(taps.ffn_gate) == (EVERY if family.ffn_gate else set())
    # The layers' outputs as transformers gives them (the last one only before the final norm).
    whole = model(**inputs, output_hidden_states=True)
    reference = whole.hidden_states
    assert torch.equal(logits, whole.logits)
    assert torch.equal(taps.embedding[0], reference[0])
    for layer in range(LAYERS - 1):
        assert torch.equal(taps.hidden[layer], reference[layer + 1])
    # A layer computed by hand from its taps: the down projection reads the activation of the up (and gate) tap.
    block = layers_of(model)[1]
    if family.ffn_up is None:
        return
    down = block.get_submodule(family.ffn_down)
    if name == "modernbert":
        up, gate = taps.ffn_up[1].chunk(2, dim=-1)
        inner = block.mlp.act(up) * gate
    elif name == "phi3":
        gate, up = taps.ffn_up[1].chunk(2, dim=-1)
        inner = block.mlp.activation_fn(gate) * up
    elif family.ffn_gate is not None:
        inner = block.mlp.act_fn(taps.ffn_gate[1]) * taps.ffn_up[1]
    else:
        places = {"gpt2": "mlp.act", "distilbert": "ffn.activation", "opt": "activation_fn"}
        places |= {"phi": "mlp.activation_fn", "gpt_neox": "mlp.act", "starcoder2": "mlp.act"}
        inner = block.get_submodule(places.get(name, "intermediate.intermediate_act_fn"))(taps.ffn_up[1])
    assert torch.equal(down(inner), taps.ffn_down[1])


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"distilbert", "mistral", "gemma3_text", *INSIDE}))
def test_queries_and_keys_give_the_models_attention(name):
    model, inputs = make(name), {"input_ids": make_inputs()["input_ids"]}
    _, taps = record(model, {"query": EVERY, "key": EVERY}, inputs)
    model.set_attn_implementation("eager")
    attentions = model(**inputs, output_attentions=True).attentions
    for layer in EVERY:
        key = taps.key[layer].repeat_interleave(4 // taps.key[layer].shape[1], dim=1)
        scores = taps.query[layer] @ key.transpose(-1, -2) * taps.scaling[layer]
        if family_of(model.config).causal:
            scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        elif name == "modernbert" and model.config.layer_types[layer] == "sliding_attention":
            distance = (torch.arange(7)[:, None] - torch.arange(7)).abs()
            scores = scores.masked_fill(distance > model.config.sliding_window, -torch.inf)
        torch.testing.assert_close(scores.softmax(-1), attentions[layer], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "changes"), [
    ("gemma2", {}), ("mpnet", {}), *(("deberta-v2", {**DISTANCES, "share_att_key": share}) for share in (False, True)),
])  # fmt: skip
def test_where_attention_does_more_the_projections_are_tapped(name, changes):
    """DeBERTa's distances may go through the same projections; as many of them as tokens here, in a batch of one."""
    model = tiny_model(name, seed=3, **changes)
    ids = torch.randint(5, 60, (1, 8))
    request = dict.fromkeys(("query", "key", "value"), frozenset({0, 1}))
    expected = model(ids, output_hidden_states=True)
    logits, taps = record(model, request, {"input_ids": ids})
    assert torch.equal(logits, expected.logits)
    attention, projections = INSIDE[name]
    for layer, block in enumerate(layers_of(model)):
        given = expected.hidden_states[layer]
        given = block.input_layernorm(given) if name == "gemma2" else given
        for aspect, projection in zip(request, projections, strict=True):
            flat = block.get_submodule(f"{attention}.{projection}")(given)
            heads = flat.unflatten(-1, (-1, 8 if name == "gemma2" else 4)).transpose(1, 2)
            assert torch.equal(getattr(taps, aspect)[layer], heads)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_cannot_be_tapped_is_refused():
    model = make("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    recorder = Recorder(model, {"hidden": frozenset({0})})
    with pytest.raises(UserError, match="use_reentrant"), recorder.recording():
        model(**make_inputs(), use_cache=False)
    with recorder.recording(), torch.no_grad():  # without gradients it is harmless
        model(**make_inputs(), use_cache=False)
    assert set(recorder.pop_taps().hidden) == {0}
    model.set_attn_implementation("eager")
    with pytest.raises(UserError, match="sdpa"):
        Recorder(model, {"query": frozenset({0})})
    encoder = make("bert")
    encoder.config.chunk_size_feed_forward = 2
    with pytest.raises(UserError, match="chunk_size_feed_forward"):
        Recorder(encoder, {"ffn_up": frozenset({0})})


def test_outside_of_a_given_mask_a_model_masks_as_before():
    model = make("llama").train()
    ids, mask = torch.arange(3, 15).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    masked, plain = (model(ids, attention_mask=each, use_cache=False).logits for each in (mask, None))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recorder = Recorder(model, {"query": frozenset({0})})
    with recorder.recording(), recorder.given_mask():
        logits = model(ids, attention_mask=mask, use_cache=False).logits  # a mask of two axes is not looked at
    assert torch.equal(logits, plain)
    logits.sum().backward()
    assert torch.equal(model(ids, attention_mask=mask, use_cache=False).logits, masked)
    recorder.remove()
    assert model.config._attn_implementation == "sdpa"
