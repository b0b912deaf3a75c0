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
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

from llmdistill.batch import IGNORE_INDEX, Batch, Outputs
from llmdistill.methods import Method
from llmdistill.models.families import family_of, shape_of
from llmdistill.step.forward import TappedModel
from llmdistill.step.taps import Recorder


def config_of(name: str, depth: int, width: int, heads: int, groups: int) -> PreTrainedConfig:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth}
    grouped = {} if name == "bert" else {"num_key_value_heads": groups}
    return tiny_config(name, vocab_size=40, num_attention_heads=heads, **sizes, **grouped)


DECODER = {side: f"self_attn.{side[0]}_proj" for side in ("query", "key", "value")}
DECODER |= {"ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj", "hidden": ""}
ENCODER = {side: f"attention.self.{side}" for side in ("query", "key", "value")}
ENCODER |= {"ffn_up": "intermediate.dense", "ffn_down": "output.dense", "hidden": ""}
"""The modules of a layer that give what is seen."""
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
            inputs["attention_mask"] = torch.where(self.visible(batch), 0.0, -1e9)[:, None]
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
        def keep(name: str, _module: nn.Module, _inputs: object, output: Any) -> None:
            self.flat[name, layer] = (output[0] if isinstance(output, tuple) else output).double()

        block = model.base_model.layers[layer] if self.causal else model.base_model.encoder.layer[layer]
        places = DECODER if self.causal else ENCODER
        return [block.get_submodule(path).register_forward_hook(partial(keep, name)) for name, path in places.items()]

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

    def visible(self, batch: Batch) -> Tensor:
        """Whether a token (second axis) may look at a key (last axis): (B, T, T)."""
        size, tokens = batch.input_ids.shape
        i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
        seen = (batch.attention_mask == 1)[:, None].expand(size, tokens, tokens)
        if batch.visible_until is not None:
            seen = seen & (j < batch.visible_until[:, :, None])
        if self.causal:
            seen = seen & (j <= i)
            if self.window is not None:
                seen = seen & (j > i - self.window)
        return seen

    def per_head(self, name: str, layer: int, heads: int) -> Tensor:
        """(B, heads, T, D): head h is that of group h // (heads/groups)."""
        parts = self.flat[name, layer].unflatten(-1, (-1, self.width)).transpose(1, 2)
        return parts.repeat_interleave(heads // parts.shape[1], dim=1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Over the last axis, where p is not 0."""
    return torch.where(p > 0, p * (p / q).log(), 0.0).sum(-1)


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

    def mean_over_tokens(self, loss: Tensor) -> float:
        """Of one number a token: (B, T)."""
        return float(loss[self.batch.attention_mask == 1].mean())

    def attention_kl(self, layers: list[tuple[int, int]], direction: str) -> float:
        """KL divergence of the attention distributions (MiniLM §3.1, MaKD eq. 12), over (student, teacher) layers."""
        student, teacher = self.seen
        result = 0.0
        for mine, theirs in layers:
            rows = student.attentions[mine], teacher.attentions[theirs]
            divergences = kl(*(rows if direction == "student_teacher" else rows[::-1]))
            result += self.mean_over_tokens(divergences.mean(1))
        return result

    def relation_kl(self, sides, layers, count, *, repeated=False) -> float:
        """KL divergence of relations (MiniLMv2 eq. 6-8) of heads cut anew, or (MiniLM §3.2) repeated, to a number."""

        def relation(seen: Seen, layer: int) -> Tensor:
            """(B, R, T, T)."""
            heads = count if repeated else seen.heads if "query" in sides else seen.groups

            def cut(side: str) -> Tensor:
                flat = seen.flat[side, layer]
                if side != "hidden":
                    flat = seen.per_head(side, layer, heads).transpose(1, 2).flatten(2)
                return flat.unflatten(-1, (count, -1)).transpose(1, 2)

            left, right = map(cut, sides)
            scores = left @ right.transpose(-1, -2) / math.sqrt(left.shape[-1])
            return scores.masked_fill(~seen.visible(self.batch)[:, None], -torch.inf).softmax(-1)

        student, teacher = self.seen
        pairs = [(relation(teacher, theirs), relation(student, mine)) for mine, theirs in layers]
        return sum(self.mean_over_tokens(kl(p, q).mean(1)) for p, q in pairs)

    def score_error(self, layers: list[tuple[int, int]]) -> float:
        """Squared error of the attention scores of 4 heads (TinyBERT eq. 7, KroneckerBERT eq. 9)."""
        student, teacher = self.seen
        visible = student.visible(self.batch)

        def scores(seen: Seen, layer: int) -> Tensor:
            query, key = (seen.per_head(name, layer, 4) for name in ("query", "key"))
            return query @ key.transpose(-1, -2) / seen.width**0.5

        errors = sum((scores(student, mine) - scores(teacher, theirs)).square().mean(1) for mine, theirs in layers)
        return self.mean_over_tokens((errors * visible).sum(-1) / visible.sum(-1))

    def feature_error(self, name, layers, scale, projectors=None) -> float:
        """Squared error of features, divided by the token's mean square if the scale is `token`."""
        student, teacher = self.seen
        result = 0.0
        for mine, theirs in layers:
            here, there = student.flat[name, mine], teacher.flat[name, theirs]
            here = here @ projectors[name].T if name in (projectors or {}) else here
            errors = (here - there).square().mean(-1)
            result += self.mean_over_tokens(errors / there.square().mean(-1) if scale == "token" else errors)
        return result

    def of_labels(self, seen: Seen) -> Tensor:
        """The logits that predict each label."""
        rows, columns = (self.batch.labels >= 0).nonzero().T
        return seen.logits[rows, columns - 1 if self.causal else columns]

    def output_terms(self, temperature: float) -> dict[str, float]:
        """Soft cross-entropy with the teacher (MaKD eq. 18), and cross-entropy, as means over the labels."""
        mine, theirs = map(self.of_labels, self.seen)
        targets = self.batch.labels[self.batch.labels >= 0]
        return {
            "logits": float(cross_entropy(mine / temperature, (theirs / temperature).softmax(-1))),
            "label": float(cross_entropy(mine, targets)),
        }


@pytest.fixture(scope="session")
def models() -> SimpleNamespace:
    """What a test of a method on real models needs."""
    return SimpleNamespace(Pair=Pair, families=FAMILIES, kl=kl, targets=make_targets, **FAMILIES)


@pytest.fixture(scope="session", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Teacher of 5 layers, student of 2, half as wide, with as many heads and (in Llama) half the key heads."""
    make = FAMILIES[request.param]
    return Pair(make(5, 32, 4, 2), make(2, 16, 4, 1))
