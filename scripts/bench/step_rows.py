"""The rows of bench_step: one training step, by the package or by hand.

The optimizer is torch's fused AdamW, its state fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from benching import Work
from step_setting import IGNORE, Setting, make_setting
from torch import Tensor, nn
from torch.nn import functional


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: {"task": kd, makd or encoder, "way": floor, ours, naive, dense or trl, and sizes}."""
    setting = make_setting(row, device)
    if row["way"] == "trl":
        from step_trl import trl_gkd  # the package's own environment has no trl

        return Work(trl_gkd(setting, adamw(setting.student)))
    ways = {"floor": floor, "ours": ours, "naive": naive_makd, "dense": partial(ours, forward_of=densely)}
    return Work(ways[row["way"]](setting, row))


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


class Engine:
    """DeepSpeed's engine as far as the trainer knows it, without DeepSpeed: the floor has none either."""

    def __init__(
        self, student: nn.Module, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None = None
    ) -> None:
        """`max_grad_norm` clips the gradients; None leaves them as they are."""
        self.module, self.optimizer, self._max_grad_norm = student, optimizer, max_grad_norm

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self._max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def plain_engine(student: nn.Module) -> Engine:
    return Engine(student, adamw(student))


def ours(
    setting: Setting,
    row: dict[str, Any],
    make_engine: Callable[[nn.Module], Any] = plain_engine,
    world: Any = None,
    forward_of: Callable[[Any], Any] = lambda model: model,
) -> Callable[[], float]:
    """The package's own step: its method, taps and trainer, as `assemble` puts them together; alone without a world.

    With `lengths` in the row, each row of the batch is packed with sequences of these lengths.
    """

    from llmdistill.batch import Batch
    from llmdistill.objective import TOKENS, Objective
    from llmdistill.run.wiring import tapped
    from llmdistill.runtime.distributed import World

    objective = TOKENS if setting.targets is None else Objective(tokens=False, sequences="classes")
    method = make_method(row["task"], setting.teacher.config, setting.student.config, objective)
    batch = Batch(setting.ids, torch.ones_like(setting.ids), setting.labels, targets=setting.targets)
    if "lengths" in row:
        batch = packed(batch, row["lengths"])
    engine = make_engine(setting.student)
    student = tapped(method, "student", engine.module, forward=forward_of(engine))
    teacher = tapped(method, "teacher", setting.teacher, forward=forward_of(setting.teacher))
    world = world or World(rank=0, size=1, device=setting.ids.device)
    trainer = trainer_of(engine, student, teacher, method, world)

    def step() -> float:
        losses, _ = trainer.train_step([batch])
        totals = losses.sum(0)
        return sum(weight * float(total) for weight, total in zip(method.weights.values(), totals, strict=True))

    return step


def trainer_of(engine: Any, student: Any, teacher: Any, method: Any, world: Any, train: Any = None) -> Any:
    """A trainer whose steps are given their batches."""
    from llmdistill.config import TrainConfig
    from llmdistill.run.trainer import Trainer

    models: Any = {"engine": engine, "student": student, "teacher": teacher, "loader": None}
    return Trainer(**models, method=method, settings=train or TrainConfig(steps=1), seed=0, world=world)


def packed(batch: Any, lengths: list[int]) -> Any:
    """The tokens of a batch as sequences of these lengths, the same in each row."""
    numbers_T = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths, start=1)])
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    device = batch.input_ids.device
    first_T = (positions_T == 0).to(device)
    return replace(
        batch,
        attention_mask=numbers_T.to(device).expand_as(batch.input_ids),
        position_ids=positions_T.to(device).expand_as(batch.input_ids),
        labels=batch.labels.masked_fill(first_T, IGNORE),
    )


def densely(model: Any) -> Callable[..., Any]:
    """A forward pass that masks other sequences by one (B, 1, T, T), which it makes anew for each batch."""

    def forward(*, sequences: Any, input_ids: Tensor, **inputs: Any) -> Any:
        firsts = torch.zeros(input_ids.numel(), dtype=torch.int64, device=input_ids.device)
        firsts[sequences.starts[:-1].long()] = 1
        numbers_BT = firsts.cumsum(0).view_as(input_ids)
        mask_B1TT = (numbers_BT[:, None, :, None] == numbers_BT[:, None, None, :]).tril()
        return model(input_ids=input_ids, attention_mask=mask_B1TT, **inputs)

    return forward


def make_method(task: str, teacher: Any, student: Any, objective: Any) -> Any:
    """kd with its defaults, makd as in the paper; the encoder: attention KL, hidden MSE of every layer, the labels."""
    from llmdistill.methods import build_method
    from llmdistill.methods.kd import KdConfig
    from llmdistill.methods.makd import MakdConfig
    from llmdistill.methods.minilm import MinilmConfig
    from llmdistill.methods.tinybert import TinybertConfig

    settings: dict[str, Any] = {"kd": KdConfig(), "makd": MakdConfig(scale="plain")}
    names = [task]
    if task == "encoder":
        settings["minilm"] = MinilmConfig(attention=1.0, value_relation=0.0, teacher_layers="uniform")
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
