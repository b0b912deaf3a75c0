"""vLLM's layers with a student's factors, against the student's own modules; vLLM's base classes are stood in for.

With vLLM 0.32 itself the same students were tried by hand, see docs/serve.md.
"""

import copy
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import shaken, tiny_model

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.students.convert import compress_model
from llmdistill.students.hub import NAME, FactorizedConfig

from stand_in_vllm import StandInDense, StandInEmbedding, StandInHead, StandInLinear, install_layers

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
BLOCK = "model.layers.1"
SETTINGS = {
    "svd": FactorizeConfig(rank=3),
    "mixed": FactorizeConfig(ranks={"*.q_proj": 5, "*.v_proj": 2, "*.up_proj": 3, "*.down_proj": 4}),
    "pivoted": FactorizeConfig(rank=4, form="pivoted"),
    "kronecker": FactorizeConfig(shapes={"*": "4x4"}, sums=2),
}


@pytest.fixture
def plugin(monkeypatch):
    registered = install_layers(monkeypatch)
    monkeypatch.delitem(sys.modules, "llmdistill.serving.vllm_plugin", raising=False)
    settings = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    (entry,) = re.findall(r'\[project.entry-points."vllm.general_plugins"]\nllmdistill = "(.*):(.*)"', settings)
    getattr(importlib.import_module(entry[0]), entry[1])()
    yield registered[NAME]
    sys.modules.pop("llmdistill.serving.vllm_plugin", None)


def make_student(kind, settings):
    return compress_model(shaken(tiny_model(kind)), settings, "kronecker" if settings.shapes else "svd").eval()


def serve(plugin, student, prefix, outputs, inputs=16, *, rank=0, ranks=1, whole=None, only=None, transposed=False):
    """Do with one layer what vLLM does: ask, create, load the student's tensors one by one, process, apply."""
    config = plugin.from_config(FactorizedConfig.to_dict(student.config.quantization_config))
    config.packed_modules_mapping |= FUSED
    layer = StandInLinear(rank, ranks)
    method = config.get_quant_method(layer, prefix)
    own = inputs // ranks if prefix.endswith(("o_proj", "down_proj")) else inputs
    method.create_weights(layer, own, outputs, inputs, whole or sum(outputs), torch.float32, weight_loader=None)
    layer.bias = torch.nn.Parameter(torch.full((sum(outputs),), 7.0), requires_grad=False)
    biased = load(layer, student, prefix, outputs, only=only, transposed=transposed)
    method.process_weights_after_loading(layer)
    assert not any("llmdistill_parts" in name for name, _ in layer.named_modules())

    def apply(x):
        return method.apply(layer, x, layer.bias if biased else None)

    apply.layer = layer
    return apply


def load(layer, student, prefix, outputs, *, only=None, transposed=False, loader=None):
    """Load the tensors of a student's parts one by one; returns whether any is a bias."""
    parent, _, leaf = prefix.rpartition(".")
    parts, biased = FUSED.get(leaf, [leaf]), False
    for index, part in enumerate(parts):
        for name, tensor in student.get_submodule(f"{parent}.{part}").state_dict().items():
            biased |= name.endswith("bias")
            if name == "bias":
                start = sum(outputs[:index])
                layer.bias[start : start + len(tensor)] = tensor  # by vLLM itself
            elif only is None or name in only:
                shard = None if len(parts) == 1 else "qkv"[index] if leaf == "qkv_proj" else index
                parameter = layer.get_parameter(name)
                given = tensor.T if transposed and name.endswith("weight") else tensor
                (parameter.weight_loader if loader is None else loader(name))(parameter, given, shard)
    return biased


def like(parameter, tensor):
    tensor.__dict__.update(parameter.__dict__)
    return tensor


def load_again(layer, student, prefix, outputs, **options):
    """Do what vLLM does with new weights: count them on the meta device, load them, copy them into the old ones."""
    served = {name: each for name, each in layer.named_parameters() if name != "bias"}
    shadows = {name: like(each, each.data.to("meta")) for name, each in served.items()}
    fresh = {name: like(each, torch.empty_like(each)) for name, each in served.items()}
    calls = []

    def loader(name):
        def buffered(_parameter, tensor, shard):
            bound = inspect.signature(shadows[name].weight_loader).bind(shadows[name], tensor, shard)
            shadows[name].weight_loader(*bound.args)
            calls.append((name, bound))

        return buffered

    load(layer, student, prefix, outputs, loader=loader, **options)
    for name, bound in calls:
        bound.arguments["param"] = fresh[name]
        served[name].weight_loader(*bound.args)
    for name, each in served.items():
        each.data.copy_(fresh[name])


def expected(student, prefix, x):
    parent, _, leaf = prefix.rpartition(".")
    return [student.get_submodule(f"{parent}.{part}")(x) for part in FUSED.get(leaf, [leaf])]


LAYERS = {
    f"{BLOCK}.self_attn.qkv_proj": ([16, 8, 8], 16),
    f"{BLOCK}.self_attn.o_proj": ([16], 16),
    f"{BLOCK}.mlp.gate_up_proj": ([24, 24], 16),
    f"{BLOCK}.mlp.down_proj": ([16], 24),
}
OF_GPT2 = {"transformer.h.1.attn.c_attn": ([16, 16, 16], 16), "transformer.h.1.attn.c_proj": ([16], 16)}
"""Its queries, keys and values are one matrix."""


@torch.no_grad()
@pytest.mark.parametrize(("kind", "factors"), [
    *(("llama", factors) for factors in SETTINGS), ("qwen2", "svd"), ("qwen2", "kronecker"), ("qwen2", "mixed"),
    ("gpt2", "svd"), ("gpt2", "pivoted"),
])  # fmt: skip
def test_a_layer_gives_the_outputs_of_its_parts_and_takes_new_weights(plugin, kind, factors):
    transposed = kind == "gpt2"
    # With a rank of 8 the second factor of its c_proj is square.
    settings = FactorizeConfig(rank=8, form="pivoted") if (kind, factors) == ("gpt2", "pivoted") else SETTINGS[factors]
    student = make_student(kind, settings)
    for prefix, (outputs, inputs) in (OF_GPT2 if transposed else LAYERS).items():
        if factors == "mixed" and prefix.endswith("o_proj"):
            continue  # it is dense
        x = torch.randn(5, inputs)
        served = serve(plugin, student, prefix, outputs, inputs, transposed=transposed)
        torch.testing.assert_close(served(x), torch.cat(expected(student, prefix, x), dim=-1))
        other = copy.deepcopy(student)
        for _ in range(2):  # as after some training
            for each in other.parameters():
                each.add_(torch.randn_like(each))
            load_again(served.layer, other, prefix, outputs, transposed=transposed)
            torch.testing.assert_close(served(x), torch.cat(expected(other, prefix, x), dim=-1))


@torch.no_grad()
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_tensor_parallelism_split_outputs_or_inputs_but_not_the_rank(plugin, ranks):
    student, prefix, x = make_student("llama", SETTINGS["svd"]), f"{BLOCK}.self_attn.qkv_proj", torch.randn(5, 16)
    heads = max(1, 2 // ranks)  # key-value heads of a rank; four ranks share two
    own = [16 // ranks, heads * 4, heads * 4]
    q, k, v = expected(student, prefix, x)
    for rank in range(ranks):
        layer, shared = serve(plugin, student, prefix, own, rank=rank, ranks=ranks, whole=sum(own) * ranks), 2 * rank
        wanted = [q.chunk(ranks, -1)[rank], *(each.chunk(2, -1)[shared // ranks] for each in (k, v))]
        torch.testing.assert_close(layer(x), torch.cat(wanted, dim=-1))
    prefix, x = f"{BLOCK}.mlp.down_proj", torch.randn(5, 24)
    layers = [serve(plugin, student, prefix, [16], 24, rank=rank, ranks=ranks) for rank in range(ranks)]
    total = sum(layer(part) for layer, part in zip(layers, x.chunk(ranks, -1), strict=True))
    torch.testing.assert_close(total, expected(student, prefix, x)[0])


def make_tables(plugin, student, *, monkeypatch=None, **ranks):
    """The token embedding and the head that vLLM makes for a student, without weights."""
    config = plugin.from_config(FactorizedConfig.to_dict(student.config.quantization_config))
    config.maybe_update_config("student", hf_config=student.config)
    current = SimpleNamespace(quant_config=config)
    if monkeypatch is not None:  # a model of vLLM whose tables ask nobody
        module = sys.modules["llmdistill.serving.vllm_plugin"]
        monkeypatch.setattr(module, "get_current_vllm_config_or_none", lambda: current)
        config = None
    given = (torch.float32, config)
    return StandInEmbedding(60, 16, *given, **ranks), StandInHead(60, 16, *given, prefix="lm_head", **ranks)


def load_factors(embedding, student, names="AB"):
    for name in names:
        parameter = embedding.get_parameter(f"{name}.weight")
        parameter.weight_loader(parameter, student.get_input_embeddings().get_parameter(f"{name}.weight"))
    embedding.quant_method.process_weights_after_loading(embedding)


EMBEDDING = FactorizeConfig(rank=3, embedding_rank=5)


@torch.no_grad()
@pytest.mark.parametrize("form", ["plain", "pivoted"])
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_factorized_embedding_and_the_head_tied_to_it(plugin, monkeypatch, ranks, asks, form):
    settings = FactorizeConfig(rank=3, embedding_rank=5, form=form)
    student, ids = make_student("gemma2", settings), torch.arange(60).view(3, 20)
    student.get_input_embeddings().scale = 1.0  # Gemma's factor, by which vLLM's model multiplies the rows itself
    pairs = [
        make_tables(plugin, student, monkeypatch=None if asks else monkeypatch, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    heads = [head.tie_weights(embedding) for embedding, head in pairs]
    # vLLM's Cohere looks for a weight, and `_get_tied_embedding_params` for parameters with two names.
    assert all(
        embedding.weight is None and head.A is embedding.A for (embedding, _), head in zip(pairs, heads, strict=True)
    )
    for _ in range(2):
        for embedding, _ in pairs:
            load_factors(embedding, student)
        torch.testing.assert_close(sum(embedding(ids) for embedding, _ in pairs), student.get_input_embeddings()(ids))
        x, bias = torch.randn(3, 16), torch.randn(64).chunk(ranks)
        outputs = [head.quant_method.apply(head, x, each) for head, each in zip(heads, bias, strict=True)]
        wanted = student.lm_head(x) + torch.cat(bias)[:60]
        torch.testing.assert_close(torch.cat(outputs, dim=-1)[:, :60], wanted)
        for each in student.parameters():  # as after some training
            each.add_(torch.randn_like(each))


def test_an_untied_head_and_other_tables_are_dense(plugin, monkeypatch):
    student = make_student("llama", EMBEDDING)
    _, head = make_tables(plugin, student, monkeypatch=monkeypatch)
    positions = StandInEmbedding(40, 16)
    for each in (head, positions):
        assert isinstance(each.quant_method, StandInDense)
        assert each.weight.shape == (64, 16)
    student = make_student("llama", SETTINGS["svd"])
    assert all(isinstance(each.quant_method, StandInDense) for each in make_tables(plugin, student))


def test_factors_of_an_embedding_that_do_not_fit_are_refused(plugin):
    student = make_student("llama", EMBEDDING)
    embedding, _ = make_tables(plugin, student)
    with pytest.raises(UserError, match=r"lack B.weight of the token embedding"):
        load_factors(embedding, student, "A")
    other = make_student("llama", FactorizeConfig(rank=3, embedding_rank=4))
    with pytest.raises(UserError, match=r"A.weight of the token embedding is \(60, 4\) .* has \(60, 5\) of it"):
        load_factors(embedding, other)


def test_what_cannot_be_served_is_said_in_a_sentence(plugin):
    def refused(settings, words, width=12, **more):
        with pytest.raises(UserError, match=words):
            serve(plugin, make_student("llama", settings), f"{BLOCK}.mlp.gate_up_proj", [width, width], **more)

    refused(FactorizeConfig(shapes={"*": "4x4"}, embedding_columns=2), "token embedding is factorized .*_columns 2")
    for kind in ("kronecker", "pivoted"):
        refused(SETTINGS[kind], f"factors of the kind {kind} cannot be split", whole=48, ranks=2)
    refused(SETTINGS["svd"], r"B.weight is \(24, 3\) in the student's weights, .* layer of vLLM has \(12, 3\)")
    refused(SETTINGS["svd"], r"lack model.layers.1.mlp.gate_proj.B.weight", width=24, only=["A.weight"])
    with pytest.raises(UserError, match="it has factorized experts"):
        plugin.from_config({"method": "svd", "modules": {"layers.0.mlp.experts.0.up_proj": 3}})


def test_layers_without_factors_are_vllms_own(plugin):
    config = plugin.from_config({"method": "svd", "modules": {"layers.1.mlp.down_proj": 3}})
    methods = [config.get_quant_method(StandInLinear(), f"model.layers.{n}.mlp.down_proj") for n in (0, 11, 1)]
    assert [isinstance(method, StandInDense) for method in methods] == [True, True, False]
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "model.embed_tokens") is None


@pytest.mark.usefixtures("plugin")
def test_the_parts_of_vllms_bert_are_found_under_its_other_name():
    sizes_of = sys.modules["llmdistill.serving.vllm_plugin"].sizes_of
    modules = {f"encoder.layer.{i}.attention.self.{name}": i + 1 for i in (1, 11) for name in ("query", "key", "value")}
    modules |= {"encoder.layer.1.output.dense": 5}
    config, fused = FactorizedConfig("svd", modules), {"qkv_proj": ["query", "key", "value"]}
    found = sizes_of(config, "model.encoder.layer.1.attention.output.qkv_proj", fused)
    assert found == {"query": 2, "key": 2, "value": 2}
    assert sizes_of(config, "model.encoder.layer.1.attention.output.dense", fused) == {"dense": None}
    assert sizes_of(config, "model.encoder.layer.1.output.dense", fused) == {"dense": 5}
