"""Lets transformers load a student: config.json holds the factorization, and a hook replaces the modules.

transformers calls its hook for changed modules "quantizer". The named linears are factorized before the weights are
read, while the model is on the meta device; after that, loading is the stock one, and for a student of few bits that of
torchao.

Without llmdistill, transformers only warns of a quantizer that it does not know and gives the model random weights.
config.json therefore names a file of weights that no loader finds, in the words of `REFUSAL`: transformers stops with
an error that quotes the name, and only the hook here removes it.

This module is loaded during the import of transformers, before the models of transformers are available. Code that
needs these models is therefore imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import wrapt
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from llmdistill.errors import UserError
from llmdistill.models.weight_files import REFUSAL, is_refusal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from llmdistill.models.quantized import PackedTorchAo

NAME = "llmdistill"
"""`quant_method` in a student's config.json."""


@register_quantization_config(NAME)
class FactorizedConfig(QuantizationConfigMixin):
    """The factorization of a student, stored in config.json as `quantization_config`."""

    quant_method: Any  # transformers types it as its own enum, which has no registered methods

    def __init__(
        self,
        method: str = "svd",
        modules: dict[str, Any] | None = None,
        quant_method: str = NAME,
        quantize: dict[str, Any] | None = None,
        **embedding: int | None,
    ) -> None:
        """`modules` maps names inside the base model to sizes: ranks or [m1, n1, sums]; `quantize` has the weights
        (int8 or int4) and the group size of a student of few bits.

        The size of the token embedding has the key of its method, embedding_rank or embedding_columns. Raises UserError
        for keys and values that this version does not know.
        """
        from llmdistill.students.kinds import KINDS, is_size

        if not isinstance(method, str) or method not in KINDS:
            raise _unknown(f"method {method!r}")
        kind = KINDS[method]
        unknown = embedding.keys() - {kind.embedding_key}
        if unknown:
            raise _unknown(f"keys {sorted(unknown)}")
        self.quant_method = quant_method
        self.method = method
        if not isinstance(modules, dict | None):
            raise _unknown(f"modules {modules!r}")
        try:
            self.modules = {name: kind.read_size(size) for name, size in (modules or {}).items()}
        except (TypeError, ValueError) as error:
            raise _unknown(f"a size that the method {method} does not have ({error})") from error
        size = embedding.get(kind.embedding_key)
        if size is not None and not is_size(size):
            raise _unknown(f"{kind.embedding_key} {size!r}")
        setattr(self, kind.embedding_key, size)
        if quantize is not None:
            known = isinstance(quantize, dict) and quantize.keys() <= {"weights", "group_size"}
            group_size = quantize.get("group_size") if known else None
            if (
                not known
                or quantize.get("weights") not in ("int8", "int4")
                or not (group_size is None or is_size(group_size))
            ):
                raise _unknown(f"quantize {quantize!r}")
            self.quantize = quantize

    def install(self, model: PreTrainedModel) -> None:
        """Replace named modules of a dense model by factorized ones with random weights, also on the meta device."""
        from llmdistill.students.install import install
        from llmdistill.students.kinds import KINDS, Factorization

        embedding = getattr(self, KINDS[self.method].embedding_key)
        install(model, Factorization(method=self.method, sizes=self.modules, embedding=embedding))
        _without_refusal(model.config)


def _without_refusal(config: PreTrainedConfig) -> PreTrainedConfig:
    if is_refusal(getattr(config, "transformers_weights", None)):
        del config.transformers_weights
    return config


def _unknown(what: str) -> UserError:
    return UserError(
        f"the student's config.json gives {what} under quantization_config, which this version of llmdistill "
        "does not know; install the version that made the student"
    )


@register_quantizer(NAME)
class FactorizedLoader(HfQuantizer):
    """Replaces the modules before the weights are read; the loaded model is then handled like an ordinary model."""

    quantization_config: FactorizedConfig
    torchao: PackedTorchAo | None = None
    """What saves and loads the weights of a student of few bits."""

    def __init__(self, quantization_config: FactorizedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        quantize = getattr(quantization_config, "quantize", None)
        if quantize is not None:
            from llmdistill.models.quantized import PackedTorchAo, check_torchao

            check_torchao("this student of few bits")
            self.torchao = PackedTorchAo(**quantize)

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raises UserError for factorization during loading, because that needs the dense weights first."""
        if not self.pre_quantized:
            raise UserError(
                "quantization_config of llmdistill describes a saved student and cannot be passed to from_pretrained; "
                "load the dense model and factorize it by llmdistill.compress"
            )

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Remove REFUSAL: transformers passes the config here before it looks for the weights."""
        return _without_refusal(config)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.quantization_config.install(model)
        if self.torchao is not None:
            self.torchao.set_metadata(kwargs["checkpoint_files"])

    def get_weight_conversions(self) -> list[Any]:
        return [] if self.torchao is None else self.torchao.get_weight_conversions()

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> Any:
        return (None, {}) if self.torchao is None else self.torchao.get_state_dict_and_metadata(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from llmdistill.students.install import save_apart

        if self.torchao is not None:
            from llmdistill.models.quantized import settle_loaded

            settle_loaded(model)
            save_apart(model)
            return
        save_apart(model)
        # Nothing is quantized, so the model must not be marked as quantized: transformers refuses .float(), .half() and
        # training for quantized models, and resizes them differently under ZeRO-3. The config has all that
        # save_pretrained needs.
        vars(model).pop("is_quantized", None)
        del model.hf_quantizer, model.quantization_method
        for module in model.modules():
            vars(getattr(module, "config", self)).pop("_is_quantized", None)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


@wrapt.patch_function_wrapper("transformers.configuration_utils", "PreTrainedConfig.to_diff_dict")
def _refused_elsewhere(
    to_diff_dict: Callable[..., dict[str, Any]], config: PreTrainedConfig, args: Any, kwargs: Any
) -> dict[str, Any]:
    """Add REFUSAL to the config.json of a student; transformers has no hook for what a config writes."""
    values = to_diff_dict(*args, **kwargs)
    if (values.get("quantization_config") or {}).get("quant_method") == NAME:
        values["transformers_weights"] = REFUSAL
    return values
