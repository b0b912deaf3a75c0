"""Models and data in memory or by name, saved as the folders and files that a run reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.artifacts import write_manifest
from llmdistill.config import DEFAULT_DS_CONFIG, RunConfig
from llmdistill.config.command_line import build, config_of, to_dict
from llmdistill.data.sources import Data, examples_of, kind_of, write_rows
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.files import apply_umask, check_writable, temporary_folder, write_json
from llmdistill.fingerprints import fingerprint
from llmdistill.methods import METHODS
from llmdistill.models.companions import copy_companions
from llmdistill.models.configs import load_config
from llmdistill.models.heads import HeadName
from llmdistill.models.load import folder_damage, load_model
from llmdistill.models.tokenizer import brings_tokenizer, fit_tokenizer, load_tokenizer
from llmdistill.runtime.devices import TORCH_DTYPES, choose_dtype, default_device
from llmdistill.step.loss_modes import first_not_finite_parameter
from llmdistill.training.rules import check_settings
from llmdistill.training.run_folder import INPUTS

Model = PreTrainedModel | str | Path
"""A transformers model, a folder with one, a name on the Hub, or embedded:teacher."""


@dataclass(frozen=True)
class RunInputs:
    """The models, data and other arguments of a run that is called from Python."""

    teacher: Model
    student: Model | None
    data: Data
    valid: Data | None
    tests: Mapping[str, Data]
    tokenizer: PreTrainedTokenizerBase | None
    ds_config: str | Path | Mapping[str, Any] | None

    def make_config(
        self, settings: Mapping[str, Any], keywords: Mapping[str, Any], output_dir: str | Path | None
    ) -> RunConfig:
        """Return the checked run configuration; models and data in memory are represented by their class name."""
        names = {
            "teacher.model": name_of(self.teacher),
            "student.model": None if self.student is None else name_of(self.student),
            "data.train": name_of(self.data),
            "data.valid": None if self.valid is None else name_of(self.valid),
            "data.tests": {name: name_of(data) for name, data in self.tests.items()},
            "ds_config": "",
            "output_dir": None if output_dir is None else str(output_dir),
        }
        derived: dict[str, Any] = {"data.kind": kind_of(self.data)}
        if not self.tests and self.valid is None:
            derived["scoring.models"] = []
        config = config_of({**settings, **names}, keywords, METHODS, derived)
        check_settings(config)  # before anything is saved
        return config

    def save(self, config: RunConfig) -> RunConfig:
        """Save models and data in memory to the run folder and return the configuration with the references to them.

        If no run folder is set, a temporary folder is used, and no checkpoints are saved. Raises UserError if a row is
        malformed.
        """
        values, output_dir = to_dict(config), config.output_dir
        if output_dir is None:
            output_dir = tempfile.mkdtemp(prefix="llmdistill-")
            values["train"]["save_every"] = None
        check_writable(Path(output_dir), "output_dir")
        inputs, field = Path(output_dir) / INPUTS, config.data.text.field
        file_of = partial(data_file, inputs=inputs, kind=config.data.kind)
        ds_config = DEFAULT_DS_CONFIG if self.ds_config is None else str(self.ds_config)
        if isinstance(self.ds_config, Mapping):
            ds_config = str(inputs / "ds_config.json")
            write_json(Path(ds_config), dict(self.ds_config))
        values |= {"output_dir": str(output_dir), "ds_config": ds_config}
        if (
            self.tokenizer is None
            and config.data.kind != "task"
            and not any(map(_has_tokenizer, (self.student, self.teacher)))
        ):
            kind = type(self.teacher).__name__
            raise UserError(
                f"tokenizer is missing: neither the teacher, a {kind}, nor the student came from a folder with one: "
                'give tokenizer=AutoTokenizer.from_pretrained("...")'
            )
        values["teacher"]["model"] = model_folder(self.teacher, self.tokenizer, inputs, role="teacher")
        if self.student is not None:
            values["student"]["model"] = model_folder(self.student, self.tokenizer, inputs, role="student")
        values["data"] |= {
            "train": file_of(self.data, name="data", field=field),
            "valid": None if self.valid is None else file_of(self.valid, name="valid", field=field),
            "tests": {name: file_of(data, name=f"tests {name}") for name, data in self.tests.items()},
        }
        return build(values, RunConfig, METHODS)

    def command(self, method: str) -> str:
        """Return the Python call in one line."""
        names = ", ".join(name_of(given) for given in (self.teacher, self.student, self.data))
        return f"llmdistill.distill({names}, method={method!r}, ...)"


def _has_tokenizer(model: Model | None) -> bool:
    """Whether a model brings a tokenizer, by its folder or name; a named one is left to the plan."""
    if not isinstance(model, PreTrainedModel):
        return model is not None
    source = str(model.name_or_path or "")
    # What is no folder is a name on the hub, but for an absolute path.
    return bool(source) and (brings_tokenizer(source) if os.path.isdir(source) else not os.path.isabs(source))


def name_of(what: object) -> str:
    """Return the name of a model or data set; for an object in memory return its class name."""
    return str(what) if isinstance(what, str | Path) else type(what).__name__


def model_folder(model: Model, tokenizer: PreTrainedTokenizerBase | None, inputs: Path, *, role: str) -> str:
    """Return the reference of a model; a model in memory is saved with its tokenizer to a folder below `inputs`.

    Raises UserError if an earlier call has saved it there, and a file is not as it was written.
    """
    if not isinstance(model, PreTrainedModel):
        return str(model)
    inputs.mkdir(parents=True, exist_ok=True)
    with temporary_folder(inputs / role) as part:
        save_with_tokenizer(model, tokenizer, part)
        # The name tells the content, so that the same call finds the same folder.
        folder = inputs / f"{role}-{fingerprint(part).partition(':')[2][:16]}"
        damage = folder_damage(folder) if folder.is_dir() else None
        if damage is not None:
            raise UserError(f"{damage}; remove {folder}, and the same call saves the model again")
        if not folder.is_dir():
            write_manifest(part)
            apply_umask(part)
            part.rename(folder)  # whole or not at all
    return str(folder)


def save_with_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path, *, source: str | None = None
) -> None:
    """Save a model with `tokenizer`, or with the tokenizer of `source`; by default it was loaded from there."""
    model.save_pretrained(folder)
    source = str(model.name_or_path or "") if source is None else source
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    elif Path(source).is_dir():
        copy_companions(source, folder)
    elif source:
        load_tokenizer(source).save_pretrained(folder)


def tokenizer_of(
    model: PreTrainedModel | str | Path, tokenizer: PreTrainedTokenizerBase | None
) -> PreTrainedTokenizerBase:
    """Return `tokenizer`, by default that of the folder or name of the model; a UserError if there is none."""
    source = locate(str(model)) if isinstance(model, str | Path) else str(model.name_or_path or "")
    if tokenizer is not None:
        fit_tokenizer(tokenizer, load_config(source) if isinstance(model, str | Path) else model.config, "tokenizer")
        return tokenizer
    if isinstance(model, PreTrainedModel) and (not str(source) or not brings_tokenizer(source)):
        raise UserError(
            f"tokenizer is missing: this {type(model).__name__} was not loaded from a folder with one; give it"
        )
    return load_tokenizer(source)


def data_file(data: Data, inputs: Path, *, name: str, field: str = "text", kind: str | None = None) -> str:
    """Return the reference of data; rows in memory are checked and written to a file. `kind` is that of the run."""
    if isinstance(data, str | Path):
        return str(data)
    if kind_of(data, field=field, name=name) == "instructions" and kind != "sentences":
        examples_of(data, name=name)
    return str(write_rows(data, inputs, field=field, name=name))


def device_for(model: Model, device: torch.device | str | None) -> torch.device | None:
    """Return the device of the arithmetic: the given one, else for a named model the best one, else the model's own."""
    if device is not None:
        return torch.device(device)
    return None if isinstance(model, PreTrainedModel) else default_device()


@contextmanager
def evaluation_mode(model: Model, *, head: HeadName) -> Iterator[PreTrainedModel]:
    """Yield the model in evaluation mode; a named model is loaded in the best dtype, on the GPU if there is one."""
    if isinstance(model, PreTrainedModel):
        loaded = model
    else:
        device = default_device()
        dtype = TORCH_DTYPES[choose_dtype("auto", device)]
        loaded = load_model(locate(str(model)), dtype=dtype, device=device, head=head)
    # Next to a score this takes no time; greedy answers of such a model are tokens like any others.
    if (broken := first_not_finite_parameter(loaded)) is not None:
        raise UserError(f"the model's parameter {broken} has values that are not finite: copy or download it again")
    was_training = loaded.training
    loaded.eval()
    try:
        yield loaded
    finally:
        loaded.train(was_training)


def check_model_types(**models: object) -> None:
    """Raise UserError for a value that is neither a transformers model nor the name of one."""
    for role, model in models.items():
        if not isinstance(model, PreTrainedModel | str | Path):
            kind = "None" if model is None else f"a {type(model).__name__}"
            raise UserError(
                f"{role} is {kind}: give a transformers PreTrainedModel, a folder or a hub "
                "name (unwrap an engine's or a parallel model's with .module, a compiled one with ._orig_mod, merge "
                "adapters with merge_and_unload())"
            )
