"""The tracer beside what autograd really saves, and beside FLOP and bytes that are counted by hand."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import BertConfig, GPT2Config, LlamaConfig, PreTrainedModel

from llmdistill.config import FactorizeConfig
from llmdistill.models.load import build_meta, build_random
from llmdistill.runtime.tracing import Tracer, on_gpu
from llmdistill.step.taps import Recorder
from llmdistill.students.install import install
from llmdistill.students.sizes import plan_factors

# Attention dropout would make a CPU, unlike a GPU, take the attention apart.
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0),
    "bert": BertConfig(**SIZES, intermediate_size=64, attention_probs_dropout_prob=0.0),
}


def output(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    recorder = Recorder(model, {})
    with recorder.given_mask():
        result: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    recorder.remove()
    return result


def saved_bytes(model: PreTrainedModel, ids: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The bytes of all storages that a forward pass saves for the backward pass, parameters and inputs left out."""
    known = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers(), ids)}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = output(model, ids)
    saved[logits.untyped_storage().data_ptr()] = logits.untyped_storage().nbytes()
    return sum(saved.values()), logits


@pytest.mark.parametrize("factorized", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_forward_pass_keeps_what_autograd_saves(family, factorized):
    config = CONFIGS[family]
    real, meta = build_random(config, "lm_head", seed=0), build_meta(config, "lm_head")
    for model in (real, meta):
        if factorized:
            install(model, plan_factors(build_meta(config, "lm_head"), FactorizeConfig(rank=5)))
        model.train()
    ids = torch.randint(97, (3, 16))
    expected, logits = saved_bytes(real, ids)
    tracer, stock = Tracer(), torch.nn.functional.scaled_dot_product_attention
    tracer.ignore([*meta.parameters(), *meta.buffers()])
    with on_gpu(), tracer:
        traced = output(meta, ids.to("meta"))
    assert torch.nn.functional.scaled_dot_product_attention is stock
    assert traced.shape == logits.shape
    # The difference is a seed of the attention kernel and position ids, a few hundred bytes.
    assert tracer.live["activations"] == pytest.approx(expected, rel=0.01)


def test_work_of_products_and_of_a_sum():
    sums, left, right = (torch.empty(size, device="meta") for size in ((8, 2), (8, 4), (4, 2)))
    tracer, adding = Tracer(), Tracer()
    with tracer:
        (left @ right).sum()
    assert tracer.work.flops == 2 * 8 * 4 * 2
    assert tracer.work.product_bytes == 4 * (8 * 4 + 4 * 2 + 8 * 2)
    assert tracer.work.other_bytes == 4 * (8 * 2 + 1)
    assert tracer.work.operations == 2
    with adding:  # in place
        sums.addmm_(left, right)
        sums.expand(3, 8, 2).clone().baddbmm_(left.expand(3, 8, 4), right.expand(3, 4, 2))
    assert adding.work.flops == 4 * 2 * 8 * 4 * 2


# transformers repeats grouped keys itself where there is a mask.
@pytest.mark.parametrize(("groups", "masked"), [(1, False), (2, False), (6, False), (6, True)])
def test_work_of_attention_on_grouped_keys_is_that_of_its_products(groups, masked):
    batch, heads, queries, keys, width = 2, 6, 5, 5, 8
    q, k, v = (
        torch.empty(batch, count, 5, width, device="meta", requires_grad=True) for count in (heads, groups, groups)
    )
    mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool, device="meta") if masked else None
    with on_gpu(), Tracer() as tracer:
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=groups < heads)
        forward = tracer.work.flops
        attended.backward(torch.empty_like(attended))
    product = 2 * batch * heads * queries * keys * width  # of matrices of queries x keys with one side of a width
    assert (forward, tracer.work.flops) == (2 * product, (2 + 5) * product)


def test_peak_by_part_starts_again_when_it_is_taken():
    tracer = Tracer()
    with tracer:
        kept = torch.empty(100, device="meta")
        with tracer.part("head"):
            torch.empty(1000, device="meta")
            view = torch.empty(10, device="meta")[:5]
        assert tracer.take_peak() == {"activations": 400, "head": 4000}
        del kept
        torch.empty(3, device="meta")
        assert tracer.take_peak() == {"activations": 400, "head": 40}
        assert tracer.take_peak() == {"activations": 0, "head": 40}
    assert view.shape == (5,)
