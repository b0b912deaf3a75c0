"""Writes a student for other programs, by what it is exported to, with the card of its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.config import QuantizeConfig
from llmdistill.config.command_line import changed
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.report.card import write_export_card
from llmdistill.serving.dense import export_dense
from llmdistill.serving.few_bits import export_quantized
from llmdistill.serving.onnx_export import export_onnx
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
    """Do the work of `llmdistill.export`, and give the new folder the card of the student's folder, if it has one."""
    if to not in get_args(ExportTo) or (int8 and to != "onnx"):
        raise UserError(
            f"export to={to!r} int8={int8}: give to='dense', 'onnx', 'int8' or 'int4', and int8 with onnx alone"
        )
    few = to in ("int8", "int4")
    if any(bits.values()) and not few:
        raise UserError(f"export to={to!r}: {', '.join(bits)} are for 'int8' and 'int4': leave them out")
    write: Callable[..., dict[str, Any]] = export_dense if to == "dense" else partial(export_onnx, int8=int8)
    settings = changed(QuantizeConfig(), {"weights": to if few else "none", **bits}, key="")
    if settings.weights != "none":
        write = partial(export_quantized, settings=settings)
    if isinstance(student, PreTrainedModel):
        with TemporaryDirectory() as saved:
            save_with_tokenizer(student, tokenizer, Path(saved))
            return write(saved, output)
    folder = locate(str(student))
    return write(folder, output, describe=partial(write_export_card, folder, to=to))
