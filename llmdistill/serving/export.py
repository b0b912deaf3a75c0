"""Writes a student for other programs, by what it is exported to, with the card of its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.artifacts import new_proven_folder
from llmdistill.config.command_line import with_values
from llmdistill.config.strict import did_you_mean
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.messages import say
from llmdistill.models.companions import save_model
from llmdistill.models.configs import load_config
from llmdistill.models.forms import exported_forms, read_settings, saved_form
from llmdistill.models.load import load_model
from llmdistill.models.student_form import StudentForm
from llmdistill.report.card import write_export_card
from llmdistill.serving.dense import Describe, export_dense
from llmdistill.serving.fidelity import compare, outputs_of, read_rows
from llmdistill.serving.gguf_export import GgufSettings, export_gguf
from llmdistill.serving.onnx_export import export_onnx
from llmdistill.students.convert import replace_pivots
from llmdistill.students.counting import count_parameters
from llmdistill.students.speed import describe_speed
from llmdistill.training.inputs import Model, save_with_tokenizer


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a student is exported to, with the arguments of `llmdistill.export`."""

    to: str
    int8: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the form, or of gguf."""


@dataclass(frozen=True, kw_only=True)
class FormTarget:
    """A form that an export gives the model, with the form's settings."""

    to: str
    form: StudentForm
    settings: Any


def export_student(
    student: Model,
    output: str | Path,
    target: Target,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    data: str | None = None,
) -> dict[str, Any]:
    """Export as `llmdistill.export` does, and give the new folder the card of the student's folder, if it has one."""
    to, int8, settings, forms = target.to, target.int8, target.settings, exported_forms()
    names = ("dense", "onnx", "gguf", *forms)
    if to not in names:
        raise UserError(f"export to: {to!r} does not fit; expected {', '.join(names)}{did_you_mean(to, names)}")
    if int8 and to != "onnx":
        raise UserError(f"export to={to!r} int8=True: int8 goes with onnx alone")
    if data is not None and not isinstance(data, str | Path):
        raise UserError(
            f"data is a {type(data).__name__}: give a file, or the name of a set, on which outputs are compared"
        )
    if any(value is not None and value is not False for value in settings.values()) and to not in (*forms, "gguf"):
        raise UserError(
            f"export to={to!r}: {', '.join(settings)} are for {' and '.join(map(repr, forms))}: leave them out"
        )
    write: Callable[..., dict[str, Any]] = export_dense if to == "dense" else partial(export_onnx, int8=int8)
    if to == "gguf":
        write = partial(export_gguf, settings=with_values(GgufSettings(), settings, key=""))
    description = ""
    if to in forms:
        form = forms[to]
        own = read_settings(form, form.export_settings(to, settings), key="")
        description = form.describe(own)
        write = partial(export_in_form, target=FormTarget(to=to, form=form, settings=own))
    if isinstance(student, PreTrainedModel):
        with TemporaryDirectory() as saved:
            save_with_tokenizer(student, tokenizer, Path(saved))
            return write(saved, output, data=data)
    folder = locate(str(student))
    return write(folder, output, data=data, describe=partial(write_export_card, folder, to=to, description=description))


def export_in_form(
    student_dir: Path | str,
    out_dir: Path | str,
    target: FormTarget,
    *,
    data: str | None = None,
    describe: Describe | None = None,
) -> dict[str, Any]:
    """Write a model, dense or factorized, in a form, such as with linears of few bits.

    The new folder is loaded again and compared with the model on rows of `data` before it gets its name. `describe`
    adds a card.

    Returns:
        output, params, bytes of the weights' files, largest_difference of an output from the model's, comparison,
        and speed, a sentence, if factors are slower here than dense matrices.

    Raises:
        UserError: a package is missing, the model has the form already or cannot have it, or `out_dir` is not empty.
    """
    to, form = target.to, target.form
    form.check_package(f"--to {to}")
    config = load_config(student_dir)
    present = saved_form(config)
    if present is not None and (present is form or form.key is not None):  # a saved model has one form with a key
        given = present.saved_as(config.quantization_config)
        raise UserError(f"--to {to}: {student_dir} has {given} already; give the model before it")
    rows = read_rows(student_dir, data)
    with new_proven_folder(out_dir) as folder:
        model = load_model(student_dir, dtype="auto", head="saved")
        exact = outputs_of(model, rows)
        if form.needs_plain_factors(target.settings) and replace_pivots(model):
            say(f"Note        pivoted factors do not survive {to}, so they become plain ones, or dense if smaller")
        form.finish(model, target.settings, model.state_dict())
        save_model(model, folder, student_dir)
        params = count_parameters(model)
        del model
        loaded = outputs_of(load_model(folder, dtype="auto", head="saved"), rows)
        comparison = compare(exact, loaded, rows, what=f"--to {to}: the export of {student_dir}")
        if describe is not None:
            describe(folder, comparison.describe())
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    slower = describe_speed(config)
    said = {} if slower is None else {"speed": slower}
    return {"output": str(out_dir), "params": params, "bytes": size, **comparison.result(), **said}
