"""The rows of bench_step: one training step, by the package or by hand.

Models have random fp32 weights, and dropout is off everywhere. The optimizer is torch's fused AdamW, its state fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from benching import Work
from plain_engine import PlainEngine
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig, TrainConfig
from llmdistill.methods import build_method
from llmdistill.methods.kd import KdConfig
from llmdistill.methods.makd import MakdConfig
from llmdistill.methods.minilm import MinilmConfig
from llmdistill.methods.tinybert import TinybertConfig
from llmdistill.models.heads import CLASSES
from llmdistill.models.load import fuse_gelu
from llmdistill.objective import TOKENS, Objective
from llmdistill.runtime.distributed import World
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.engine import split_batch, student_ds_config
from llmdistill.step.tap_models import tap_student, tap_teacher
from llmdistill.students.install import install
from llmdistill.students.modules import LowRankLinear
from llmdistill.students.sizes import plan_factors
from llmdistill.training.trainer import Trainer

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


def make_setting(row: dict[str, Any], device: torch.device) -> Setting:
    """The models and the batch. A share of the labels, at the end of each sequence, is the response."""
    torch.manual_seed(0)
    tokens, share = row["tokens"], row.get("labeled", 1.0)
    build_model = bert if row["task"] == "encoder" else gpt2
    teacher, student = (build_model(row, layers) for layers in (row["layers"], row["student_layers"]))
    if "rank" in row:
        low_rank(student, FactorizeConfig(rank=row["rank"]))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(teacher.config.vocab_size, (row["batch"], tokens), generator=generator)
    labels, targets = ids.masked_fill(torch.arange(tokens) < round((1 - share) * tokens), IGNORE), None
    if row["task"] == "encoder":
        labels.fill_(IGNORE)
        targets = torch.randint(2, (row["batch"],), generator=generator).to(device)
    if row.get("way") in ("floor", "ours", "dense"):  # as the main job loads them
        fuse_gelu(teacher)
        fuse_gelu(student)
    teacher.eval().requires_grad_(False)
    return Setting(teacher.to(device), student.to(device).train(), ids.to(device), labels.to(device), targets)


def gpt2(row: dict[str, Any], layers: int) -> PreTrainedModel:
    sizes = {"n_embd": row["width"], "n_head": row["heads"], "vocab_size": row["vocabulary"]}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    # The naive step reads the attention maps off both models, and only eager attention has them.
    attention = "eager" if row.get("way") == "naive" else "sdpa"
    return GPT2LMHeadModel._from_config(GPT2Config(n_layer=layers, **sizes, **dropout), attn_implementation=attention)


def bert(row: dict[str, Any], layers: int) -> PreTrainedModel:
    sizes = {"hidden_size": row["width"], "intermediate_size": 4 * row["width"], "num_attention_heads": row["heads"]}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = BertConfig(num_hidden_layers=layers, vocab_size=row["vocabulary"], **sizes, **dropout)
    return BertForSequenceClassification._from_config(config, attn_implementation="sdpa")


def low_rank(model: PreTrainedModel, factorize: FactorizeConfig) -> None:
    """Factorized modules of random weights: a step costs the same whatever they hold."""
    install(model, plan_factors(model, factorize))
    for module in model.modules():
        if isinstance(module, LowRankLinear):
            nn.init.normal_(module.A.weight, std=0.02)
            # The product is as large as a dense weight.
            nn.init.normal_(module.B.weight, std=module.A.in_features**-0.5)


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: {"task": kd, makd or encoder, "way": floor, ours, naive or dense, and sizes}."""
    setting = make_setting(row, device)
    dense = partial(ours, forward_of=densely)
    ways = {"floor": floor, "ours": ours, "naive": naive_makd, "dense": dense}
    return Work(ways[row["way"]](setting, row))


def plain_engine(student: nn.Module) -> PlainEngine:
    """With the optimizer of all rows; its learning rate is next to nothing, so that every call does the same."""
    return PlainEngine(student, torch.optim.AdamW(student.parameters(), lr=1e-8, fused=True))


def ds_config(name: str, train: TrainConfig, world_size: int, **zero: Any) -> dict[str, Any]:
    """A shipped DeepSpeed configuration for a training, without a log; `zero` changes its section of ZeRO."""
    shipped = read_ds_config(name)
    del shipped["tensorboard"]
    shipped["zero_optimization"] |= zero
    split = split_batch(train.global_batch_size, train.micro_batch_size, world_size)
    return student_ds_config(shipped, name, train, split, output_dir="none")


def floor(setting: Setting, _row: dict[str, Any]) -> Callable[[], float]:
    """What no distillation can do without: the teacher's forward pass, and a step of the student on plain labels.

    All tokens are labels, whatever share a row supervises. Nothing is kept of the teacher.
    """
    engine = plain_engine(setting.student)
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
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def ours(
    setting: Setting,
    row: dict[str, Any],
    make_engine: Callable[[nn.Module], Any] = plain_engine,
    forward_of: Callable[[Any], Any] = lambda model: model,
    batches: Callable[[int], list[Batch]] | None = None,
    taught_by: Callable[[Any, Any, Batch], Any] = lambda live, method, batch: live,
) -> Callable[[], float]:
    """The package's own step: its method, taps and trainer, as `assemble` puts them together.

    With `lengths` in the row, each row of the batch is packed with sequences of these lengths; `kernels` are those
    of both models' layers. `batches` makes those of each step anew; `taught_by` puts another in the place of the
    teacher, for the method and the batch.
    """
    objective = TOKENS if setting.targets is None else Objective(tokens=False, targets=CLASSES)
    method = make_method(row["task"], setting.teacher.config, setting.student.config, objective)
    samples = tuple((row,) for row in range(len(setting.ids)))
    mask = torch.ones_like(setting.ids)
    batch = Batch(setting.ids, mask, setting.labels, targets=setting.targets, sample_ids=samples)
    if "lengths" in row:
        batch = packed(batch, row["lengths"])
    engine, kernels = make_engine(setting.student), row.get("kernels", "transformers")
    student = tap_student(method, engine.module, forward=forward_of(engine), layer_kernels=kernels)
    live = tap_teacher(method, setting.teacher, forward=forward_of(setting.teacher), layer_kernels=kernels)
    trainer, turn = trainer_of(engine, student, taught_by(live, method, batch), method), count()

    def step() -> float:
        with replace(World.current(), device=setting.ids.device).entered():
            losses, _ = trainer.train_step([batch] if batches is None else batches(next(turn)))
        totals = losses.sum(0)
        return sum(weight * float(total) for weight, total in zip(method.weights.values(), totals, strict=True))

    return step


def trainer_of(engine: Any, student: Any, teacher: Any, method: Any, train: Any = None) -> Any:
    models: Any = {"engine": engine, "student": student, "teacher": teacher, "loader": None}
    return Trainer(**models, method=method, settings=train or TrainConfig(steps=1), seed=0)


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
    """kd with its defaults, kl without its labels, makd as in the paper; the encoder: attention KL, hidden MSE of every
    layer, the labels."""
    settings: dict[str, Any] = {
        "kd": KdConfig(ratio=1.0 if task == "kl" else 0.5),
        "makd": MakdConfig(scale="plain"),
        "minilm": MinilmConfig(attention=1.0, value_relation=0.0, teacher_layers="uniform"),
        "tinybert": TinybertConfig(attention=0.0, hidden=1.0, embedding=0.0),
    }
    names = {"encoder": ["minilm", "tinybert", "sft"], "kl": ["kd"]}.get(task, [task])
    return build_method(names, settings, teacher, student, objective)


def _kept(model: Any) -> dict[tuple[str, int], Tensor]:
    """GPT-2's inner tensors by plain hooks, all of them kept until the loss has been taken."""
    outputs: dict[tuple[str, int], Tensor] = {}

    def keep(_module: nn.Module, _inputs: Any, output: Any, *, name: str, layer: int) -> None:
        outputs[name, layer] = output[0] if isinstance(output, tuple) else output

    for layer, block in enumerate(model.transformer.h):
        inner = {"qkv": block.attn.c_attn, "up": block.mlp.c_fc, "down": block.mlp.c_proj, "hidden": block}
        for name, module in inner.items():
            module.register_forward_hook(partial(keep, name=name, layer=layer))
    return outputs


def naive_makd(setting: Setting, _row: dict[str, Any]) -> Callable[[], float]:
    """MaKD as one writes it first: eager attention, every map and hidden state kept, logits of all tokens, autograd.

    MaKD eq. 12, 13, 15, 16 and 18 with the package's default layers and weights; no tensor is padded here, and all
    tokens but a sequence's first are labels.
    """
    engine = plain_engine(setting.student)
    of_student, of_teacher = _kept(setting.student), _kept(setting.teacher)
    wanted = {"use_cache": False, "output_attentions": True}
    inputs = {"input_ids": setting.ids, "attention_mask": torch.ones_like(setting.ids), **wanted}
    layers = len(setting.student.transformer.h)

    def step() -> float:
        with torch.no_grad():
            teacher = setting.teacher(**inputs)
        student = setting.student(**inputs)
        total = torch.zeros((), device=setting.ids.device)
        for layer in range(layers):
            if layer < layers // 2:
                for name, matrices in (("qkv", 3), ("up", 1), ("down", 1)):
                    pair = (each[name, layer].chunk(matrices, -1) for each in (of_student, of_teacher))
                    total = total + sum(map(functional.mse_loss, *pair))
            else:
                p, q = student.attentions[layer], teacher.attentions[layer]
                # Where the mask forbids, both are 0, and so is the difference of the logarithms.
                log_ratio = p.clamp(min=1e-30).log() - q.clamp(min=1e-30).log()
                total = total + (p * log_ratio).sum(-1).mean()
                total = total + functional.mse_loss(of_student["hidden", layer], of_teacher["hidden", layer])
        log_p, p = student.logits[:, :-1].log_softmax(-1), teacher.logits[:, :-1].softmax(-1)
        total = total - (p * log_p).sum(-1).mean()
        del student, teacher, log_p, p
        engine.backward(total)
        engine.step()
        of_student.clear()
        of_teacher.clear()
        return float(total.detach())

    return step
