"""Pairs of tiny models, student smaller than teacher, and all that a naive loss reads of them."""

import math
from dataclasses import replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from references import terms_of
from tiny import shaken, tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

from llmdistill.batch import IGNORE_INDEX, Batch, Outputs
from llmdistill.methods import Method
from llmdistill.models.families import family_of, shape_of
from llmdistill.models.forward import TappedModel
from llmdistill.models.taps import Recorder


def config_of(name: str, depth: int, width: int, heads: int, groups: int) -> PreTrainedConfig:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth}
    grouped = {} if name == "bert" else {"num_key_value_heads": groups}
    return tiny_config(name, vocab_size=40, num_attention_heads=heads, **sizes, **grouped)


FAMILIES = {name: partial(config_of, name) for name in ("llama", "mistral", "bert")}


def build(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    auto = AutoModelForCausalLM if family_of(config).causal else AutoModelForMaskedLM
    model = auto.from_config(config, attn_implementation="sdpa")
    return shaken(model, 0.2).eval()  # larger than at birth, so that every term has weight


def make_batch() -> Batch:
    ids = torch.randint(3, 40, (3, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, 5:] = mask[1, :2] = 0  # one padded on the right, one on the left
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, :3] = IGNORE_INDEX
    return Batch(ids, mask, labels)


def make_targets() -> Batch:
    """Two sources with a target each, of 4 + 3 and 2 + 3 tokens."""
    batch = make_batch()
    batch.attention_mask[0] = batch.attention_mask[1] = 1
    batch.attention_mask[1, 5:] = 0
    visible_until = torch.tensor([[4, 4, 4, 4, 5, 6, 7], [2, 2, 3, 4, 5, 7, 7], [4, 4, 4, 4, 5, 6, 7]])
    return replace(batch, visible_until=visible_until)


class Seen:
    """One model's inner tensors, gathered with eager attention and plain hooks, in fp64: nothing of the package."""

    def __init__(self, model: PreTrainedModel, batch: Batch) -> None:
        shape = shape_of(model.config)
        self.heads, self.groups, self.width = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.causal, self.window = family_of(model.config).causal, getattr(model.config, "sliding_window", None)
        self.flat: dict[tuple[str, int], Tensor] = {}
        model.set_attn_implementation("eager")
        handles = [hook for layer in range(shape.num_layers) for hook in self._hooks(model, layer)]
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if batch.visible_until is not None:
            size, tokens = batch.input_ids.shape
            inputs["attention_mask"] = torch.zeros(size, 1, tokens, tokens)
            for b, i in batch.attention_mask.nonzero().tolist():
                hidden = [j for j in range(tokens) if j not in self.keys_of(batch, b, i)]
                inputs["attention_mask"][b, 0, i, hidden] = -1e9
        with torch.no_grad():
            outputs = model(**inputs, output_attentions=True, output_hidden_states=True, use_cache=False)
        for handle in handles:
            handle.remove()
        model.set_attn_implementation("sdpa")
        if hasattr(model.base_model, "rotary_emb"):
            self._rotate(model, batch)
        self.logits = outputs.logits.double()
        self.attentions = [each.double() for each in outputs.attentions]
        self.flat["embedding", 0] = outputs.hidden_states[0].double()

    def _hooks(self, model: PreTrainedModel, layer: int) -> list[torch.utils.hooks.RemovableHandle]:
        def keep(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
            def hook(_m: nn.Module, _a: object, output: Any) -> None:
                self.flat[name, layer] = (output[0] if isinstance(output, tuple) else output).double()

            return module.register_forward_hook(hook)

        base = model.base_model
        if family_of(model.config).causal:
            block, inner = base.layers[layer], base.layers[layer].self_attn
            names = ("q_proj", "k_proj", "v_proj")
            ffn = {"ffn_up": block.mlp.up_proj, "ffn_gate": block.mlp.gate_proj, "ffn_down": block.mlp.down_proj}
        else:
            block = base.encoder.layer[layer]
            inner, names = block.attention.self, ("query", "key", "value")
            ffn = {"ffn_up": block.intermediate.dense, "ffn_down": block.output.dense}
        parts = zip(("query", "key", "value"), names, strict=True)
        projections = [keep(name, getattr(inner, module)) for name, module in parts]
        return [*projections, *(keep(name, module) for name, module in ffn.items()), keep("hidden", block)]

    def _rotate(self, model: PreTrainedModel, batch: Batch) -> None:
        """Queries and keys are taken after the rotary embedding."""
        positions = torch.arange(batch.input_ids.shape[1])[None]
        cos, sin = (each.double() for each in model.base_model.rotary_emb(torch.zeros(1), position_ids=positions))
        half = self.width // 2
        for name, layer in self.flat:
            if name in ("query", "key"):
                heads = self.flat[name, layer].unflatten(-1, (-1, self.width))
                turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
                self.flat[name, layer] = (heads * cos[:, :, None] + turned * sin[:, :, None]).flatten(2)

    def keys_of(self, batch: Batch, b: int, i: int) -> list[int]:
        """The positions that a token may look at."""
        real = [j for j in range(batch.input_ids.shape[1]) if batch.attention_mask[b, j]]
        if batch.visible_until is not None:
            real = [j for j in real if j < batch.visible_until[b, i]]
        return [j for j in real if not self.causal or (j <= i and (self.window is None or j > i - self.window))]

    def per_head(self, name: str, layer: int, heads: int) -> Tensor:
        """(B, T, heads, D): head h is that of group h // (heads/groups)."""
        parts = self.flat[name, layer].unflatten(-1, (-1, self.width))
        return torch.stack([parts[:, :, h * parts.shape[2] // heads] for h in range(heads)], dim=2)


def kl(p: Tensor, q: Tensor) -> float:
    return float((p * (p / q).log()).sum())


class Pair:
    """A teacher and a smaller student, both real models."""

    def __init__(self, teacher: PreTrainedConfig, student: PreTrainedConfig, batch: Batch | None = None) -> None:
        self.teacher_config, self.student_config = teacher, student
        self.teacher, self.student, self.batch = build(teacher, 0), build(student, 1), batch or make_batch()
        self.causal = family_of(teacher).causal

    @cached_property
    def seen(self) -> tuple[Seen, Seen]:
        """Student and teacher, for a naive loss."""
        return Seen(self.student, self.batch), Seen(self.teacher, self.batch)

    def run(self, method: Method, batch: Batch | None = None) -> SimpleNamespace:
        """Outputs of student and teacher with what the method taps, as in training, and the projectors."""
        torch.manual_seed(5)
        projectors = {name: nn.Linear(*widths, bias=False) for name, widths in method.projections.items()}
        batch = self.batch if batch is None else batch
        with torch.no_grad():
            teacher = self._forward(Recorder(self.teacher, method.teacher_taps), self.teacher, batch)
        student = self._forward(Recorder(self.student, method.student_taps, projectors), self.student, batch)
        return SimpleNamespace(student=student, teacher=teacher, projectors=projectors)

    @staticmethod
    def _forward(recorder: Recorder, model: PreTrainedModel, batch: Batch) -> Outputs:
        outputs = TappedModel(model, recorder)(batch)
        recorder.remove()
        return outputs

    def means(self, method: Method, batch: Batch | None = None) -> dict[str, float]:
        """The method's terms, divided by their counts."""
        run = self.run(method, batch)
        terms = terms_of(method, run.student, run.teacher, self.batch if batch is None else batch)
        assert list(terms) == list(method.weights) == list(method.positions)
        return {name: (term.sum / term.count).item() for name, term in terms.items()}

    def mean_over_tokens(self, loss: Any) -> float:
        """Of a function of (sequence, token)."""
        tokens = self.batch.attention_mask.nonzero().tolist()
        return sum(float(loss(b, i)) for b, i in tokens) / len(tokens)

    def attention_kl(self, layers: list[tuple[int, int]], direction: str) -> float:
        """KL divergence of the attention distributions (MiniLM §3.1, MaKD eq. 12), over (student, teacher) layers."""
        student, teacher = self.seen

        def loss(b: int, i: int) -> float:
            keys, result = student.keys_of(self.batch, b, i), 0.0
            for mine, theirs in layers:
                rows = student.attentions[mine][b, :, i, keys], teacher.attentions[theirs][b, :, i, keys]
                result += kl(*(rows if direction == "student_teacher" else rows[::-1])) / student.heads
            return result

        return self.mean_over_tokens(loss)

    def relation_kl(self, sides, layers, count, *, repeated=False) -> float:
        """KL divergence of relations (MiniLMv2 eq. 6-8) of heads cut anew, or (MiniLM §3.2) repeated, to a number."""

        def relation(seen: Seen, layer: int, b: int, i: int) -> Tensor:
            """(R, keys)."""
            heads = count if repeated else seen.heads if "query" in sides else seen.groups

            def cut(side: str) -> Tensor:
                flat = seen.flat[side, layer] if side == "hidden" else seen.per_head(side, layer, heads).flatten(2)
                return flat[b].unflatten(1, (count, -1))

            left, right = map(cut, sides)
            scores = [(left[i] * right[j]).sum(-1) for j in seen.keys_of(self.batch, b, i)]
            return (torch.stack(scores, dim=-1) / math.sqrt(left.shape[-1])).softmax(-1)

        def loss(b: int, i: int) -> float:
            student, teacher = self.seen
            pairs = [(relation(teacher, theirs, b, i), relation(student, mine, b, i)) for mine, theirs in layers]
            return sum(kl(p, q) / count for p, q in pairs)

        return self.mean_over_tokens(loss)

    def score_error(self, layers: list[tuple[int, int]]) -> float:
        """Squared error of the attention scores of 4 heads (TinyBERT eq. 7, KroneckerBERT eq. 9)."""
        student, teacher = self.seen

        def scores(seen: Seen, layer: int, b: int, i: int) -> Tensor:
            """(keys, heads)."""
            query, key = (seen.per_head(name, layer, 4)[b] for name in ("query", "key"))
            return (query[i] * key[seen.keys_of(self.batch, b, i)]).sum(-1) / seen.width**0.5

        def loss(b: int, i: int) -> float:
            errors = [scores(student, mine, b, i) - scores(teacher, theirs, b, i) for mine, theirs in layers]
            return sum(float(each.square().mean()) for each in errors)

        return self.mean_over_tokens(loss)

    def feature_error(self, name, layers, scale, projectors=None) -> float:
        """Squared error of features, divided by the token's mean square if the scale is `token`."""
        student, teacher = self.seen

        def loss(b: int, i: int) -> float:
            result = 0.0
            for mine, theirs in layers:
                here, there = student.flat[name, mine][b, i], teacher.flat[name, theirs][b, i]
                here = projectors[name] @ here if name in (projectors or {}) else here
                result += float((here - there).square().mean() / (there.square().mean() if scale == "token" else 1))
            return result

        return self.mean_over_tokens(loss)

    def output_terms(self, temperature: float) -> dict[str, float]:
        """Soft cross-entropy with the teacher (MaKD eq. 18), and cross-entropy, as means over the labels."""
        student, teacher = self.seen
        soft = hard = 0.0
        places = (self.batch.labels >= 0).nonzero().tolist()
        for b, i in places:
            at = i - 1 if self.causal else i
            p = (teacher.logits[b, at] / temperature).softmax(-1)
            soft -= float((p * (student.logits[b, at] / temperature).log_softmax(-1)).sum())
            hard -= float(student.logits[b, at].log_softmax(-1)[self.batch.labels[b, i]])
        return {"logits": soft / len(places), "label": hard / len(places)}


@pytest.fixture(scope="session")
def models() -> SimpleNamespace:
    """What a test of a method on real models needs."""
    return SimpleNamespace(Pair=Pair, families=FAMILIES, kl=kl, targets=make_targets, **FAMILIES)


@pytest.fixture(scope="session", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Teacher of 5 layers, student of 2, half as wide, with as many heads and (in Llama) half the key heads."""
    make = FAMILIES[request.param]
    return Pair(make(5, 32, 4, 2), make(2, 16, 4, 1))
