"""Writes a model with weights of few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmdistill.artifacts import new_proven_folder
from llmdistill.config import QuantizeConfig
from llmdistill.errors import UserError
from llmdistill.models.companions import save_model
from llmdistill.models.configs import load_config
from llmdistill.models.load import load_model
from llmdistill.models.quantized import bits_of, check_torchao, quantize
from llmdistill.serving.dense import TOLERANCES, Describe, first_outputs
from llmdistill.students.counting import count_parameters


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
