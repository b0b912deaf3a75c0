"""The names that transformers' Trainer, TRL and others have for our settings, for the hint after an unknown one."""

from __future__ import annotations

from collections.abc import Collection

_OURS: dict[str, tuple[str, ...]] = {
    # How long, and how fast.
    "train.learning_rate": ("lr", "peak_lr", "max_lr", "peak_learning_rate"),
    "train.min_learning_rate": ("min_lr", "lr_min"),
    "train.steps": ("max_steps", "num_steps", "n_steps", "total_steps", "training_steps", "max_iters", "iterations"),
    "train.epochs": ("num_train_epochs", "num_epochs", "n_epochs", "max_epochs", "epoch"),
    "train.schedule": ("lr_scheduler_type", "lr_scheduler", "scheduler"),
    "train.warmup_steps": ("num_warmup_steps", "warmup"),
    "train.max_grad_norm": ("grad_clip", "gradient_clipping", "clip_grad_norm"),
    "train.betas": ("adam_beta1", "adam_beta2", "beta1", "beta2"),
    "train.eps": ("adam_epsilon", "adam_eps", "epsilon"),
    "train.weight_decay": ("wd",),
    # Batches and memory.
    "train.global_batch_size": ("train_batch_size", "gradient_accumulation_steps", "grad_accum", "accumulation_steps"),
    "train.micro_batch_size": ("per_device_train_batch_size", "per_gpu_train_batch_size", "device_batch_size"),
    "scoring.batch_size": ("per_device_eval_batch_size", "eval_batch_size"),
    "train.activation_checkpointing": ("gradient_checkpointing",),
    "train.compile": ("torch_compile",),
    "train.dtype": ("fp16", "bf16", "torch_dtype", "mixed_precision", "precision", "half"),
    "ds_config": ("deepspeed", "deepspeed_config", "ds_config_file"),
    # What is logged and saved.
    "train.log_every": ("logging_steps", "log_steps", "log_interval"),
    "train.validate_every": ("eval_steps", "eval_every", "eval_strategy", "evaluation_strategy", "eval_interval"),
    "train.save_every": ("save_steps", "checkpoint_every", "save_interval", "save_strategy"),
    "train.keep_checkpoints": ("save_total_limit",),
    "train.keep_best": ("load_best_model_at_end", "metric_for_best_model"),
    "train.report_to": ("wandb", "use_wandb", "tensorboard", "logger"),
    "output_dir": ("out_dir", "output", "save_dir", "run_name", "logging_dir"),
    "resume": ("resume_from_checkpoint", "overwrite_output_dir"),
    "seed": ("data_seed", "random_seed"),
    # Models.
    "teacher.model": ("teacher_model_name_or_path", "teacher_model", "teacher_path", "teacher_name_or_path"),
    "teacher.dtype": ("teacher_dtype",),
    "teacher.url": ("teacher_model_server_url", "teacher_server"),
    "student.model": ("model_name_or_path", "model", "student_model_name_or_path", "student_model", "student_path"),
    "student.shape": ("num_hidden_layers", "num_layers", "hidden_size", "num_student_layers"),
    "student.lora.rank": ("use_peft", "use_lora", "lora", "lora_r", "lora_rank"),
    "student.lora.alpha": ("lora_alpha",),
    "student.lora.dropout": ("lora_dropout",),
    "student.lora.targets": ("lora_target_modules", "target_modules"),
    "student.quantize.weights": ("load_in_8bit", "load_in_4bit", "quantization", "bits"),
    "student.factorize.target_params": ("compression", "compression_ratio", "param_ratio", "sparsity"),
    # Data.
    "data.train": ("dataset_name", "dataset", "dataset_path", "train_file", "train_data", "train_dataset", "data_path"),
    "data.valid": ("validation_file", "eval_dataset", "eval_file", "valid_file", "eval_data", "validation"),
    "data.tests": ("test_file", "test_data", "test_dataset"),
    "data.text.field": ("dataset_text_field", "text_column", "text_field"),
    "data.max_length": ("max_seq_length", "max_seq_len", "max_new_tokens", "max_completion_length", "block_size"),
    # Losses.
    "kd.temperature": ("temp", "tau", "kd_temperature", "distillation_temperature"),
    "kd.ratio": ("kd_ratio", "kd_weight", "distill_weight", "alpha_kd"),
    "kd.beta": ("gkd_beta", "jsd_beta"),
    "data.on_policy": ("lmbda", "lambda", "on_policy_fraction"),
    "method": ("seq_kd", "loss", "loss_type", "objective", "distillation_method", "loss_fn"),
}
_NOTES = {
    "num_train_epochs": "; for instructions train.steps",
    "gradient_accumulation_steps": ", the sequences of a whole step, from which the accumulation follows",
    "accumulation_steps": ", the sequences of a whole step, from which the accumulation follows",
    "fp16": " fp32 or bf16",
    "max_new_tokens": ", prompt and answer together",
    "max_completion_length": ", prompt and answer together",
    "load_in_4bit": " int4",
    "load_in_8bit": " int8",
    "seq_kd": " seqkd",
}
_SETTING = {name: ours for ours, names in _OURS.items() for name in names}


def our_name(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return a hint at the setting that another library calls by this name; "" if none of `known` is one.

    A section before the name does not count, and dashes count as underscores. In `known` a setting may also have its
    own name alone.
    """
    other = name.rpartition(".")[2].replace("-", "_")
    ours = _SETTING.get(other, "")
    if ours not in known:
        ours = ours.rpartition(".")[2]
    return f"; here it is {prefix}{ours}{_NOTES.get(other, '')}" if ours and ours in known else ""
