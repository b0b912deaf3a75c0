"""Lets transformers load a student: config.json holds the factorization, and a hook replaces the modules.

transformers calls its hook for changed modules "quantizer". The named linears are factorized before the weights are
read, while the model is on the meta device; after that, loading is the stock one, or that of a form (`models.forms`)
that lies over the factors.

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

    from llmdistill.models.student_form import StudentForm
    from llmdistill.students.kinds import Factorization

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
        **more: Any,
    ) -> None:
        """`modules` maps names inside the base model to sizes: ranks or [m1, n1, sums].

        `more` has the size of the token embedding under the key of its method, embedding_rank or embedding_columns, and
        what a form over the factors has saved under its own key. Raises UserError for keys and values that this version
        does not know.
        """
        from llmdistill.models.forms import FORMS
        from llmdistill.models.student_form import is_size
        from llmdistill.students.kinds import KINDS

        if not isinstance(method, str) or method not in KINDS:
            raise _unknown(f"method {method!r}")
        kind = KINDS[method]
        forms = {form.key: form for form in FORMS.values() if form.key is not None}
        unknown = more.keys() - {kind.embedding_key, *forms}
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
        size = more.get(kind.embedding_key)
        if size is not None and not is_size(size):
            raise _unknown(f"{kind.embedding_key} {size!r}")
        setattr(self, kind.embedding_key, size)
        for key, form in forms.items():
            if more.get(key) is None:
                continue
            if not form.is_valid(more[key]):
                raise _unknown(f"{key} {more[key]!r}")
            setattr(self, key, more[key])

    @classmethod
    def of(cls, factorization: Factorization) -> FactorizedConfig:
        """Return what config.json says of a factorization."""
        from llmdistill.students.kinds import KINDS

        embedding: dict[str, Any] = {KINDS[factorization.method].embedding_key: factorization.embedding}
        return cls(factorization.method, dict(factorization.sizes), **embedding)

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
    form: StudentForm | None = None
    """The form over the factors that the student was saved with."""
    over: HfQuantizer | None = None
    """What loads and saves the tensors of this form."""

    def __init__(self, quantization_config: FactorizedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        from llmdistill.models.forms import form_of

        self.form = form_of(quantization_config)
        if self.form is not None and self.form.key is not None:
            self.over = self.form.loader(getattr(quantization_config, self.form.key))

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raise a UserError for factorization during loading, because that needs the dense weights first."""
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
        # torchao's quantizer does so at this point when it is the model's own.
        if self.over is not None and hasattr(self.over, "set_metadata"):
            self.over.set_metadata(kwargs["checkpoint_files"])

    def get_weight_conversions(self) -> list[Any]:
        return [] if self.over is None else self.over.get_weight_conversions()

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> Any:
        return (None, {}) if self.over is None else self.over.get_state_dict_and_metadata(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from llmdistill.students.install import save_apart

        if self.form is not None:
            self.form.settle(model)
            save_apart(model)
            return
        save_apart(model)
        # Nothing is quantized, so the model must not be marked as quantized: transformers refuses .float(), .half() and
        # training for quantized models, and resizes them differently under ZeRO-3. The config has all that
        # save_pretrained needs.
        vars(model).pop("is_quantized", None)
        del model.hf_quantizer, model.quantization_method
        for module in model.modules():
            # `self` stands in for the config that a module lacks, and has no such attribute.
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
