"""Writes a student for other programs, by what it is exported to, with the card of its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.artifacts import new_proven_folder
from llmdistill.config.command_line import changed
from llmdistill.config.student import QuantizeConfig
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.companions import save_model
from llmdistill.models.configs import load_config
from llmdistill.models.load import load_model
from llmdistill.models.quantized import bits_of, check_torchao, quantize
from llmdistill.report.card import write_export_card
from llmdistill.serving.dense import TOLERANCES, Describe, export_dense, first_outputs
from llmdistill.serving.onnx_export import export_onnx
from llmdistill.students.counting import count_parameters
from llmdistill.training.inputs import Model, save_with_tokenizer

ExportTo = Literal["dense", "onnx", "int8", "int4"]
"""What `llmdistill export` makes of a student."""


def export(
    student: Model,
    output: str | Path,
    *,
    to: ExportTo,
    int8: bool,
    bits: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
) -> dict[str, Any]:
    """Export as `llmdistill.export` does, and give the new folder the card of the student's folder, if it has one."""
    if to not in get_args(ExportTo) or (int8 and to != "onnx"):
        raise UserError(
            f"export to={to!r} int8={int8}: give to='dense', 'onnx', 'int8' or 'int4', and int8 with onnx alone"
        )
    is_quantized = to in ("int8", "int4")
    if any(bits.values()) and not is_quantized:
        raise UserError(f"export to={to!r}: {', '.join(bits)} are for 'int8' and 'int4': leave them out")
    write: Callable[..., dict[str, Any]] = export_dense if to == "dense" else partial(export_onnx, int8=int8)
    settings = changed(QuantizeConfig(), {"weights": to if is_quantized else "none", **bits}, key="")
    if settings.weights != "none":
        write = partial(export_quantized, settings=settings)
    if isinstance(student, PreTrainedModel):
        with TemporaryDirectory() as saved:
            save_with_tokenizer(student, tokenizer, Path(saved))
            return write(saved, output)
    folder = locate(str(student))
    return write(folder, output, describe=partial(write_export_card, folder, to=to))


def export_quantized(
    student_dir: Path | str, out_dir: Path | str, settings: QuantizeConfig, *, describe: Describe | None = None
) -> dict[str, Any]:
    """Write a model, dense or factorized, with the weights of its layers' linears rounded to int8 or int4.

    The new folder is loaded again and compared with what was rounded before it gets its name. `describe` adds a card.

    Returns:
        output, params, bytes of the weights' files, and largest_difference of an output from the model's.

    Raises:
        UserError: torchao is missing, the model has few bits already or no linear in its layers, or `out_dir` is not
            empty.
    """
    check_torchao(f"--to {settings.weights}")
    given = bits_of(load_config(student_dir))
    if given is not None:
        raise UserError(f"--to {settings.weights}: {student_dir} has {given} weights already; give the model before it")
    with new_proven_folder(out_dir) as folder:
        model = load_model(student_dir, dtype="auto", head="saved")
        exact = first_outputs(model)
        quantize(model, settings)
        save_model(model, folder, student_dir)
        rounded, loaded = first_outputs(model), first_outputs(load_model(folder, dtype="auto", head="saved"))
        if not (loaded - rounded).abs().max() <= TOLERANCES[model.dtype] * max(1.0, rounded.abs().max().item()):
            raise UserError(
                f"--to {settings.weights}: {student_dir} is read otherwise than it was written; nothing was kept"
            )
        difference = (rounded - exact).abs().max().item()
        if describe is not None:
            describe(folder, difference)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    params = count_parameters(model)
    return {"output": str(out_dir), "params": params, "bytes": size, "largest_difference": difference}
