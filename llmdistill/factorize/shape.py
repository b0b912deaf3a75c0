"""Makes a student with another shape than its teacher's, as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from llmdistill.config import FactorizeConfig
from llmdistill.factorize.budget import plan
from llmdistill.factorize.checkpoint import copy_companions
from llmdistill.factorize.convert import factorize
from llmdistill.factorize.export import merge
from llmdistill.factorize.install import is_factorized
from llmdistill.factorize.kinds import kind_of
from llmdistill.files import new_folder
from llmdistill.models.configs import load_config
from llmdistill.models.load import Head, auto_class, load_model
from llmdistill.models.shapes import StudentShape, initialise, shaped_config, teacher_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Init = Literal["random", "layers", "slice"]


def make_student(
    teacher_path: str | Path,
    output: str | Path,
    shape: StudentShape,
    *,
    init: Init,
    layers: str,
    embedding: int | None,
    method: str = "svd",
    seed: int,
    head: Head,
) -> None:
    """Write a student with the given shape and its teacher's architecture as a new folder, in fp32, with the tokenizer.

    Args:
        teacher_path: folder or hub name; its weights are read only if init uses them.
        output: the folder to write.
        shape: depth, width, heads, and optionally feed-forward width.
        init: random, the initial weights of the architecture's own training; layers or slice, as in `initialise`.
        layers: the teacher's layers for layers and slice, as parsed by `teacher_layers`.
        embedding: rank or columns of the factorized token embedding; None keeps it dense.
        method: the method of that factorization.
        seed: the seed of the random weights; torch's own generator is not changed.
        head: the head of the student.

    Raises:
        UserError: the shape or the layers do not fit the teacher, the teacher cannot be read, or the output is not
            empty.
    """
    config = load_config(teacher_path)
    shaped = shaped_config(config, shape)
    chosen = []
    if init != "random":
        chosen = teacher_layers(layers, shape.depth, config.num_hidden_layers, key="student.layers")
    with new_folder(output) as folder:
        student = _random_student(shaped, head, seed)
        # The size is checked before the teacher is read, so that a wrong size is reported without waiting.
        if embedding is not None:
            settings: dict[str, Any] = {kind_of(method).embedding_key: embedding}
            plan(student, FactorizeConfig(**settings), method)
        if init != "random":
            teacher = load_model(teacher_path, dtype=torch.float32, head=head)
            if is_factorized(teacher):
                merge(teacher)
            initialise(student, teacher, init=init, layers=chosen)
        if embedding is not None:
            factorize(student, {}, method=method, embedding=embedding)
        student.save_pretrained(folder)
        copy_companions(teacher_path, folder)


def _random_student(config: PreTrainedConfig, head: Head, seed: int) -> PreTrainedModel:
    """A model of this config with the initial weights of transformers."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = auto_class(config, head).from_config(config, dtype=torch.float32, trust_remote_code=False)
    return cast("PreTrainedModel", model)
