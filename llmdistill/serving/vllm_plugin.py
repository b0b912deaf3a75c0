"""vLLM's plugin: it serves factorized students with their factors.

vLLM loads this module by the entry point of the package, in each of its processes, and nothing else does: it needs
vLLM. A student's config.json names its `quant_method`, under which `register` gives vLLM the classes below.

vLLM runs linears with a common input (query, key and value; gate and up) as one layer. A part is one matrix of the
student's weights in such a layer, factorized or dense. The layer has one flat parameter for each name that its parts
have there (A.weight, B.weight), in which every part has a place of its own and reads its values. So vLLM can load new
weights into a served student as it does for a dense model (`reload_weights`).

A factorized token embedding has its two factors under their own names, and a head tied to it has the same modules.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from llmdistill.errors import UserError
from llmdistill.models.forms import form_of
from llmdistill.students.hub import NAME, FactorizedConfig
from llmdistill.students.kinds import KINDS, Size
from llmdistill.students.modules import LowRankEmbedding, LowRankLinear

PARTS = "llmdistill_parts"
"""The attribute of a vLLM layer that holds its parts."""
TAKEN = "llmdistill_taken"
"""The attribute of a vLLM layer with loaded weights: the offsets of low-rank parts' biases in the layer's bias."""
_NUMBERS = {None: 0, "q": 0, "k": 1, "v": 2}
"""vLLM's names for the parts of an attention layer, and for a layer's only part; other layers have numbers."""


class FactorizedLinearMethod(LinearMethodBase):
    """Runs a layer of vLLM whose matrices, or some of them, are products of factors.

    Over ranks of tensor parallelism only the outputs and inputs of plain SVD factors are split, never their rank: a
    layer that splits its outputs has A whole on each rank and the rows of B that make its outputs; one that splits its
    inputs has the columns of A that they need and B whole, and the ranks' outputs are added as for a dense matrix.
    """

    def __init__(self, method: str, sizes: dict[str, Size | None], prefix: str) -> None:
        """`sizes` are those of the parts by name, as `sizes_of` returns them."""
        self.method, self.sizes, self.prefix = method, sizes, prefix

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Register the parameters that the factors of this rank are loaded into."""
        outputs = output_partition_sizes
        split = input_size_per_partition != input_size or sum(outputs) != output_size
        is_fused = len(self.sizes) == 1 and len(outputs) > 1  # the student has one matrix for several outputs, as GPT-2
        if split and (self.method != "svd" or is_fused):
            what = "a matrix that makes query, key and value" if is_fused else f"factors of the kind {self.method}"
            raise UserError(f"{self.prefix}: {what} cannot be split over tensor_parallel_size ranks; set it to 1")
        make = KINDS[self.method].linear
        with torch.device("meta"):  # the bias is the layer's own, but that of a low-rank part has a name inside of it
            parts = [
                nn.Linear(input_size_per_partition, m, bias=False)
                if size is None
                else make(input_size_per_partition, m, size, bias=make is LowRankLinear)
                for size, m in zip(self.sizes.values(), [sum(outputs)] if is_fused else outputs, strict=True)
            ]
        add_parameters(layer, parts, list(self.sizes), params_dtype)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        share_loaded(layer, [f"{self.prefix.rpartition('.')[0]}.{part}" for part in self.sizes])

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., n) -> (..., m)."""
        outputs = [part(x) for part in getattr(layer, PARTS)]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if bias is None else y + bias


class FactorizedEmbeddingMethod(QuantizeMethodBase):
    """Looks up the token embedding A B, and computes the logits h Bᵀ Aᵀ of a head that is tied to it.

    Ranks of tensor parallelism split the rows of A (V, k) as vLLM splits a dense table, and each has B (k, d) whole.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Register A.weight and B.weight; A has zeros after this rank's rows of the vocabulary, as vLLM's tables do."""
        whole = {"A": (layer.org_vocab_size, self.rank), "B": (self.rank, input_size)}
        for name, rows in (("A", sum(output_partition_sizes)), ("B", self.rank)):
            # Values that no weights have, so that `process_weights_after_loading` finds a tensor that was not loaded.
            empty = torch.full((rows, whole[name][1]), torch.nan, dtype=params_dtype)
            weight: Any = nn.Parameter(empty, requires_grad=False)
            if name == "A":
                weight.output_dim = 0
            weight.weight_loader = _make_table_loader(layer, f"{name}.weight", whole[name])
            layer.add_module(name, nn.Module())
            layer.get_submodule(name).register_parameter("weight", weight)
        layer.register_parameter("weight", None)  # by this name vLLM's Cohere knows that nothing wraps the layer

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        for name in ("A.weight", "B.weight"):
            if layer.get_parameter(name).isnan().any():
                raise UserError(
                    f"the student's weights lack {name} of the token embedding, or it is not finite; copy the student "
                    "again"
                )

    def embedding(self, layer: Any, input_ids: Tensor) -> Tensor:
        """(...) -> (..., d)."""
        return F.embedding(input_ids, layer.A.weight) @ layer.B.weight

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., d) -> (..., V)."""
        return F.linear(F.linear(x, layer.B.weight), layer.A.weight, bias)


class HeadMethod(UnquantizedEmbeddingMethod):
    """The method of a student's head, which is dense unless it is tied to the factorized token embedding."""

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Give a head the factors of the embedding instead of its own table."""
        del layer.weight
        layer.A, layer.B = embed_tokens.A, embed_tokens.B
        layer.quant_method = embed_tokens.quant_method
        return layer


class FactorizedStudent(QuantizationConfig):
    """The factorization of a student, in the form of vLLM's quantization configs."""

    def __init__(self, factorization: FactorizedConfig) -> None:
        super().__init__()
        self.factorization = factorization
        kind = KINDS[factorization.method]
        self.embedding: int | None = getattr(factorization, kind.embedding_key)
        """The rank of the token embedding, if it is factorized."""
        self.vocabulary = 0
        """The rows of the token embedding; a model can have other tables, of positions."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FactorizedStudent:
        """Read `quantization_config` of config.json. Raises UserError for factors without a place in vLLM's layers."""
        factorization = FactorizedConfig(**config)
        kind = KINDS[factorization.method]
        key = kind.embedding_key
        experts = next((name for name in factorization.modules if ".experts" in name), None)
        if getattr(factorization, key) is not None and kind.embedding is not LowRankEmbedding:
            what = f"its token embedding is factorized ({key} {getattr(factorization, key)})"
        elif experts is not None:
            what = f"it has factorized experts ({experts})"
        elif (form := form_of(factorization)) is not None:
            what = f"it has {form.saved_as(factorization)}"
        else:
            return cls(factorization)
        raise UserError(
            f"vLLM cannot serve this student of llmdistill: {what}, and only linears and low-rank token "
            "embeddings of floats are; make the student without that, or write a dense model by llmdistill export "
            "--to dense"
        )

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Learn the size of the vocabulary from the student's config."""
        self.vocabulary = hf_config.get_text_config().vocab_size

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a layer; other embeddings, experts and attention keep vLLM's own."""
        if isinstance(layer, VocabParallelEmbedding) and self.embedding is not None:
            if isinstance(layer, ParallelLMHead):
                return HeadMethod()
            return FactorizedEmbeddingMethod(self.embedding) if layer.org_vocab_size == self.vocabulary else None
        if not isinstance(layer, LinearBase):
            return None
        sizes = sizes_of(self.factorization, prefix, self.packed_modules_mapping)
        if all(size is None for size in sizes.values()):
            return UnquantizedLinearMethod()
        return FactorizedLinearMethod(self.factorization.method, sizes, prefix)

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # plain matrix products, which every GPU has

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has it all


def register() -> None:
    """Let vLLM know the students of llmdistill."""
    register_quantization_config(NAME)(FactorizedStudent)
    VocabParallelEmbedding.__init__ = _always_asking(VocabParallelEmbedding.__init__)


def _always_asking(init: Callable[..., None]) -> Callable[..., None]:
    """Let every table and head ask a student for its method: those of Gemma 2, OPT and BERT in vLLM ask nobody."""

    @functools.wraps(init)
    def asking(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind(*args, **kwargs)
        config = getattr(get_current_vllm_config_or_none(), "quant_config", None)
        if given.arguments.get("quant_config") is None and isinstance(config, FactorizedStudent):
            given.arguments["quant_config"] = config
        init(*given.args, **given.kwargs)

    return asking


def sizes_of(
    factorization: FactorizedConfig, prefix: str, fused: Mapping[str, Sequence[str]]
) -> dict[str, Size | None]:
    """Find the parts of a vLLM layer in a student.

    Args:
        factorization: of the student.
        prefix: vLLM's name of the layer, such as model.layers.0.self_attn.qkv_proj.
        fused: vLLM's names of layers that have several parts, and the names of these, such as q_proj.

    Returns:
        The size of each part by its name, in the order of the layer's outputs; None for a dense one.
    """
    parent, _, leaf = prefix.rpartition(".")
    numbers = [word for word in parent.split(".") if word.isdigit()]
    sizes: dict[str, Size | None] = {}
    for part in fused.get(leaf, [leaf]):
        name = f".{parent}.{part}"
        matches = [module for module in factorization.modules if name.endswith(f".{module}")]
        if not matches and part != leaf:
            # vLLM's BERT has attention.output where the student has attention.self; the number of the layer and the
            # name of the part identify it.
            alike = (module for module in factorization.modules if module.rpartition(".")[2] == part)
            matches = [module for module in alike if [word for word in module.split(".") if word.isdigit()] == numbers]
        sizes[part] = factorization.modules[matches[0]] if len(matches) == 1 else None
    return sizes


def add_parameters(layer: nn.Module, parts: Sequence[nn.Module], names: Sequence[str], dtype: torch.dtype) -> None:
    """Give a vLLM layer the flat parameters that its parts are loaded into."""
    shapes: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for index, part in enumerate(parts):
        for name, tensor in part.state_dict().items():
            shapes[name][index] = tensor
    # Not as modules: vLLM looks in the student's weights for the parameters of every module when it loads new ones.
    setattr(layer, PARTS, tuple(parts))
    for name, tensors in shapes.items():
        floating = next(iter(tensors.values())).is_floating_point()
        total = sum(tensor.numel() for tensor in tensors.values())
        # Values that no weights have, so that `share_loaded` finds tensors that were not loaded.
        empty = torch.full((total,), torch.nan, dtype=dtype) if floating else torch.full((total,), -1)
        flat: Any = nn.Parameter(empty, requires_grad=False)
        places, start = {}, 0
        for index, tensor in tensors.items():
            places[index] = (start, tensor.shape)
            start += tensor.numel()
        flat.places = places
        flat.weight_loader = _make_loader(layer, f"{'/'.join(names)}.{name}")
        # The parameter is found under the student's own name, such as A.weight, so the modules on the way must exist.
        owner = layer
        for word in name.split(".")[:-1]:
            if not hasattr(owner, word):
                owner.add_module(word, nn.Module())
            owner = owner.get_submodule(word)
        owner.register_parameter(name.rpartition(".")[2], flat)


def _make_loader(layer: Any, name: str) -> Callable[..., None]:
    """Return the function by which vLLM loads a tensor of the student's weights into a flat parameter.

    Its arguments have the names of vLLM's own loaders, because reloading passes `param` by name.
    """

    @torch.no_grad()
    def load(param: Any, loaded: Tensor, shard: Any = None) -> None:
        part = _NUMBERS.get(shard, shard)
        if part not in param.places:
            raise UserError(
                f"{name}: the student's weights have it for part {shard}, which its config.json calls dense; "
                "make the student again"
            )
        start, shape = param.places[part]
        if loaded.ndim == 2 and loaded.shape != shape and loaded.T.shape == shape:
            # vLLM's GPT-2 transposes every matrix, because the dense model's need it. The shape of a square one
            # does not show that, so a flag records it.
            loaded, layer.llmdistill_transposed = loaded.T, True
        elif hasattr(layer, TAKEN) and _is_transposed(layer, shape):
            loaded = loaded.T
        own = loaded
        for axis, size in enumerate(shape):  # the part that this rank of tensor parallelism has
            ranks, rest = divmod(own.shape[axis], size)
            if rest or ranks == 0 or layer.tp_size % ranks:
                raise UserError(
                    f"{name} is {tuple(loaded.shape)} in the student's weights, and this layer of vLLM has "
                    f"{tuple(shape)} of it; check that config.json belongs to the weights, or set tensor_parallel_size "
                    "to 1"
                )
            if ranks > 1:  # neighboring ranks have the same part where there are more ranks than key-value heads
                own = own.narrow(axis, layer.tp_rank * ranks // layer.tp_size * size, size)
        param.data[start : start + own.numel()].view(shape).copy_(own)
        if part in getattr(layer, TAKEN, ()) and name.endswith(f".{LowRankLinear.bias_name}"):
            first = getattr(layer, TAKEN)[part]
            # While vLLM reloads weights it counts the elements that `copy_` writes, and this bias is none of its own.
            torch.add(own, 0.0, out=layer.bias.data[first : first + own.numel()])

    return load


def _make_table_loader(layer: Any, name: str, whole: tuple[int, int]) -> Callable[..., None]:
    """Return the function by which vLLM loads a factor of the token embedding; `param` is named as in vLLM's own."""

    def load(param: Any, loaded: Tensor) -> None:
        if tuple(loaded.shape) != whole:
            raise UserError(
                f"{name} of the token embedding is {tuple(loaded.shape)} in the student's weights, and config.json has "
                f"{whole} of it; check that config.json belongs to the weights"
            )
        layer.weight_loader(param, loaded)

    return load


def _is_transposed(layer: Any, shape: torch.Size) -> bool:
    """Return whether a square matrix was loaded transposed, which its shape does not show."""
    return len(shape) == 2 and shape[0] == shape[1] and getattr(layer, "llmdistill_transposed", False)


@torch.no_grad()
def share_loaded(layer: Any, names: Sequence[str]) -> None:
    """Let the parts share the memory of the loaded parameters, and move a low-rank part's bias to the layer's own.

    Raises:
        UserError: the student's weights lack a tensor.
    """
    if hasattr(layer, TAKEN):  # the parts read the new weights already
        return
    parts = getattr(layer, PARTS)
    start, bias_offsets = 0, {}
    for index, (name, part) in enumerate(zip(names, parts, strict=True)):
        values = {}
        for key in part.state_dict():
            flat = layer.get_parameter(key)
            offset, shape = flat.places[index]
            value = flat.data[offset : offset + shape.numel()].view(shape)
            if _is_transposed(layer, shape):
                # A copy first, because both share their memory.
                value.copy_(value.T.clone())
            missing = value.isnan().any() if flat.is_floating_point() else (value < 0).any()
            if missing and key != LowRankLinear.bias_name:
                raise UserError(f"the student's weights lack {name}.{key}, or it is not finite; copy the student again")
            values[key] = value
        bias = values.pop(LowRankLinear.bias_name, None)
        if isinstance(part, LowRankLinear):
            part.B.bias = None
        part.load_state_dict(values, assign=True)
        part.requires_grad_(False)
        outputs = part.out_features
        # A bias that is still NaN is one that the student does not have.
        if bias is not None and not bias.isnan().any():
            layer.bias.data[start : start + outputs] = bias
            bias_offsets[index] = start
        start += outputs
    setattr(layer, TAKEN, bias_offsets)
