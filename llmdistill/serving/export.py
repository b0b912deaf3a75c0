"""Merges a student's factors into a stock model that loads without llmdistill, or gives its linears few bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmdistill.artifacts import new_proven_folder
from llmdistill.config import QuantizeConfig
from llmdistill.errors import UserError
from llmdistill.models.companions import save_model
from llmdistill.models.configs import load_config
from llmdistill.models.families import max_positions
from llmdistill.models.load import load_model
from llmdistill.models.quantized import bits_of, check_torchao, dequantize, quantize
from llmdistill.students.counting import count_parameters
from llmdistill.students.experts import LowRankStack, merge_stack
from llmdistill.students.hub import NAME
from llmdistill.students.modules import FactorizedEmbedding, FactorizedLinear

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest allowed difference between the exported logits and the student's, as a share of the largest logit (and of
1 at least). Both models run in fp32; the half-precision types add the rounding of each merged matrix when it is
stored."""

Describe = Callable[[Path, float], object]
"""Writes a card into the new folder, before it gets its name; also takes the largest difference of an output."""


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Multiply all factors out, in place: the result is the stock architecture, in the same dtype.

    Products are computed in fp64. GPT-2's modules become Conv1D again; a tied head is tied again.
    """
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        stock = type(model)(config)
    for name, module in list(model.named_modules()):
        if isinstance(module, FactorizedLinear | FactorizedEmbedding):
            dense: Any = stock.get_submodule(name).train(module.training)
            product = _product(module)
            dense.weight = nn.Parameter(product.T.contiguous() if type(dense) is Conv1D else product)
            if isinstance(module, FactorizedLinear):
                dense.bias = dict(module.named_parameters()).get(module.bias_name)
            model.set_submodule(name, dense)
        elif isinstance(module, LowRankStack):
            merge_stack(model, name, _product(module))
    vars(model).pop("_tied_weights_keys", None)
    vars(model.config).pop("quantization_config", None)
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    model.tie_weights()


def export_dense(student_dir: Path | str, out_dir: Path | str, *, describe: Describe | None = None) -> dict[str, Any]:
    """Export a student's folder as a stock model, which loads without llmdistill; tokenizer files are copied too.

    Weights of few bits become the floats that they stand for.

    The new folder is loaded again and its logits are compared with the student's before the folder gets its name.
    Raises UserError if the folder is no student, if `out_dir` is not empty, or if the logits differ (see TOLERANCES).
    Returns output, params, and largest_difference of a logit. `describe` adds a card.
    """
    config = load_config(student_dir)
    is_student = (getattr(config, "quantization_config", None) or {}).get("quant_method") == NAME
    if not is_student and bits_of(config) is None:
        raise UserError(
            f"{student_dir} is no factorized student: its config.json has no quantization_config of llmdistill; "
            "give the folder that a run or `llmdistill compress` wrote"
        )
    with new_proven_folder(out_dir) as folder:
        model = load_model(student_dir, dtype="auto", head="saved")
        dequantize(model)
        tolerance = TOLERANCES[model.dtype]
        merge(model)
        params = count_parameters(model)
        save_model(model, folder, student_dir)
        del model
        expected, exported = (
            _outputs(load_model(path, dtype=torch.float32, head="saved")) for path in (student_dir, folder)
        )
        difference = (exported - expected).abs().max().item()
        # Not "if difference > limit": a NaN must also be an error.
        if not difference <= tolerance * max(1.0, expected.abs().max().item()):
            raise UserError(
                f"the export of {student_dir} differs from the student by {difference:.2g} in its logits, of which "
                f"{tolerance:g} of the largest is allowed, so nothing was written; serve the student itself"
            )
        if describe is not None:
            describe(folder, difference)
    return {"output": str(out_dir), "params": params, "largest_difference": difference}


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
        exact = _outputs(model)
        quantize(model, settings)
        save_model(model, folder, student_dir)
        rounded, loaded = _outputs(model), _outputs(load_model(folder, dtype="auto", head="saved"))
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


def _product(module: FactorizedLinear | FactorizedEmbedding | LowRankStack) -> Tensor:
    # The product is computed in fp64, so that only the stored matrix is rounded.
    dense: Tensor = copy.deepcopy(module).double().dense()
    return dense.to(next(module.parameters()).dtype)


@torch.no_grad()
def _outputs(model: PreTrainedModel) -> Tensor:
    """The first output of a model (logits, or last hidden state of a base model) for two random sequences."""
    length = max_positions(model.config, 32) // 2
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(model.config.get_text_config().vocab_size, (2, length), generator=generator)
    outputs: Any = model.eval()(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
    return outputs[0]
