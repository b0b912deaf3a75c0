"""vLLM's plugin: it serves factorized students with their factors.

vLLM loads this module by the entry point of the package, in each of its processes, and nothing else does: it needs
vLLM. A student's config.json names its `quant_method`, under which `register` gives vLLM the classes below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from llmdistill.errors import UserError
from llmdistill.factorize.hub import NAME, FactorizedConfig
from llmdistill.factorize.kinds import Size
from llmdistill.factorize.vllm_layers import PARTS, add_parameters, check_served, make_parts, sizes_of, take_loaded


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
        whole = len(self.sizes) == 1 and len(outputs) > 1  # the student has one matrix for several outputs, as GPT-2
        if split and (self.method != "svd" or whole):
            what = "a matrix that makes query, key and value" if whole else f"factors of the kind {self.method}"
            raise UserError(f"{self.prefix}: {what} cannot be split over tensor_parallel_size ranks; set it to 1")
        parts = make_parts(self.method, self.sizes, input_size_per_partition, [sum(outputs)] if whole else outputs)
        add_parameters(layer, parts, list(self.sizes), params_dtype)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make the parts of what was loaded."""
        take_loaded(layer, [f"{self.prefix.rpartition('.')[0]}.{part}" for part in self.sizes])

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., n) -> (..., m)."""
        outputs = [part(x) for part in getattr(layer, PARTS)]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if bias is None else y + bias


class FactorizedStudent(QuantizationConfig):
    """The factorization of a student, as vLLM asks for it."""

    def __init__(self, factorization: FactorizedConfig) -> None:
        super().__init__()
        self.factorization = factorization

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FactorizedStudent:
        """Read `quantization_config` of config.json. Raises UserError for factors that cannot be served."""
        factorization = FactorizedConfig(**config)
        check_served(factorization)
        return cls(factorization)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        """Return what runs a layer: embeddings, experts and attention are vLLM's own."""
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
