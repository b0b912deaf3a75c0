"""Writes a student as a stock model, which loads without llmdistill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llmdistill.artifacts import new_proven_folder
from llmdistill.errors import UserError
from llmdistill.messages import logger
from llmdistill.models.companions import save_model
from llmdistill.models.configs import load_config
from llmdistill.models.forms import remove_forms, saved_form
from llmdistill.models.load import load_model
from llmdistill.serving.fidelity import compare, outputs_of, read_rows
from llmdistill.students.counting import count_parameters
from llmdistill.students.hub import NAME
from llmdistill.students.merge import merge

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Differences of hidden states, as a share of the largest one, from which a warning follows. Both models run in fp32;
the half-precision types add the rounding of each merged matrix when it is stored."""

Describe = Callable[[Path, str], object]
"""Writes a card into the new folder, before it gets its name; also takes a sentence on how the outputs differ."""


def export_dense(
    student_dir: Path | str, out_dir: Path | str, *, data: str | None = None, describe: Describe | None = None
) -> dict[str, Any]:
    """Export a student's folder as a stock model, which loads without llmdistill; tokenizer files are copied too.

    Quantized weights become floats.

    The new folder gets its name only after it was loaded again; how its outputs differ from the student's on rows of
    `data` is a warning if an answer changes (see `comparison`).
    Raises UserError if the folder is no student, or if `out_dir` is not empty.
    Returns output, params, largest_difference of an output, and comparison. `describe` adds a card.
    """
    config = load_config(student_dir)
    is_student = (getattr(config, "quantization_config", None) or {}).get("quant_method") == NAME
    if not is_student and saved_form(config) is None:
        raise UserError(
            f"{student_dir} is no factorized student: its config.json has no quantization_config of llmdistill; "
            "give the folder that a run or `llmdistill compress` wrote"
        )
    rows = read_rows(student_dir, data)
    with new_proven_folder(out_dir) as folder:
        model = load_model(student_dir, dtype="auto", head="saved")
        remove_forms(model)
        dtype = model.dtype
        merge(model)
        params = count_parameters(model)
        save_model(model, folder, student_dir)
        # Two more models are loaded for the comparison; without this, three would be in memory.
        del model
        expected, exported = (
            outputs_of(load_model(path, dtype=torch.float32, head="saved"), rows) for path in (student_dir, folder)
        )
        comparison = compare(expected, exported, rows, what=f"--to dense: the export of {student_dir}")
        if comparison.changed or (comparison.kind == "states" and comparison.relative_difference > TOLERANCES[dtype]):
            logger.warning(f"{out_dir} is not equal to the student: {comparison.describe()}")
        if describe is not None:
            describe(folder, comparison.describe())
    return {"output": str(out_dir), "params": params, **comparison.result()}
