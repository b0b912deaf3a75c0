"""Checks a DeepSpeed configuration by DeepSpeed's own models, before anything that takes long."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any, get_args

from llmdistill.config.strict import did_you_mean
from llmdistill.errors import UserError

_OF_ADAM = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
"""Parameters of Adam and AdamW that DeepSpeed removes before it makes the optimizer."""


def check_ds_config(resolved: dict[str, Any], path: str) -> None:
    """Raise a UserError if DeepSpeed does not know a key of a resolved configuration, at any depth, or refuses a value.

    DeepSpeed ignores unknown keys at some depths, and finds some errors only when it makes the optimizer, after the
    teacher is scored. This function loads DeepSpeed.
    """
    with quiet_deepspeed():
        from deepspeed.runtime.config import DeepSpeedConfig

        _validate(top_level(), resolved, path)
        try:  # DeepSpeed computes the whole batch from its parts; the ranks may not have joined yet
            DeepSpeedConfig({key: value for key, value in resolved.items() if key != "train_batch_size"})
        except Exception as error:  # it compares settings with each other, by several types of exceptions
            said = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{path}: DeepSpeed refuses the configuration ({said}); fix or remove the key") from error
        _check_optimizer(resolved["optimizer"], path)


def compiles_optimizer(resolved: dict[str, Any]) -> bool:
    """Return whether DeepSpeed compiles the optimizer of a resolved configuration in place of torch's."""
    kind, params = str(resolved["optimizer"]["type"]).lower(), resolved["optimizer"]["params"]
    if kind == "adagrad":
        return "offload_optimizer" in resolved.get("zero_optimization", {})
    return kind in ("adam", "adamw", "muon", "lion", "lamb") and not params.get("torch_adam")


def check_zero(settings: dict[str, Any], where: str) -> None:
    """Raise a UserError if DeepSpeed does not know a key of zero_optimization, or refuses its value; see above."""
    with quiet_deepspeed():
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        _validate(DeepSpeedZeroConfig, settings, where)


@contextmanager
def quiet_deepspeed(level: int = logging.WARNING) -> Iterator[None]:
    """Hide what DeepSpeed logs up to a level: it writes to stdout, also when it is imported."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(before)


@cache
def top_level() -> Any:
    """Return a pydantic model of all keys: DeepSpeed has models of most blocks, but none of the whole file."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime import config as ds
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    numbers = (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        *("steps_per_print", "gradient_predivide_factor", "sequence_parallel_size", "vocabulary_size"),
    )
    switches = (
        *("prescale_gradients", "disable_allgather", "dump_state", "disable_python_gc", "wall_clock_breakdown"),
        *("memory_breakdown", "dataloader_drop_last", "managed_gradient_accumulation", "zero_allow_untested_optimizer"),
        *("zero_force_ds_cpu_optimizer", "use_data_before_expert_parallelism"),
    )
    checked_by_deepspeed = (
        *("communication_data_type", "seq_parallel_communication_data_type", "gradient_allreduce_op", "log_level"),
        *("scheduler", "pipeline", "autotuning", "data_efficiency", "datastates_ckpt", "expert_parallel"),
    )
    data_types = ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules")
    return _model(
        "ds_config",
        **dict.fromkeys(numbers, 0.0),
        **dict.fromkeys(switches, False),
        **dict.fromkeys(checked_by_deepspeed),
        **{name: field.annotation for name, field in DeepSpeedMonitorConfig.model_fields.items()},
        zero_optimization=DeepSpeedZeroConfig,
        bf16=DeepSpeedBF16Config,
        bfloat16=DeepSpeedBF16Config,
        fp16=DeepSpeedFP16Config,
        comms_logger=CommsLoggerConfig,
        hybrid_engine=ds.HybridEngineConfig,
        compile=ds.CompileConfig,
        weight_quantization=ds.WeightQuantConfig,
        tensor_parallel=ds.get_tensor_parallel_config({}).__class__,
        timers=_model("timers", throughput=DeepSpeedThroughputTimerConfig),
        aio=_model("aio", **AIO_DEFAULT_DICT),
        flops_profiler=_model("flops_profiler", **vars(ds.DeepSpeedFlopsProfilerConfig({}))),
        activation_checkpointing=_model("activations", **vars(ds.DeepSpeedActivationCheckpointingConfig({}))),
        torch_autocast=_model("torch_autocast", enabled=False, dtype=None, lower_precision_safe_modules=list),
        data_types=_model("data_types", **dict.fromkeys(data_types)),
        optimizer=_model("optimizer", type="", params=dict, legacy_fusion=False),
        checkpoint=_model(
            "checkpoint",
            **{"tag_validation": "", "checkpoint_serialization": False, "writer": dict},
            **{"load_universal": False, "use_node_local_storage": False},
            parallel_write=_model("parallel_write", pipeline_stage=False),
        ),
    )


def _model(name: str, **keys: Any) -> Any:
    """Return a pydantic model of optional keys, each given by its type or by a value of its type; None fits all."""
    from pydantic import ConfigDict, StrictBool, StrictFloat, StrictStr, create_model

    # A float takes whole numbers too, and 5e8 in JSON is a float.
    plain = {bool: StrictBool, int: StrictFloat, float: StrictFloat, str: StrictStr, type(None): Any}
    fields: dict[str, Any] = {key: (plain.get(type(kind), kind), None) for key, kind in keys.items()}
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def _validate(model: Any, values: dict[str, Any], path: str) -> None:
    """Raise a UserError for the first key or value that a pydantic model refuses."""
    from pydantic import ValidationError

    try:
        model(**values)
    except ValidationError as error:
        wrong = error.errors()[0]
        *parents, name = map(str, wrong["loc"])
        key = ".".join([*parents, name])
        if wrong["type"] == "extra_forbidden":
            for parent in parents:
                kind = _keys(model)[parent]
                model = next(part for part in (kind, *get_args(kind)) if hasattr(part, "model_fields"))
            hint = did_you_mean(key, [".".join([*parents, known]) for known in _keys(model)])
            raise UserError(f"{path}: {key}: DeepSpeed has no such setting{hint}; fix or remove it") from error
        given, why = repr(wrong["input"]), wrong["msg"][:1].lower() + wrong["msg"][1:]
        given = given if len(given) <= 60 else f"{given[:57]}..."
        raise UserError(f"{path}: {key} is {given}: DeepSpeed refuses it ({why}); fix or remove it") from error


def _keys(model: Any) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _check_optimizer(optimizer: dict[str, Any], path: str) -> None:
    """Raise a UserError if there is no such optimizer, or it does not take a parameter."""
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    kind, params = optimizer["type"], optimizer["params"]
    adams = [torch.optim.AdamW, DeepSpeedCPUAdam, FusedAdam]
    known: dict[str, list[Any]] = {
        # torch's by the names of their classes, and DeepSpeed's in small letters: the device decides between several.
        **{name: [kind] for name, kind in vars(torch.optim).items() if isinstance(kind, type)},
        **{"Adam": adams, "AdamW": adams},
        **{name: [] for name in DEEPSPEED_OPTIMIZERS},  # some have no class with a signature
        **{"adam": adams, "adamw": adams, "lamb": [FusedLamb], "lion": [FusedLion, DeepSpeedCPULion]},
        "adagrad": [torch.optim.Adagrad, DeepSpeedCPUAdagrad],
    }
    name = str(kind) if str(kind) in known else str(kind).lower()
    if name not in known:
        hint = did_you_mean(str(kind), known)
        raise UserError(f"{path}: optimizer.type is {kind!r}, which DeepSpeed does not have{hint}; take AdamW")
    classes = known[name][:1] if params.get("torch_adam") else known[name]
    if not classes:
        return
    taken = set().union(*(signature(optimizer).parameters for optimizer in classes))
    taken |= _OF_ADAM if known[name] is known["adam"] else set()
    unknown = next((name for name in params if name not in taken), None)
    if unknown is not None:
        listed = ", ".join(sorted(taken - {"params", "model_params"}))
        raise UserError(
            f"{path}: optimizer.params.{unknown}: {kind} has no such parameter, only {listed}; remove it, or take AdamW"
        )
