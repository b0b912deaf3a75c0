"""How transformers loads a student: the factorisation stands in config.json, and a hook exchanges the modules.

transformers calls its hook for changed modules "quantizer"; nothing is quantised here. Before the weights are read,
while the model is on the meta device, the named linears are factorised; from then on loading is the stock one
(sharded files, dtype, device_map, tied weights). Without `import llmdistill` transformers warns of an unknown
quantization type and loads the dense architecture with fresh random weights.

This module is loaded in the middle of transformers' own import, when its models are not there yet. What builds on them
is therefore imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from llmdistill.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmdistill.factorize.kinds import Size

NAME = "llmdistill"
"""`quant_method` in a student's config.json."""


class FactorizedConfig(QuantizationConfigMixin):
    """The factorisation of a student, kept in config.json as `quantization_config`."""

    quant_method: Any  # transformers types it as its own enum, which a registered method is not part of

    def __init__(
        self,
        method: str = "svd",
        modules: dict[str, Any] | None = None,
        quant_method: str = NAME,
        **embedding: int | None,
    ) -> None:
        """`modules` maps names inside the base model to sizes, ranks or [m1, n1, sums].

        The size of the token embedding is under the key of its method, embedding_rank or embedding_columns. UserError
        for what this version does not know.
        """
        from llmdistill.factorize.kinds import KINDS

        if method not in KINDS:
            raise _unknown(f"method {method!r}")
        kind = KINDS[method]
        unknown = embedding.keys() - {kind.embedding_key}
        if unknown:
            raise _unknown(f"keys {sorted(unknown)}")
        self.quant_method = quant_method
        self.method = method
        try:
            self.modules = {name: kind.write_size(kind.read_size(size)) for name, size in (modules or {}).items()}
        except (TypeError, ValueError) as error:
            raise _unknown(f"a size that the method {method} does not have ({error})") from error
        setattr(self, kind.embedding_key, embedding.get(kind.embedding_key))

    def install(self, model: PreTrainedModel) -> None:
        """Give a dense model, perhaps on the meta device, the modules of fresh weights that this names."""
        from llmdistill.factorize.install import install
        from llmdistill.factorize.kinds import KINDS

        kind = KINDS[self.method]
        sizes: dict[str, Size] = {name: kind.read_size(size) for name, size in self.modules.items()}
        install(model, sizes, getattr(self, kind.embedding_key), self.method)


def _unknown(what: str) -> UserError:
    return UserError(
        f"the student's config.json gives {what} under quantization_config, which this version of llmdistill "
        "does not know; install the version that made the student"
    )


def install_saved(model: PreTrainedModel) -> None:
    """Give a fresh model the factorised modules that its config asks for, if any; what loading does, without weights.

    For counting: a model that transformers builds from a config alone is always dense.
    """
    saved = getattr(model.config, "quantization_config", None)
    if isinstance(saved, dict) and saved.get("quant_method") == NAME:
        saved = FactorizedConfig.from_dict(saved)
    if isinstance(saved, FactorizedConfig):
        saved.install(model)


class FactorizedLoader(HfQuantizer):
    """Exchanges the modules before the weights are read, and leaves an ordinary model behind."""

    quantization_config: FactorizedConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """UserError when asked to factorise on the fly: that needs the dense weights first."""
        if not self.pre_quantized:
            raise UserError(
                "quantization_config of llmdistill describes a saved student and cannot be passed to from_pretrained; "
                "load the dense model and call llmdistill.factorize.factorize"
            )

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.quantization_config.install(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        # Nothing is quantised, so nothing should say so: transformers refuses .float(), .half() and training, and
        # resizes differently under ZeRO-3, for models that do. What save_pretrained needs is in the config.
        vars(model).pop("is_quantized", None)
        del model.hf_quantizer, model.quantization_method
        for module in model.modules():
            vars(getattr(module, "config", self)).pop("_is_quantized", None)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def register() -> None:
    """Make transformers know students, as loading this module does; calling it again changes nothing."""
    if NAME not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(NAME)(FactorizedConfig)
    if NAME not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(NAME)(FactorizedLoader)


register()
