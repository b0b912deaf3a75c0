"""The rows of bench_step: one training step, by the package or by hand, on models with random weights.

Dropout is off everywhere (as TRL's trainers have it), weights and optimizer state are fp32, the optimizer is torch's
fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from benching import Work
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedModel

IGNORE = -100


@dataclass(frozen=True)
class Setting:
    """What a step is made on; every row of a comparison builds the same."""

    teacher: Any
    student: Any
    ids: Tensor
    """(B, T)."""
    labels: Tensor
    """(B, T), -100 where none; all of them for an encoder, which has `targets`."""
    targets: Tensor | None
    """(B,) classes, of an encoder."""


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: {"task": kd, makd or encoder, "way": floor, ours, naive or trl, and sizes}."""
    setting = make_setting(row, device)
    if row["way"] == "trl":
        from step_trl import trl_gkd  # the package's own environment has no trl

        return Work(trl_gkd(setting, adamw(setting.student)))
    ways = {"floor": floor, "ours": ours, "naive": naive_makd}
    return Work(ways[row["way"]](setting, row))


def make_setting(row: dict[str, Any], device: torch.device) -> Setting:
    """The models and the batch. A share of the labels, at the end of each sequence, is the response."""
    torch.manual_seed(0)
    tokens, share = row["tokens"], row.get("labelled", 1.0)
    if row["task"] == "encoder":
        teacher, student = (bert(row, layers) for layers in (row["layers"], row["student_layers"]))
    else:
        teacher, student = (gpt2(row, layers) for layers in (row["layers"], row["student_layers"]))
    if "rank" in row:
        low_rank(student, row["rank"])
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(teacher.config.vocab_size, (row["batch"], tokens), generator=generator)
    targets = torch.randint(2, (row["batch"],), generator=generator) if row["task"] == "encoder" else None
    labels = ids.masked_fill(torch.arange(tokens) < round((1 - share) * tokens), IGNORE)
    if targets is not None:
        labels = torch.full_like(ids, IGNORE)
        targets = targets.to(device)
    teacher.eval().requires_grad_(False)
    return Setting(teacher.to(device), student.to(device).train(), ids.to(device), labels.to(device), targets)


def gpt2(row: dict[str, Any], layers: int) -> PreTrainedModel:
    sizes = {"n_embd": row["width"], "n_head": row["heads"], "vocab_size": row["vocabulary"]}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    # The naive step reads the attention maps off both models, and only eager attention has them.
    attention = "eager" if row["way"] == "naive" else "sdpa"
    return GPT2LMHeadModel._from_config(GPT2Config(n_layer=layers, **sizes, **dropout), attn_implementation=attention)


def bert(row: dict[str, Any], layers: int) -> PreTrainedModel:
    sizes = {"hidden_size": row["width"], "intermediate_size": 4 * row["width"], "num_attention_heads": row["heads"]}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = BertConfig(num_hidden_layers=layers, vocab_size=row["vocabulary"], **sizes, **dropout)
    return BertForSequenceClassification._from_config(config, attn_implementation="sdpa")


def low_rank(model: PreTrainedModel, rank: int) -> None:
    """Factorised modules of random weights: a step costs the same whatever they hold."""
    from llmdistill.config import FactorizeConfig
    from llmdistill.factorize import plan
    from llmdistill.factorize.install import install
    from llmdistill.factorize.lowrank_modules import LowRankLinear

    install(model, plan(model, FactorizeConfig(rank=rank)), None)
    for module in model.modules():
        if isinstance(module, LowRankLinear):
            nn.init.normal_(module.A.weight, std=0.02)
            nn.init.normal_(module.B.weight, std=rank**-0.5)  # so that the product is as large as a dense weight


def adamw(student: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all rows; its learning rate is next to nothing, so that every call does the same."""
    return torch.optim.AdamW(student.parameters(), lr=1e-8, fused=True)


def _update(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def floor(setting: Setting, _row: dict[str, Any]) -> Callable[[], float]:
    """What no distillation can do without: the teacher's forward pass, and a step of the student on plain labels.

    All tokens are labels, whatever share a row supervises. Nothing is kept of the teacher.
    """
    optimizer = adamw(setting.student)
    inputs = {"input_ids": setting.ids, "attention_mask": torch.ones_like(setting.ids)}
    cache = {} if setting.targets is not None else {"use_cache": False}
    following = functional.pad(setting.ids[:, 1:], (0, 1), value=IGNORE).flatten()

    def step() -> float:
        with torch.no_grad():
            setting.teacher(**inputs, **cache)
        logits = setting.student(**inputs, **cache).logits
        targets = following if setting.targets is None else setting.targets
        loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets, ignore_index=IGNORE)
        del logits
        _update(loss, optimizer)
        return float(loss.detach())

    return step


class _Engine:
    """DeepSpeed's engine as far as the trainer knows it, without DeepSpeed: the floor has none either."""

    def __init__(self, student: nn.Module) -> None:
        self.module, self.optimizer = student, adamw(student)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def ours(setting: Setting, row: dict[str, Any]) -> Callable[[], float]:
    """The package's own step: its method, taps and trainer, as `assemble` puts them together."""
    from pathlib import Path

    from llmdistill.batch import Batch
    from llmdistill.config import TrainConfig
    from llmdistill.models.forward import TappedModel
    from llmdistill.models.taps import Recorder
    from llmdistill.objective import TOKENS, Objective
    from llmdistill.run.log import Stopwatch
    from llmdistill.run.trainer import Trainer
    from llmdistill.runtime.distributed import World

    device = setting.ids.device
    objective = TOKENS if setting.targets is None else Objective(tokens=False, sequences="classes")
    method = make_method(row["task"], setting.teacher.config, setting.student.config, objective)
    batch = Batch(setting.ids, torch.ones_like(setting.ids), setting.labels, targets=setting.targets)
    engine = _Engine(setting.student)
    trainer = Trainer(
        engine=engine,
        student=TappedModel(engine, Recorder(engine.module, method.student_taps)),
        teacher=TappedModel(setting.teacher, Recorder(setting.teacher, method.teacher_taps)),
        method=method,
        loader=None,  # a step is given its batches
        settings=TrainConfig(steps=1),
        seed=0,
        folder=Path(),
        world=World(rank=0, size=1, device=device),
    )
    clock = Stopwatch(device)

    def step() -> float:
        totals, *_ = trainer.train_step([batch], clock)
        return sum(weight * float(total) for weight, total in zip(method.weights.values(), totals, strict=True))

    return step


def make_method(task: str, teacher: Any, student: Any, objective: Any) -> Any:
    """kd and makd with their defaults; for the encoder attention KL and hidden MSE of every layer, and the labels."""
    from llmdistill.methods import build_method
    from llmdistill.methods.kd import KdConfig
    from llmdistill.methods.makd import MakdConfig
    from llmdistill.methods.minilm import MinilmConfig
    from llmdistill.methods.tinybert import TinybertConfig

    settings: dict[str, Any] = {"kd": KdConfig(), "makd": MakdConfig()}
    names = [task]
    if task == "encoder":
        settings["minilm"] = MinilmConfig(attention=1.0, value_relation=0.0, layers="uniform")
        settings["tinybert"] = TinybertConfig(attention=0.0, hidden=1.0, embedding=0.0)
        names = ["minilm", "tinybert", "sft"]
    return build_method(names, settings, teacher, student, objective)


class _Kept:
    """GPT-2's inner tensors by plain hooks, all of them kept until the loss has been taken."""

    def __init__(self, model: Any) -> None:
        self.outputs: dict[tuple[str, int], Tensor] = {}
        for layer, block in enumerate(model.transformer.h):
            inner = {"qkv": block.attn.c_attn, "up": block.mlp.c_fc, "down": block.mlp.c_proj, "hidden": block}
            for name, module in inner.items():
                module.register_forward_hook(self._keep(name, layer))

    def _keep(self, name: str, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self.outputs[name, layer] = output[0] if isinstance(output, tuple) else output

        return hook


def naive_makd(setting: Setting, _row: dict[str, Any]) -> Callable[[], float]:
    """MaKD as one writes it first: eager attention, every map and hidden state kept, logits of all tokens, autograd.

    MaKD eq. 12, 13, 15, 16 and 18 with the package's default layers and weights; no tensor is padded here, and all
    tokens but a sequence's first are labels.
    """
    optimizer = adamw(setting.student)
    kept = {"student": _Kept(setting.student), "teacher": _Kept(setting.teacher)}
    wanted = {"use_cache": False, "output_attentions": True}
    inputs = {"input_ids": setting.ids, "attention_mask": torch.ones_like(setting.ids), **wanted}
    layers = len(setting.student.transformer.h)

    def step() -> float:
        with torch.no_grad():
            teacher = setting.teacher(**inputs)
        student = setting.student(**inputs)
        of_student, of_teacher = kept["student"].outputs, kept["teacher"].outputs
        total = torch.zeros((), device=setting.ids.device)
        for layer in range(layers):
            if layer < layers // 2:
                for mine, theirs in zip(_matrices(of_student, layer), _matrices(of_teacher, layer), strict=True):
                    total = total + functional.mse_loss(mine, theirs)
            else:
                p, q = student.attentions[layer], teacher.attentions[layer]
                # Where the mask forbids, both are 0, and so is the difference of the logarithms.
                log_ratio = p.clamp(min=1e-30).log() - q.clamp(min=1e-30).log()
                total = total + (p * log_ratio).sum(-1).mean()
                total = total + functional.mse_loss(of_student["hidden", layer], of_teacher["hidden", layer])
        log_p, p = student.logits[:, :-1].log_softmax(-1), teacher.logits[:, :-1].softmax(-1)
        total = total - (p * log_p).sum(-1).mean()
        del student, teacher, log_p, p
        _update(total, optimizer)
        for each in kept.values():
            each.outputs.clear()
        return float(total.detach())

    return step


def _matrices(outputs: dict[tuple[str, int], Tensor], layer: int) -> list[Tensor]:
    return [*outputs["qkv", layer].chunk(3, -1), outputs["up", layer], outputs["down", layer]]
