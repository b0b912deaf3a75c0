"""What can be said of a run on tasks before anything is trained, and where that is a mistake."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llmdistill.config.glue import GlueConfig
from llmdistill.data.pairs import encode_pairs
from llmdistill.errors import UserError
from llmdistill.experiments.glue.finetune import num_classes, resolve_engine, train_settings
from llmdistill.experiments.glue.grid import grid_of
from llmdistill.methods import METHODS, Method, build_method
from llmdistill.models.classifier import copies_classifier
from llmdistill.models.families import shape_of
from llmdistill.objective import Objective
from llmdistill.runtime.engine import resolve_dtype
from llmdistill.tasks.glue_data import TaskData
from llmdistill.tasks.glue_files import TASKS


def task_method(config: GlueConfig, task: str, student: PreTrainedConfig, teacher: PreTrainedConfig | None) -> Method:
    """The method of a task; labels are learnt too where nothing else teaches the classifier.

    Raises:
        UserError: a method's settings do not fit the models.
    """
    objective = Objective(tokens=False, sequences="classes" if TASKS[task].classes else "scores")
    names = config.methods()
    model = student if teacher is None else teacher
    method = build_method(names, config.method_settings, model, student, objective)
    if "sequences" in method.positions.values():
        return method
    return build_method([*names, "sft"], config.method_settings, model, student, objective)


def starts_as_teachers(
    config: GlueConfig, task: str, student: PreTrainedConfig, teacher: PreTrainedConfig | None
) -> bool:
    """Whether the classifier of a task starts as the teacher's.

    Raises:
        UserError: it is asked for, but the classifiers are of different shapes.
    """
    by_default = any(METHODS[name].copies_classifier for name in config.methods())
    return copies_classifier(config.copy_classifier, student, teacher, num_classes(TASKS[task]), by_default=by_default)


def check_engine(config: GlueConfig, task: str, ds_config: dict[str, Any], ds_path: str, world_size: int) -> None:
    """Whether each run of a task's grid can be split over the ranks and agrees with the DeepSpeed configuration.

    Raises:
        UserError: one cannot.
    """
    grid, dtype = grid_of(config, task), cast(Any, resolve_dtype(config.dtype, ds_config))
    for trial in grid.trials():
        settings = train_settings(grid, trial, 1, dtype=dtype, micro_batch_size=config.micro_batch_size)
        resolve_engine(ds_config, ds_path, settings, world_size, Path("."))


def check_examples(
    data: TaskData, tokenizer: PreTrainedTokenizerBase, max_length: int, models: Sequence[PreTrainedConfig]
) -> None:
    """Whether a task's examples fit the models that will see them.

    Raises:
        UserError: max_length leaves no room beside the tokenizer's own marks, or an example is longer than a model has
            positions for.
    """
    encode_pairs(data.train[:1], tokenizer, max_length)
    positions = min(_positions(config, max_length) for config in models)
    if positions == max_length:
        return
    examples = [
        *data.train,
        *(example for split in (data.dev, data.test) for each in split.values() for example in each),
    ]
    longest = max(len(item) for item in encode_pairs(examples, tokenizer, max_length))
    if longest > positions:
        raise UserError(
            f"--max_length {max_length}: an example of {data.name} has {longest} tokens, but a model has positions for "
            f"{positions}; give {positions} or less"
        )


def _positions(config: PreTrainedConfig, max_length: int) -> int:
    """Tokens of a sequence that a model has positions for, at most max_length."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return max_length
    if config.model_type in ("roberta", "xlm-roberta"):  # they count from behind the padding token's
        positions -= config.pad_token_id + 1
    return min(int(positions), max_length)


def check_layer(layer: int | None, config: PreTrainedConfig, *, named: str) -> None:
    """Whether a model has the layer that t-SNE is to draw. UserError where it has not."""
    num_layers = shape_of(config).num_layers
    if layer is not None and layer > num_layers:
        raise UserError(f"--tsne_layer {layer}: {named} has {num_layers} layers; give 1 to {num_layers}")
