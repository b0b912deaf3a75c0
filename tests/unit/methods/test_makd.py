from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from references import terms_of
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from llmdistill.batch import IGNORE_INDEX, Batch, Outputs, TapRequest, Taps
from llmdistill.errors import UserError
from llmdistill.methods import Method
from llmdistill.methods.layers import check_same_shape
from llmdistill.methods.makd import TERMS, MakdConfig, build_makd
from llmdistill.models.families import family_of, shape_of
from llmdistill.models.taps import Recorder

LAYERS = 5  # odd: the lower half has two layers, the upper three


def llama(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
    )


LLAMA = llama(LAYERS)
GPT2 = GPT2Config(vocab_size=50, n_embd=16, n_layer=LAYERS, n_head=4, n_positions=32)
MISTRAL = MistralConfig(**{**LLAMA.to_diff_dict(), "sliding_window": 3, "model_type": "mistral"})
BERT = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=24)

MATRIX = ("query", "key", "value", "ffn_up", "ffn_gate", "ffn_down")
LAYER = ("attention", "hidden")


def off(*names: str) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


# The ablations of Table 3 and the placements of Table 4, row by row. Makd's layers of eq. 19 do not overlap, so
# Table 4's [L/2, L] is the upper half.
TABLE_3 = {
    "full": MakdConfig(),
    "w/o matrix": MakdConfig(matrix_layers="none"),
    "w/o MHA": MakdConfig(**off("query", "key", "value")),
    "w/o FNN": MakdConfig(**off("ffn_up", "ffn_gate", "ffn_down")),
    "w/o layer": MakdConfig(layer_layers="none"),
    "w/o model": MakdConfig(logits=0.0),
}
TABLE_4 = {
    "matrix lower": MakdConfig(matrix_layers="lower", layer_layers="none", logits=0.0),
    "matrix upper": MakdConfig(matrix_layers="upper", layer_layers="none", logits=0.0),
    "matrix all": MakdConfig(matrix_layers="all", layer_layers="none", logits=0.0),
    "layer lower": MakdConfig(matrix_layers="none", layer_layers="lower", logits=0.0),
    "layer upper": MakdConfig(matrix_layers="none", layer_layers="upper", logits=0.0),
    "layer all": MakdConfig(matrix_layers="none", layer_layers="all", logits=0.0),
    "all all": MakdConfig(matrix_layers="all", layer_layers="all"),
    "lower upper": MakdConfig(matrix_layers="lower", layer_layers="upper"),
}
OTHERS = {
    "weights": MakdConfig(query=2.0, ffn_up=0.5, attention=3.0, hidden=0.25, logits=1.5, label=0.75, temperature=2.0),
    "some layers": MakdConfig(matrix_layers="1-2,4", layer_layers="5", value=0.0),
    "overlap": MakdConfig(matrix_layers="3", layer_layers="3", key=0.0),
    "plain": MakdConfig(matrix_layers="all", layer_layers="all", scale="plain"),
}
VARIANTS = {
    **{f"table 3 {k}": v for k, v in TABLE_3.items()},
    **{f"table 4 {k}": v for k, v in TABLE_4.items()},
    **OTHERS,
}
PLACES = {
    "lower": {1, 2},
    "upper": {3, 4, 5},
    "all": {1, 2, 3, 4, 5},
    "none": set[int](),
    "1-2,4": {1, 2, 4},
    "5": {5},
    "3": {3},
}


def make(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    auto = AutoModelForCausalLM if family_of(config).causal else AutoModelForMaskedLM
    model = auto.from_config(type(config).from_dict(config.to_dict()), attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at birth, so that every term has weight
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 50, (3, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = mask[1, :3] = 0  # one padded on the right, one on the left
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, :4] = IGNORE_INDEX
    return Batch(ids, mask, labels)


def run(model: PreTrainedModel, request: TapRequest, batch: Batch) -> Outputs:
    recorder = Recorder(model, request)
    with recorder.recording():
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    taps = recorder.take()
    recorder.remove()
    return Outputs(logits, taps)


def total_of(method: Method, student: PreTrainedModel, teacher: PreTrainedModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        of_teacher = run(teacher, method.teacher_taps, batch)
    terms = terms_of(method, run(student, method.student_taps, batch), of_teacher, batch)
    assert terms.keys() == method.weights.keys()
    return sum((method.weights[name] * term.sum / term.count for name, term in terms.items()), torch.zeros(()))


class Seen:
    """All that the naive loss reads, gathered with eager attention and plain hooks: nothing of the package."""

    def __init__(self, model: PreTrainedModel, batch: Batch) -> None:
        self.flat: dict[tuple[str, int], Tensor] = {}
        model.set_attn_implementation("eager")
        handles = [hook for layer in range(LAYERS) for hook in self._hooks(model, layer)]
        with torch.no_grad():
            outputs = model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_attentions=True, use_cache=False
            )
        for handle in handles:
            handle.remove()
        model.set_attn_implementation("sdpa")
        if family_of(model.config).ffn_gate is not None:
            self._rotate(model, batch)
        self.logits, self.attentions = outputs.logits, outputs.attentions

    def _rotate(self, model: PreTrainedModel, batch: Batch) -> None:
        """Queries and keys are compared after the rotary embedding. Distances do not feel it, variances do."""
        positions = torch.arange(batch.input_ids.shape[1])[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1), position_ids=positions)
        for name, layer in self.flat:
            if name in ("query", "key"):
                flat = self.flat[name, layer]
                heads = flat.unflatten(-1, (-1, 4))
                turned = torch.cat([-heads[..., 2:], heads[..., :2]], dim=-1)
                self.flat[name, layer] = (heads * cos[:, :, None] + turned * sin[:, :, None]).flatten(2)

    def _hooks(self, model: PreTrainedModel, layer: int) -> list[torch.utils.hooks.RemovableHandle]:
        def keep(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
            return module.register_forward_hook(lambda _m, _a, output: self.flat.update({(name, layer): output}))

        def split(_m: nn.Module, _a: object, output: Tensor) -> None:
            for name, part in zip(("query", "key", "value"), output.split(16, -1), strict=True):
                self.flat[name, layer] = part

        if model.config.model_type == "gpt2":
            block = model.transformer.h[layer]
            return [
                block.attn.c_attn.register_forward_hook(split),
                keep("ffn_up", block.mlp.c_fc),
                keep("ffn_down", block.mlp.c_proj),
                keep("hidden", block),
            ]
        if model.config.model_type == "bert":
            block = model.bert.encoder.layer[layer]
            inner = block.attention.self
            return [
                keep("query", inner.query),
                keep("key", inner.key),
                keep("value", inner.value),
                keep("ffn_up", block.intermediate.dense),
                keep("ffn_down", block.output.dense),
                keep("hidden", block),
            ]
        block = model.model.layers[layer]
        return [
            keep("query", block.self_attn.q_proj),
            keep("key", block.self_attn.k_proj),
            keep("value", block.self_attn.v_proj),
            keep("ffn_up", block.mlp.up_proj),
            keep("ffn_gate", block.mlp.gate_proj),
            keep("ffn_down", block.mlp.down_proj),
            keep("hidden", block),
        ]


def naive_total(settings: MakdConfig, student: Seen, teacher: Seen, batch: Batch, *, shift: bool) -> float:
    """MaKD eq. 12-19, token by token."""
    weights = asdict(settings)
    tokens = batch.attention_mask.nonzero().tolist()
    total = 0.0

    def mse(name: str, layer: int) -> float:
        result = 0.0
        for b, t in tokens:
            s, r = student.flat[name, layer][b, t].double(), teacher.flat[name, layer][b, t].double()
            error = ((s - r) ** 2).mean().item()
            result += error / r.square().mean().item() if settings.scale == "token" else error
        return result / len(tokens)

    def kl(layer: int) -> float:
        result = 0.0
        for b, t in tokens:
            for h in range(4):
                p, q = student.attentions[layer][b, h, t].double(), teacher.attentions[layer][b, h, t].double()
                result += sum((x * (x / y).log()).item() for x, y in zip(p, q, strict=True) if x > 0) / 4
        return result / len(tokens)

    for layer in PLACES[settings.matrix_layers]:
        total += sum(weights[n] * mse(n, layer - 1) for n in MATRIX if weights[n] and (n, layer - 1) in teacher.flat)
    for layer in PLACES[settings.layer_layers]:
        total += weights["attention"] * kl(layer - 1) + weights["hidden"] * mse("hidden", layer - 1)
    soft = hard = count = 0.0
    for b, t in (batch.labels != IGNORE_INDEX).nonzero().tolist():
        at = t - 1 if shift else t
        p = (teacher.logits[b, at].double() / settings.temperature).softmax(-1)
        soft -= (p * (student.logits[b, at].double() / settings.temperature).log_softmax(-1)).sum().item()
        hard -= student.logits[b, at].double().log_softmax(-1)[batch.labels[b, t]].item()
        count += 1
    return total + settings.logits * soft / count + settings.label * hard / count


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_total_equals_the_naive_loop(config: PreTrainedConfig, settings: MakdConfig) -> None:
    teacher, student, batch = make(config, 0), make(config, 1), make_batch()
    total = total_of(build_makd(settings, config, config), student, teacher, batch)
    expected = naive_total(settings, Seen(student, batch), Seen(teacher, batch), batch, shift=True)
    assert total.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("config", [MISTRAL, BERT], ids=["sliding window", "encoder"])
def test_other_masks_equal_the_naive_loop(config: PreTrainedConfig) -> None:
    settings = MakdConfig(matrix_layers="all", layer_layers="all", label=1.0)
    teacher, student, batch = make(config, 0), make(config, 1), make_batch()
    total = total_of(build_makd(settings, config, config), student, teacher, batch)
    expected = naive_total(settings, Seen(student, batch), Seen(teacher, batch), batch, shift=config is MISTRAL)
    assert total.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_each_variant_asks_only_for_what_it_needs(settings: MakdConfig, gated: bool) -> None:
    config = LLAMA if gated else GPT2
    method = build_makd(settings, config, config)
    weights = asdict(settings)
    expected: dict[str, set[int]] = {}
    for name in MATRIX:
        if weights[name] and (gated or name != "ffn_gate"):
            expected[name] = {layer - 1 for layer in PLACES[settings.matrix_layers]}
    upper = {layer - 1 for layer in PLACES[settings.layer_layers]}
    expected["hidden"] = upper
    for name in ("query", "key"):  # the attention distribution is built from them
        expected[name] = expected.get(name, set()) | upper
    expected = {name: layers for name, layers in expected.items() if layers}
    assert method.student_taps == method.teacher_taps == expected
    assert all(method.weights.values())


def test_terms_and_their_order() -> None:
    assert tuple(build_makd(MakdConfig(label=1.0), LLAMA, LLAMA).weights) == TERMS
    names = list(build_makd(MakdConfig(), GPT2, GPT2).weights)
    assert names == ["query", "key", "value", "ffn_up", "ffn_down", "attention", "hidden", "logits"]
    one_layer = llama(1)  # its lower half is empty
    assert list(build_makd(MakdConfig(), one_layer, one_layer).weights) == ["attention", "hidden", "logits"]


def test_a_term_is_summed_over_layers_and_counted_once() -> None:
    settings = MakdConfig(layer_layers="all", matrix_layers="none", attention=0.0, scale="plain")
    method = build_makd(settings, llama(3), llama(3))
    batch = make_batch()
    student = {layer: torch.full((3, 8, 2), float(layer + 1)) for layer in range(3)}
    teacher = {layer: torch.zeros(3, 8, 2) for layer in range(3)}
    logits = torch.zeros(3, 8, 50)
    terms = terms_of(method, Outputs(logits, Taps(hidden=student)), Outputs(logits, Taps(hidden=teacher)), batch)
    tokens = int(batch.attention_mask.sum())
    assert terms["hidden"].count == tokens
    assert terms["hidden"].sum == tokens * (1 + 4 + 9)


def test_student_that_equals_its_teacher_stays() -> None:
    settings = MakdConfig(matrix_layers="all", layer_layers="all")
    teacher, student = make(LLAMA, 0), make(LLAMA, 0)
    total_of(build_makd(settings, LLAMA, LLAMA), student, teacher, make_batch()).backward()
    for parameter in student.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() < 1e-5  # rounding in fp32 of gradients that otherwise exceed 0.1


def test_padding_does_not_matter() -> None:
    """The same sequences with more padding, on either side, give the same terms."""
    method = build_makd(MakdConfig(matrix_layers="all", layer_layers="all", label=1.0), LLAMA, LLAMA)
    teacher, student, batch = make(LLAMA, 0), make(LLAMA, 1), make_batch()
    expected = total_of(method, student, teacher, batch)
    for pad in ((0, 4), (4, 0)):
        longer = Batch(
            nn.functional.pad(batch.input_ids, pad, value=7),
            nn.functional.pad(batch.attention_mask, pad),
            nn.functional.pad(batch.labels, pad, value=IGNORE_INDEX),
        )
        torch.testing.assert_close(total_of(method, student, teacher, longer), expected, rtol=1e-5, atol=0)


def test_needs_teacher() -> None:
    assert build_makd(MakdConfig(), LLAMA, LLAMA).needs_teacher
    names = [name for name in TERMS if name != "label"]
    method = build_makd(MakdConfig(**off(*names), label=1.0), LLAMA, LLAMA)
    assert not method.needs_teacher
    batch = make_batch()
    assert list(terms_of(method, Outputs(torch.zeros(3, 8, 50), Taps()), None, batch)) == ["label"]


def test_bad_settings() -> None:
    def build(settings: MakdConfig) -> Method:
        return build_makd(settings, llama(4), llama(4))

    with pytest.raises(UserError, match=r"makd\.matrix_layers is '1-9': the model has 4 layers"):
        build(MakdConfig(matrix_layers="1-9"))
    with pytest.raises(UserError, match=r"makd\.layer_layers"):
        build(MakdConfig(layer_layers="top"))
    with pytest.raises(UserError, match=r"makd\.hidden is -1"):
        build(MakdConfig(hidden=-1.0))
    with pytest.raises(UserError, match=r"makd\.temperature is 0"):
        build(MakdConfig(temperature=0.0))
    with pytest.raises(UserError, match="no term is left"):
        build(MakdConfig(matrix_layers="none", layer_layers="none", logits=0.0))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 4),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 1),
        ("hidden_size", 32),
        ("intermediate_size", 32),
        ("head_dim", 8),
    ],
)
def test_models_of_other_shapes_are_refused(key: str, value: int) -> None:
    student = LlamaConfig.from_dict({**LLAMA.to_dict(), key: value})
    with pytest.raises(UserError, match=r"in the teacher and .* in the student"):
        build_makd(MakdConfig(), LLAMA, student)


def test_models_of_other_architectures_are_refused() -> None:
    with pytest.raises(UserError, match="teacher is llama and the student gpt2"):
        check_same_shape(LLAMA, GPT2, method="makd")
    assert shape_of(LLAMA).num_layers == shape_of(GPT2).num_layers
