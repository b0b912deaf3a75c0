"""The student under DeepSpeed: how the batch is split, which configuration results, and how its weights come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.batch import Aspect
from llmdistill.config import LoraConfig, TrainConfig
from llmdistill.errors import UserError
from llmdistill.factorize.checkpoint import copy_companions
from llmdistill.files import new_folder
from llmdistill.models.adapters import add_lora, load_adapters, merge_lora
from llmdistill.runtime.distributed import World, barrier
from llmdistill.runtime.ds_config import resolve_ds_config


@dataclass(frozen=True)
class BatchSplit:
    """How one optimizer step's batch is divided: global = micro × ranks × accumulation."""

    micro_batch_size: int
    accumulation_steps: int


def split_batch(global_batch_size: int, micro_batch_size: int | None, world_size: int) -> BatchSplit:
    """Derive the accumulation from the global batch, so that more or fewer ranks train the same run.

    Raises:
        UserError: it does not divide; the message proposes the nearest global batch that does.
    """
    unit = (micro_batch_size or 1) * world_size
    if global_batch_size % unit != 0:
        nearest = max(unit, round(global_batch_size / unit) * unit)
        parts = f"{world_size} ranks" + (f" x train.micro_batch_size {micro_batch_size}" if micro_batch_size else "")
        raise UserError(
            f"train.global_batch_size {global_batch_size} does not divide by {parts}: "
            f"the nearest that does is {nearest}"
        )
    if micro_batch_size is None:
        return BatchSplit(global_batch_size // world_size, 1)
    return BatchSplit(micro_batch_size, global_batch_size // unit)


def resolve_dtype(wanted: str, ds_config: dict[str, Any]) -> str:
    """The run's number format: its own word, else the DeepSpeed configuration's, else what this machine is good at."""
    if wanted != "auto":
        return wanted
    in_file = ds_config.get("bf16", {}).get("enabled", "auto")
    if in_file != "auto":
        return "bf16" if in_file else "fp32"
    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "fp32"


TORCH_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def student_ds_config(
    ds_config: dict[str, Any], path: str, settings: TrainConfig, split: BatchSplit, *, output_dir: str
) -> dict[str, Any]:
    """The complete DeepSpeed configuration of the student.

    Raises:
        UserError: the file and the run disagree.
    """
    dtype = resolve_dtype(settings.dtype, ds_config)
    owned: dict[str, Any] = {
        "train_batch_size": settings.global_batch_size,
        "train_micro_batch_size_per_gpu": split.micro_batch_size,
        "gradient_accumulation_steps": split.accumulation_steps,
        "gradient_clipping": settings.max_grad_norm,
        "bf16.enabled": dtype == "bf16",
        "optimizer.params.lr": settings.learning_rate,
        "optimizer.params.betas": list(settings.betas),
        "optimizer.params.eps": settings.eps,
        "optimizer.params.weight_decay": settings.weight_decay,
        "tensorboard.output_path": output_dir,
        "tensorboard.job_name": "tensorboard",
    }
    # The run has a log of its own; DeepSpeed's lines come only where the file asks for them.
    resolved = resolve_ds_config({"steps_per_print": 10**9, **ds_config}, owned, path)
    optimizer = resolved["optimizer"]
    if "type" not in optimizer:
        optimizer["type"] = "AdamW"
        optimizer["params"]["torch_adam"] = "offload_optimizer" not in resolved.get("zero_optimization", {})
    return resolved


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors (biases, norms) without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


PROJECTORS = "distillation_projectors"
"""Name under which a student carries its projectors while it trains; no state that is gathered has them."""


def add_projectors(model: PreTrainedModel, widths: Mapping[Aspect, tuple[int, int]], seed: int) -> nn.ModuleDict:
    """Give a student the learnt matrices that map its widths to its teacher's, as part of itself.

    So they are trained, sharded and kept in checkpoints as its own parameters are; whatever is gathered of it leaves
    them out.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        matrices = {aspect: nn.Linear(n, m, bias=False, dtype=model.dtype) for aspect, (n, m) in widths.items()}
    projectors = nn.ModuleDict({str(aspect): matrix for aspect, matrix in matrices.items()})
    if matrices:
        model.add_module(PROJECTORS, projectors)
    return projectors


def build_engine(model: PreTrainedModel, ds_config: dict[str, Any], settings: TrainConfig) -> Any:
    """The student as a DeepSpeed engine; only parameters that are not frozen are trained."""
    import deepspeed

    if settings.activation_checkpointing:
        # Reentrant checkpointing detaches what the taps keep, and its gradients are silently wrong.
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if any(not parameter.requires_grad for parameter in model.parameters()):
            # Under a frozen embedding the first layer's input would need no gradient, and its adapters get none.
            model.enable_input_require_grads()
    model.train()
    groups = parameter_groups(model, settings.weight_decay)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=ds_config)
    return engine


def set_learning_rate(engine: Any, learning_rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate


def full_state_dict(engine: Any, world: World) -> dict[str, Tensor] | None:
    """The student's whole state on the CPU of rank 0, None elsewhere; every rank must call it.

    Under ZeRO-3 a parameter is gathered at a time, so no rank needs room for two whole models.
    """
    state = _gather(engine, world, engine.module.named_parameters(remove_duplicate=False))
    if state is not None:
        persistent = set(engine.module.state_dict())
        for name, buffer in engine.module.named_buffers():
            if name in persistent:
                state[name] = buffer.detach().to("cpu", copy=True)
    return state


def trained_state_dict(engine: Any, world: World) -> dict[str, Tensor] | None:
    """The parameters that are trained, on the CPU of rank 0, None elsewhere; every rank must call it."""
    return _gather(engine, world, [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad])


def _gather(engine: Any, world: World, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor] | None:
    import deepspeed

    sharded = engine.zero_optimization_stage() == 3
    state: dict[str, Tensor] = {}
    for name, parameter in named:
        if name.startswith(f"{PROJECTORS}."):
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=sharded):
            if world.is_main:
                state[name] = parameter.detach().to("cpu", copy=True)
    return state if world.is_main else None


def save_student(
    engine: Any,
    world: World,
    *,
    template: Callable[[torch.dtype], PreTrainedModel],
    source: Path | str,
    output: Path,
    lora: LoraConfig | None = None,
) -> None:
    """Write the student as a Hugging Face model, its adapters merged, its projectors left out.

    Args:
        engine: the trained student.
        world: this process; every rank must call it.
        template: loads the student as it was before training; its structure is what is written.
        source: the folder or hub name that it was loaded from, whose tokenizer is copied.
        output: where to.
        lora: the adapters it was trained with; without a rank it has none.
    """
    has_adapters = lora is not None and lora.rank is not None
    state = trained_state_dict(engine, world) if has_adapters else full_state_dict(engine, world)
    if state is not None:
        with torch.random.fork_rng(devices=[]):  # a head that the source lacks is drawn, and then overwritten
            model = template(next(iter(state.values())).dtype)
        if lora is not None and has_adapters:
            add_lora(model, lora, seed=0)  # whatever the seed: the trained ones take their place
            load_adapters(model, state)
            merge_lora(model)
        else:
            model.load_state_dict(state)
        with new_folder(output) as partial:
            model.save_pretrained(partial)
            copy_companions(source, partial)
    barrier()
