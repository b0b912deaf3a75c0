"""What is traced of layers without an entry in FAMILIES, against the entries, and taps against plain hooks."""

import os

import pytest
import torch
from shrunk import AS_DECODER, VOCABULARY, model_types, of_text_alone, shrunk_config, shrunk_model
from torch.nn import functional

from llmdistill.errors import UserError
from llmdistill.models.families import FAMILIES, family_of, has_family, is_causal, shape_of
from llmdistill.models.traced import trace_layers
from llmdistill.step.taps import Recorder

IDS = torch.randint(5, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 9:] = 0
QUICK = [
    "arcee",  # no gate
    "glm",  # gate and up are one linear
    "cohere2",  # windows
    "deepseek_v2",  # values have another width than queries, and only some layers have experts
    "gpt_bigcode",  # one head of keys and values
    "ernie",
    "ultrabert",  # an encoder with windows
    f"bert{AS_DECODER}",
    f"bart{AS_DECODER}",
]
REFUSED = {
    "bloom": "sdpa",
    "dbrx": "values of tensors",
    "deepseek_v32": "name of the attention function",
    "diffllama": "once",
    "falcon": "once",
    "falcon_h1": "feed-forward",
    "gemma3n_text": "hidden states of the tokens",
    "gemma4_text": "differ in their heads",
    "jamba": "once",
    "mamba2": "sdpa",
    "mobilebert": "feed-forward",
}


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.projections is None])
def test_tracing_agrees_with_the_entries(name: str) -> None:
    config = shrunk_config(name)
    family, shape, found = family_of(config), shape_of(config), trace_layers(config)
    for part in ("layers", "attention", "ffn_up", "ffn_gate", "ffn_down", "scores_are_products"):
        assert getattr(family, part) == getattr(found, part), part
    for size in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "value_dim"):
        assert getattr(shape, size) == getattr(found, size), size
    if family.causal:
        assert shape.windows == found.windows


@pytest.mark.parametrize("name", QUICK)
def test_taps_are_what_stock_attention_and_plain_hooks_see(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_taps(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("LLMDISTILL_SWEEP") != "all", reason="LLMDISTILL_SWEEP is not all")
@pytest.mark.parametrize("name", [name for name in model_types() if name not in QUICK])
def test_taps_of_all_types(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        config = shrunk_config(name)
        family_of(config)
    except Exception:
        pytest.skip("it is refused, or transformers does not build it small")
    if has_family(config) or not of_text_alone(name):
        pytest.skip("it has an entry, or is not of text alone")
    check_taps(name, monkeypatch)


@torch.no_grad()
def check_taps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps are equal, bit by bit, to what torch's attention was called with and to the modules' outputs.

    They are compared with copies, so that a tap shows if its tensor is changed in place later.
    """
    model = shrunk_model(name)
    family, shape, causal = family_of(model.config), shape_of(model.config), is_causal(model.config)
    plain, calls = functional.scaled_dot_product_attention, []

    def watched(query, key, value, attn_mask=None, is_causal=False, scale=None, **settings):
        calls.append((query.clone(), key.clone(), value.clone(), attn_mask, is_causal, scale))
        return plain(query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, **settings)

    inputs = {"input_ids": IDS, "attention_mask": MASK} | ({"use_cache": False} if causal else {})
    outputs, handles = {}, []
    parts = {part: getattr(family, part) for part in ("ffn_up", "ffn_gate", "ffn_down")} | {"hidden": ""}
    parts = {part: within for part, within in parts.items() if within is not None}
    for index, layer in enumerate(model.base_model.get_submodule(family.layers)):
        for part, within in parts.items():

            def keep(_module, _args, output, place=(part, index)):
                outputs[place] = (output[0] if isinstance(output, tuple) else output).clone()

            handles.append(layer.get_submodule(within).register_forward_hook(keep))
    with monkeypatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", watched)
        logits = model(**inputs).logits
    for handle in handles:
        handle.remove()

    layers = frozenset(range(shape.num_layers))
    recorder = Recorder(model, dict.fromkeys(("query", "key", "value", *parts), layers))
    with recorder.recording():
        tapped = model(**inputs).logits
    taps = recorder.pop_taps()
    recorder.remove()
    assert torch.equal(tapped, logits)
    assert len(calls) == shape.num_layers
    for layer, (query, key, value, mask, is_causal_call, scale) in enumerate(calls):
        assert query.shape[1] == shape.num_heads
        assert taps.scaling[layer] == pytest.approx(query.shape[-1] ** -0.5 if scale is None else scale)
        for tap, seen in ((taps.query, query), (taps.key, key), (taps.value, value)):
            repeated = tap[layer].repeat_interleave(seen.shape[1] // tap[layer].shape[1], dim=1)
            assert torch.equal(repeated, seen)
        if family.scores_are_products:
            check_mask(mask, causal=causal, is_causal_call=is_causal_call, window=shape.windows[layer])
    for (part, layer), output in outputs.items():
        tap = getattr(taps, part)[layer]
        assert tap.dim() == 3
        assert torch.equal(tap.flatten(), output.flatten())


def check_mask(mask: torch.Tensor | None, *, causal: bool, is_causal_call: bool, window: int | None) -> None:
    """The mask of the real tokens' rows is that of causality and window, without padding."""
    distance = torch.arange(12)[:, None] - torch.arange(12)
    expected = (distance >= 0 if causal else distance >= -12) & (distance.abs() < (window or 13))
    expected = expected & MASK.bool()[:, None, :]
    if mask is None:
        assert is_causal_call == causal
        return
    seen = (mask if mask.dtype == torch.bool else mask == 0).expand(2, -1, 12, 12)[:, 0]
    assert torch.equal(seen[MASK.bool()], expected[MASK.bool()])


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_tapped_are_refused_with_what_still_works(name: str) -> None:
    with pytest.raises(UserError, match=rf"{name} has no entry .* {REFUSED[name]}.*: take method sft, kd or seqkd"):
        family_of(shrunk_config(name))


def test_masks_that_are_no_windows_are_no_products() -> None:
    """Llama 4 cuts the text into chunks; what it computes within them is tapped, but its attention not compared."""
    assert not family_of(shrunk_config("llama4_text")).scores_are_products
    assert family_of(shrunk_config("ministral")).scores_are_products
    assert shape_of(shrunk_config("ministral")).windows == (8, 8)


def test_a_factorized_student_is_traced_as_its_teacher() -> None:
    config = shrunk_config("arcee")
    config.quantization_config = {"quant_method": "llmdistill", "ranks": {}}
    assert trace_layers(config) == trace_layers(shrunk_config("arcee"))
