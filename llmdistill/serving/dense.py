"""Writes a student as a stock model, which loads without llmdistill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.artifacts import new_proven_folder
from llmdistill.errors import UserError
from llmdistill.models.companions import save_model
from llmdistill.models.configs import load_config
from llmdistill.models.families import max_positions
from llmdistill.models.forms import remove_forms, saved_form
from llmdistill.models.load import load_model
from llmdistill.students.counting import count_parameters
from llmdistill.students.hub import NAME
from llmdistill.students.merge import merge

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest allowed difference between the exported logits and the student's, as a share of the largest logit (and of
1 at least). Both models run in fp32; the half-precision types add the rounding of each merged matrix when it is
stored. Where the student's own logits differ more between fp32 and fp64, twice that is allowed."""

Describe = Callable[[Path, float], object]
"""Writes a card into the new folder, before it gets its name; also takes the largest difference of an output."""


def export_dense(student_dir: Path | str, out_dir: Path | str, *, describe: Describe | None = None) -> dict[str, Any]:
    """Export a student's folder as a stock model, which loads without llmdistill; tokenizer files are copied too.

    Quantized weights become floats.

    The new folder gets its name only after it was loaded again and its logits agreed with the student's.
    Raises UserError if the folder is no student, if `out_dir` is not empty, or if the logits differ (see TOLERANCES).
    Returns output, params, and largest_difference of a logit. `describe` adds a card.
    """
    config = load_config(student_dir)
    is_student = (getattr(config, "quantization_config", None) or {}).get("quant_method") == NAME
    if not is_student and saved_form(config) is None:
        raise UserError(
            f"{student_dir} is no factorized student: its config.json has no quantization_config of llmdistill; "
            "give the folder that a run or `llmdistill compress` wrote"
        )
    with new_proven_folder(out_dir) as folder:
        model = load_model(student_dir, dtype="auto", head="saved")
        remove_forms(model)
        tolerance = TOLERANCES[model.dtype]
        merge(model)
        params = count_parameters(model)
        save_model(model, folder, student_dir)
        # Two more models are loaded for the comparison; without this, three would be in memory.
        del model
        expected, exported = (
            first_outputs(load_model(path, dtype=torch.float32, head="saved")) for path in (student_dir, folder)
        )
        difference = (exported - expected).abs().max().item()
        largest = max(1.0, expected.abs().max().item())
        allowed = tolerance * largest
        if not difference <= allowed:  # unless the student's own logits depend as much on the rounding of fp32
            exact = first_outputs(load_model(student_dir, dtype=torch.float64, head="saved"))
            allowed = max(allowed, 2 * (expected - exact).abs().max().item())
        if not difference <= allowed:  # a NaN must also be an error
            raise UserError(
                f"the export of {student_dir} differs from the student by {difference:.2g} in its logits, of which "
                f"{allowed:.2g} is allowed, so nothing was written; serve the student itself"
            )
        if describe is not None:
            describe(folder, difference)
    return {"output": str(out_dir), "params": params, "largest_difference": difference}


@torch.no_grad()
def first_outputs(model: PreTrainedModel) -> Tensor:
    """Return the first output of a model (logits, or a base model's last hidden state) for two random sequences."""
    length = max_positions(model.config, 32) // 2
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(model.config.get_text_config().vocab_size, (2, length), generator=generator)
    outputs: Any = model.eval()(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
    return outputs[0]
