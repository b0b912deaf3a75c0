"""Weights of few bits, by torchao: how linears round while they learn, and how a model is saved and loaded.

The fake-quantized counterpart of a rounded weight (torchao's QAT) has the same numbers, so a student that has learned
with it loses nothing when it is converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TorchAoConfig
from transformers.integrations.torchao import TorchAoDeserialize
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig
from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

from llmdistill.config.student import QuantizeConfig
from llmdistill.internals.torch_names import own_tensors
from llmdistill.internals.transformers_names import mark_initialized, set_weight_conversions, weight_conversions
from llmdistill.models.rounding import (
    DEFAULT_GROUPS,
    bits_of,
    bits_of_saved,
    check_torchao,
    group_size_of,
    quantized_linears,
    round_linears,
    torchao_config,
)
from llmdistill.models.student_form import SavedSize, StudentForm, is_size


def rounded_embeddings(model: PreTrainedModel) -> list[str]:
    """Return the names of the token embedding and the LM head that get few bits.

    Of a factorized embedding, and of a head that is tied to it, this is the factor with a row for each token.
    """
    # The rows are in A of a factorized embedding, and in B of its tied head, which runs the factors in the other order.
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    table, last = getattr(embedding, "A", embedding), getattr(head, "B", head)
    names = {module: name for name, module in model.named_modules()}
    chosen: list[nn.Module] = [table] if isinstance(table, nn.Embedding) else []
    rows = None if table is None else own_tensors(table)[0].get("weight")
    if type(last) is nn.Linear and (chosen or last.weight is not rows):
        chosen.append(last)
    return [names[module] for module in chosen]


def has_scaled_embedding(model: PreTrainedModel) -> bool:
    """Return whether the token embedding has a buffer, as Gemma 3's factor of the rows.

    transformers alone leaves such a buffer empty when it loads an embedding of few bits; `settle_loaded` fills it.
    """
    embedding = model.get_input_embeddings()
    return isinstance(embedding, nn.Embedding) and bool(own_tensors(embedding)[1])


def fake_quantize(model: PreTrainedModel, settings: QuantizeConfig) -> None:
    """Make the linears of the layers round their weights in each forward pass, in place; gradients pass the rounding.
    The token embedding and the LM head stay floats.

    torchao gives no gradient to a weight that it clips, and it clips the largest of a row or group: its scale is their
    largest magnitude / 127.5 or 7.5, so that a positive one rounds to 128 or 8. Here each weight has its gradient.

    Names and parameters stay, also on the meta device. `settings` ask for int8 or int4. Raises UserError if there is no
    linear.
    """
    from torchao.quantization.qat import FakeQuantizedLinear, QATConfig

    prepare = partial(QATConfig, step="prepare")
    round_linears(model, settings.weights, settings.group_size, transform=prepare)
    for module in model.modules():
        if isinstance(module, FakeQuantizedLinear):
            module.weight_fake_quantizer = _StraightThrough(module.weight_fake_quantizer)


class _StraightThrough(nn.Module):
    """A rounding with the derivative of the identity."""

    def __init__(self, rounding: nn.Module) -> None:
        super().__init__()
        self.rounding = rounding

    def forward(self, weight: Tensor) -> Tensor:
        # detach, as nothing reads the gradient of torchao's own rounding
        rounded: Tensor = _Identity.apply(weight, self.rounding(weight.detach()))
        return rounded


class _Identity(torch.autograd.Function):
    """The second tensor, with the gradient of the first."""

    @staticmethod
    def forward(_ctx: Any, _weight: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return gradients[0], None


def needs_loader(model: PreTrainedModel, settings: QuantizeConfig) -> bool:
    """Return whether a model without factors, saved with such weights, is read by llmdistill alone."""
    return settings.packed or (settings.embeddings == "int8" and has_scaled_embedding(model))


@torch.no_grad()
def quantize(model: PreTrainedModel, settings: QuantizeConfig) -> None:
    """Round the weights of the linears of the layers to int8 or int4, and those of the token embedding and the LM head
    to int8, in place; save_pretrained then writes them so. A tied head stays tied.

    A saved model without factors is one of llmdistill where `needs_loader`, else one of transformers and torchao.

    Raises UserError if there is no linear.
    """
    round_linears(model, settings.weights, settings.group_size)
    if settings.embeddings == "int8":
        from torchao.quantization import quantize_

        _balance(model.get_input_embeddings())
        by_weight: dict[int, list[nn.Module]] = {}
        for name in rounded_embeddings(model):
            module: Any = model.get_submodule(name)
            by_weight.setdefault(id(module.weight), []).append(module)
        for first, *tied in by_weight.values():
            quantize_(first, torchao_config("int8", None), lambda module, _, first=first: module is first)
            for module in tied:
                module.weight = first.weight
    group_size = settings.group_size or DEFAULT_GROUPS[settings.weights]
    saved = {"weights": settings.weights, "group_size": group_size}
    config: Any = getattr(model.config, "quantization_config", None)
    if config is not None:
        config.quantize = saved
    elif needs_loader(model, settings):  # as a factorized student without factors
        config = AutoQuantizationConfig.from_dict({"quant_method": "llmdistill", "quantize": saved})
    else:
        config = TorchAoConfig(torchao_config(settings.weights, group_size))
    model.config.quantization_config = config
    quantizer = AutoHfQuantizer.from_config(config)
    # From which save_pretrained gets the tensors
    is_plain = type(quantizer) is TorchAoHfQuantizer
    cast(Any, model).hf_quantizer = _WithoutTied(quantizer.quantization_config) if is_plain else quantizer


def _balance(embedding: Any) -> None:
    """Divide the columns of A of a low-rank embedding, and multiply the rows of B, by the same powers of two, in place.

    An SVD leaves the singular values in A. Every row is then largest in the same few columns, and one scale for the row
    is too coarse for the others. Powers of two leave each product as it is, to the last bit.
    """
    if not hasattr(embedding, "A") or embedding.B.weight.dim() != 2:
        return
    columns, rows = embedding.A.weight, embedding.B.weight
    # The clamp is for columns of zeros.
    sizes = [weight.float().pow(2).mean(dim).clamp(min=1e-12) for weight, dim in ((columns, 0), (rows, 1))]
    scale = torch.exp2(((sizes[0] / sizes[1]).log2() / 4).round()).to(columns.dtype)  # the sizes are squares
    columns.div_(scale)
    rows.mul_(scale[:, None])


def _is_torchao(weight: Any) -> bool:
    from torchao.utils import TorchAOBaseTensor

    return isinstance(weight, TorchAOBaseTensor)


def _quantized_modules(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Return the modules whose weight is a tensor of torchao, each with this weight."""
    return [
        (module, module.weight)
        for module in model.modules()
        # Not module.weight, for which a factorized linear would multiply its factors out.
        if _is_torchao(own_tensors(module)[0].get("weight"))
    ]


def settle_loaded(model: PreTrainedModel) -> None:
    """Give the quantized weights the dtype of the model's others, and let save_pretrained write them again, in place; a
    tied head is saved once.

    transformers leaves the weights as they were saved, and has no way back for what it made of their parts; the
    quantizer makes the parts again.
    """
    conversions = [
        conversion
        for conversion in weight_conversions(model) or ()
        if not any(isinstance(operation, TorchAoDeserialize) for operation in getattr(conversion, "operations", ()))
    ]
    set_weight_conversions(model, conversions)
    own: Any = model
    if type(own.hf_quantizer) is TorchAoHfQuantizer:
        own.hf_quantizer = _WithoutTied(own.hf_quantizer.quantization_config)
    # Not model.dtype, which is that of the first weight, and this may be an embedding of few bits.
    others = (weight.dtype for weight in model.parameters() if weight.is_floating_point() and not _is_torchao(weight))
    dtype = next(others, model.dtype)
    made: dict[int, nn.Parameter] = {}  # a tied head stays tied
    for module, weight in _quantized_modules(model):
        if weight.dtype != dtype:
            made.setdefault(id(weight), nn.Parameter(weight.to(dtype), requires_grad=False))
            module.weight = made[id(weight)]
    if has_scaled_embedding(model):  # whose buffer transformers takes for filled as soon as the weight is there
        embedding = model.get_input_embeddings()
        mark_initialized(embedding.weight)
        mark_initialized(embedding, initialized=False)
        model.initialize_weights()


@torch.no_grad()
def dequantize(model: PreTrainedModel) -> None:
    """Replace quantized weights, if there are any, by the numbers they stand for, in place; factors stay factors."""
    if bits_of(model.config) is None:
        return
    made: dict[int, nn.Parameter] = {}  # a tied head stays tied
    for module, weight in _quantized_modules(model):
        made.setdefault(id(weight), nn.Parameter(weight.dequantize()))
        module.weight = made[id(weight)]
        vars(module).pop("extra_repr", None)  # with which torchao describes the quantized weight
    cast(Any, model).hf_quantizer.remove_quantization_config(model)
    for module in model.modules():
        vars(getattr(module, "config", model)).pop("_is_quantized", None)


class _WithoutTied(TorchAoHfQuantizer):
    """transformers' quantizer for torchao, which saves a tied head once; save_pretrained knows plain tensors alone."""

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors, metadata = super().get_state_dict_and_metadata(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        tied = [name for name in model.all_tied_weights_keys if _is_torchao(parameters.get(name))]
        # The metadata keep the name, which torchao looks up for each one that it lists.
        left_out = tuple(f"{name.removesuffix('weight')}_weight_" for name in tied)
        return {name: value for name, value in tensors.items() if not name.startswith(left_out)}, metadata


class PackedTorchAo(_WithoutTied):
    """The same, with two int4 weights in a byte of the files."""

    def __init__(self, weights: str, group_size: int | None) -> None:
        super().__init__(TorchAoConfig(torchao_config(weights, group_size)))
        self.packs = weights == "int4"

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
        tensors, metadata = super().get_state_dict_and_metadata(model)
        if self.packs:
            names = {module: name for name, module in model.named_modules()}
            in_int4 = {
                f"{names[module]}._weight_qdata"
                for module, weight in _quantized_modules(model)
                if str(weight.target_dtype) == "torch.int4"
            }
            tensors = {name: pack_int4(tensor) if name in in_int4 else tensor for name, tensor in tensors.items()}
        return tensors, metadata

    def get_weight_conversions(self) -> list[Any]:
        conversions: list[Any] = super().get_weight_conversions()
        for conversion in conversions:
            conversion.operations = [_Unpack(self)]
        return conversions


class _Unpack(TorchAoDeserialize):
    """Makes a weight of torchao from its parts, of which the integers may be packed."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        parts = dict(input_dict)
        (integers,) = parts["_weight_qdata"]
        if integers.dtype == torch.uint8:
            shape = kwargs["model"].get_parameter(kwargs["full_layer_name"]).shape
            parts["_weight_qdata"] = [unpack_int4(integers, shape)]
        return super().convert(parts, *args, **kwargs)


class FewBits(StudentForm):
    """Linears of few bits: a student learns with weights that are rounded in every forward pass."""

    settings = QuantizeConfig
    key = "quantize"
    extra = "quantize"
    package = "torchao"
    serving = (
        "Weights of few bits run in transformers; for other servers `llmdistill export --to dense` makes floats of "
        "them, and multiplies factors out."
    )
    exports = ("int8", "int4")

    def is_chosen(self, settings: QuantizeConfig) -> bool:
        return settings.weights != "none"

    def describe(self, settings: QuantizeConfig) -> str:
        return f", linears in {settings.weights}{', embeddings in int8' if settings.embeddings == 'int8' else ''}"

    def check(self, settings: QuantizeConfig, build: Callable[[], PreTrainedModel]) -> None:
        check_torchao(f"student.quantize.weights {settings.weights}")
        quantized_linears(build())

    def add(self, model: PreTrainedModel, settings: QuantizeConfig, seed: int) -> None:
        fake_quantize(model, settings)

    def saved_size(self, size: SavedSize, settings: QuantizeConfig, build: Callable[[], PreTrainedModel]) -> SavedSize:
        model = build()
        is_factorized = getattr(model.config, "quantization_config", None) is not None
        is_packed = settings.weights == "int4" and (is_factorized or needs_loader(model, settings))
        bytes = size.bytes
        for name in quantized_linears(model):
            outputs, inputs = cast(nn.Linear, model.get_submodule(name)).weight.shape
            group_size = group_size_of(settings.weights, settings.group_size, inputs)
            groups = outputs * (1 if group_size is None else inputs // group_size)
            rounded = -(-outputs * inputs // 2) if is_packed else outputs * inputs
            # A group has a scale in the dtype of the model, and torchao's zero point in int8.
            bytes += rounded + groups * (model.dtype.itemsize + 1) - outputs * inputs * model.dtype.itemsize
        weights = [model.get_submodule(name).weight for name in rounded_embeddings(model)]
        for weight in {id(weight): weight for weight in weights}.values() if settings.embeddings == "int8" else ():
            rows, width = cast(Tensor, weight).shape
            bytes += rows * width + rows * (model.dtype.itemsize + 1) - rows * width * model.dtype.itemsize
        return replace(size, bytes=bytes)

    def finish(self, model: PreTrainedModel, settings: QuantizeConfig, state: Mapping[str, Tensor]) -> None:
        quantize(model, settings)

    def needs_plain_factors(self, settings: QuantizeConfig) -> bool:
        # The coefficients amplify what is lost of the pivots: SmolLM2's trained student of 80 % was 9.5 nats away from
        # itself, and 0.31 with dense matrices.
        return settings.weights == "int4"

    def export_settings(self, to: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**given, "weights": to}

    def saved_as(self, saved: Any) -> str | None:
        bits = bits_of_saved(saved)
        return None if bits is None else f"linears in {bits}"

    def check_package(self, what: str) -> None:
        check_torchao(what)

    def is_valid(self, value: object) -> bool:
        if not isinstance(value, dict) or not value.keys() <= {"weights", "group_size"}:
            return False
        size = value.get("group_size")
        return value.get("weights") in ("int8", "int4") and (size is None or is_size(size))

    def loader(self, value: Any) -> PackedTorchAo:
        check_torchao("this student of few bits")
        return PackedTorchAo(**value)

    def settle(self, model: PreTrainedModel) -> None:
        settle_loaded(model)

    def remove(self, model: PreTrainedModel) -> None:
        dequantize(model)


def pack_int4(integers: Tensor) -> Tensor:
    """Put integers from -8 to 7, row by row, into the lower and upper half of a byte: (m, n) -> (⌈mn / 2⌉,) uint8."""
    # From 0 to 15, the range of half a byte
    nibbles = (integers.flatten() + 8).to(torch.uint8)
    nibbles = nn.functional.pad(nibbles, (0, nibbles.numel() % 2))
    return nibbles[::2] | nibbles[1::2] << 4


def unpack_int4(packed: Tensor, shape: torch.Size) -> Tensor:
    """Return the integers (m, n) in int8 that `pack_int4` has put into bytes."""
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten()
    return nibbles[: shape.numel()].view(shape).to(torch.int8) - 8
