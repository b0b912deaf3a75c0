"""The student under DeepSpeed: the split of the batch, the configuration, the engine, and how its weights are saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.artifacts import new_proven_folder
from llmdistill.batch import Mapped
from llmdistill.config import StudentConfig, TrainConfig
from llmdistill.data.prompts import record_prompt
from llmdistill.errors import UserError
from llmdistill.internals.deepspeed_names import judge_by_norm
from llmdistill.models.companions import save_model
from llmdistill.models.forms import finish, trains_form_alone
from llmdistill.models.pooling import DENSE, dense_of, read_sentence_settings, save_dense, save_pooling
from llmdistill.objective import Pooling
from llmdistill.progress import Activity
from llmdistill.runtime.devices import choose_dtype, default_device
from llmdistill.runtime.distributed import World, on_main, wait_until_visible
from llmdistill.runtime.ds_config import NO_TIMERS, resolve_ds_config


@dataclass(frozen=True)
class BatchSplit:
    """How the batch of one optimizer step is split: global = micro × ranks × accumulation."""

    micro_batch_size: int
    accumulation_steps: int


def split_batch(global_batch_size: int, micro_batch_size: int | None, world_size: int) -> BatchSplit:
    """Derive the accumulation steps from the global batch size, so that the number of ranks does not change the run.

    Raises UserError if the global batch size is not divisible.
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


def student_ds_config(
    ds_config: dict[str, Any], path: str, settings: TrainConfig, split: BatchSplit, *, output_dir: str
) -> dict[str, Any]:
    """Return the student's complete DeepSpeed configuration; a UserError if the file and the run contradict.

    The dtype is the run's setting, else that of the file, else the best for this machine.
    """
    in_file = ds_config.get("bf16", {}).get("enabled", "auto")
    if settings.dtype == "auto" and in_file != "auto":
        bf16 = bool(in_file)
    else:
        bf16 = choose_dtype(settings.dtype, default_device()) == "bf16"
    owned: dict[str, Any] = {
        "train_batch_size": settings.global_batch_size,
        "train_micro_batch_size_per_gpu": split.micro_batch_size,
        "gradient_accumulation_steps": split.accumulation_steps,
        "gradient_clipping": settings.max_grad_norm,
        "bf16.enabled": bf16,
        "optimizer.params.lr": settings.peak_learning_rate,
        "optimizer.params.betas": list(settings.betas),
        "optimizer.params.eps": settings.eps,
        "optimizer.params.weight_decay": settings.weight_decay,
        "tensorboard.output_path": output_dir,
        "tensorboard.job_name": "tensorboard",
    }
    reports, block = settings.report_to, ds_config.get("tensorboard")
    if reports is not None and "tensorboard" in reports:
        ds_config = {"tensorboard": {}, **ds_config}
    if reports is not None or (isinstance(block, dict) and block.get("enabled") == "auto"):
        owned["tensorboard.enabled"] = reports is None or "tensorboard" in reports
    # The run has its own log; DeepSpeed prints its lines only if the file sets steps_per_print.
    resolved = resolve_ds_config({"steps_per_print": 10**9, **NO_TIMERS, **ds_config}, owned, path)
    optimizer = resolved["optimizer"]
    if "type" not in optimizer:
        optimizer["type"] = "AdamW"
        # torch's AdamW needs no compiler, but DeepSpeed offloads the state of its own alone.
        optimizer["params"]["torch_adam"] = "offload_optimizer" not in resolved.get("zero_optimization", {})
    if optimizer["params"].get("torch_adam") and "foreach" not in optimizer["params"]:
        # One pass over the parameters; on a CPU torch's default implementation takes ten times as long.
        optimizer["params"].setdefault("fused", True)
    return resolved


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups: matrices with weight decay, vectors (biases, norms) without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


PROJECTORS = "distillation_projectors"
"""The attribute name of the projectors in a student during training; saved weights do not contain them."""


def add_projectors(
    model: PreTrainedModel, widths: Mapping[Mapped, tuple[int, int]], seed: int, *, embeddings: Tensor | None = None
) -> nn.ModuleDict:
    """Add projectors to a student: trainable matrices that map its widths to the teacher's.

    As a submodule of the student they are trained, sharded and saved in checkpoints like its own parameters. The
    matrix of "dense" is none of those that are returned: it becomes the student's Dense, unless the student has one.

    `embeddings` is the first value of the matrix for the embeddings of sentences, by default a random orthogonal one.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        matrices = {str(name): nn.Linear(n, m, bias=False, dtype=model.dtype) for name, (n, m) in widths.items()}
        for name in {"sentence", "dense"} & matrices.keys():
            weight = matrices[name].weight
            # Orthonormal columns keep cosines as they are, and the saved student may have no matrix.
            start = (
                nn.init.orthogonal_(torch.empty_like(weight, dtype=torch.float32)) if embeddings is None else embeddings
            )
            with torch.no_grad():
                weight.copy_(start)
    if "dense" in matrices and not hasattr(model, DENSE):
        model.add_module(DENSE, dense_of(matrices["dense"], nn.Identity()))
    projectors = nn.ModuleDict({name: matrix for name, matrix in matrices.items() if name != "dense"})
    if projectors:
        model.add_module(PROJECTORS, projectors)
    return projectors


def set_training(model: PreTrainedModel, *, checkpointing: bool) -> None:
    """Set a student to training mode, with activation checkpointing or without."""
    if checkpointing:
        # Reentrant checkpointing detaches the recorded tensors, and their gradients are then wrong without an error.
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if any(not parameter.requires_grad for parameter in model.parameters()):
            # With a frozen embedding, the input of the first layer needs no gradient, so its adapters would get none.
            model.enable_input_require_grads()
    model.train()


def build_engine(model: PreTrainedModel, ds_config: dict[str, Any], settings: TrainConfig) -> Any:
    """Return the student as a DeepSpeed engine; frozen parameters are not trained."""
    import deepspeed

    set_training(model, checkpointing=settings.activation_checkpointing)
    groups = parameter_groups(model, settings.weight_decay)
    with Activity("Starting DeepSpeed"):  # which may compile an optimizer
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=ds_config)
    judge_by_norm(engine, in_fp32=default_device().type != "cpu")  # a CPU would lose digits over so many numbers
    return engine


def monitor_of(engine: Any) -> Any:
    """Return DeepSpeed's monitor (TensorBoard and the other monitors in the DeepSpeed configuration) for a run's log.

    DeepSpeed itself would write the learning rate of each step to it and flush the file, also at steps that are not
    logged. Only where the configuration asks for its own measurements it goes on to write.
    """
    if engine.monitor is not None and not (engine.wall_clock_breakdown() or engine.flops_profiler_enabled()):
        engine.monitor.enabled = False  # what DeepSpeed asks before it writes; the log does not ask
    return engine.monitor


def learning_rate(settings: TrainConfig, step: int) -> float:
    """Return the learning rate of a step (0-based): linear warm-up, then the decay to the minimum at the last step."""
    peak = settings.peak_learning_rate
    if step < settings.warmup_steps:
        # + 1, because a first step at a rate of 0 would be lost.
        return peak * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1 - progress
    return settings.min_learning_rate + (peak - settings.min_learning_rate) * share


@dataclass(frozen=True)
class Template:
    """The untrained student, whose structure and files the trained one takes over."""

    folder: Path | str
    """The folder from which tokenizer and settings are copied."""
    load: Callable[[torch.dtype], PreTrainedModel]
    """Loads the model in a dtype; only its structure matters."""


def save_student(
    engine: Any,
    output: Path,
    *,
    template: Template,
    settings: StudentConfig,
    prompt: str | None = None,
    pooling: Pooling | None = None,
) -> None:
    """Save the student as a Hugging Face model, without projectors, in the form in which `settings` save it.

    Every rank must call this function. The tokenizer records the `prompt` of the training data. `pooling` makes
    embeddings of sentences, if the student learned these.
    """
    import deepspeed

    # On the CPU of rank 0: the trained parameters, or the student's full state dict, which has a tied parameter under
    # each of its names. Under ZeRO-3 every rank takes part for each parameter, one at a time, so no rank needs memory
    # for two whole models.
    state: dict[str, Tensor] = {}
    only_trained, is_main = trains_form_alone(settings), World.current().is_main
    sharded = engine.zero_optimization_stage() == 3
    for name, parameter in engine.module.named_parameters(remove_duplicate=only_trained):
        if name.startswith(f"{PROJECTORS}.") or (only_trained and not parameter.requires_grad):
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=sharded):
            if is_main:
                # A copy on a CPU too: after the block ZeRO-3 frees the whole parameter.
                state[name] = parameter.detach().to("cpu", copy=True)
    if is_main and not only_trained:
        persistent = engine.module.state_dict()
        buffers = dict(engine.module.named_buffers())
        state |= {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items() if name in persistent}
    dense = getattr(engine.module, DENSE, None)

    def write() -> None:
        prefix = f"{DENSE}."
        of_dense = {name.removeprefix(prefix): state.pop(name) for name in [*state] if name.startswith(prefix)}
        with torch.random.fork_rng(devices=[]):  # a missing head is initialized at random and then overwritten
            model = template.load(next(iter(state.values())).dtype)
        if hasattr(model, DENSE):  # its weights are not among those of the model
            delattr(model, DENSE)
        finish(model, settings, state)
        with new_proven_folder(output) as partial:
            save_model(model, partial, template.folder)
            if pooling is not None and dense is not None:
                save_dense(partial, dense, of_dense, pooling)
            elif pooling is not None and pooling != getattr(read_sentence_settings(partial), "pooling", None):
                save_pooling(partial, model.config.hidden_size, pooling)  # not the teacher's
            if prompt is not None:
                record_prompt(partial, prompt)

    on_main(write)
    wait_until_visible(output / "config.json")
