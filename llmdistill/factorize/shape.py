"""A student of another shape than its teacher's, as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from llmdistill.config import FactorizeConfig
from llmdistill.factorize.budget import plan
from llmdistill.factorize.checkpoint import copy_companions
from llmdistill.factorize.convert import factorize
from llmdistill.factorize.export import merge
from llmdistill.factorize.install import is_factorised
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
    """Write a student of that shape and its teacher's architecture as a new folder, in fp32, with the tokenizer.

    Args:
        teacher_path: folder or hub name; its weights are read only where init takes some.
        output: the folder to write.
        shape: depth, width, heads, and perhaps feed-forward width.
        init: random, as the architecture's own training would start; layers or slice, as `initialise` says.
        layers: the teacher's layers for the latter two, as `teacher_layers` reads them.
        embedding: rank or columns that the token embedding is factorised to, None leaves it dense.
        method: of that factorisation.
        seed: of the random weights; torch's own generator is left as it was.
        head: what stands on the student.

    Raises:
        UserError: a shape or layers that do not fit the teacher, a teacher that cannot be read, an output that is not
            empty.
    """
    config = load_config(teacher_path)
    shaped = shaped_config(config, shape)
    chosen = []
    if init != "random":
        chosen = teacher_layers(layers, shape.depth, config.num_hidden_layers, key="student.layers")
    with new_folder(output) as folder:
        student = _random_student(shaped, head, seed)
        # Before the teacher is read, as a size that does not fit should not wait for that.
        if embedding is not None:
            settings: dict[str, Any] = {kind_of(method).embedding_key: embedding}
            plan(student, FactorizeConfig(**settings), method)
        if init != "random":
            teacher = load_model(teacher_path, dtype=torch.float32, head=head)
            if is_factorised(teacher):
                merge(teacher)
            initialise(student, teacher, init=init, layers=chosen)
        if embedding is not None:
            factorize(student, {}, method=method, embedding=embedding)
        student.save_pretrained(folder)
        copy_companions(teacher_path, folder)


def _random_student(config: PreTrainedConfig, head: Head, seed: int) -> PreTrainedModel:
    """The model of a config with transformers' own initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = auto_class(config, head).from_config(config, dtype=torch.float32, trust_remote_code=False)
    return cast("PreTrainedModel", model)
