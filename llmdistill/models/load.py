"""Loading models. Loading never runs code from a checkpoint: only safetensors, no remote code."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from llmdistill.errors import UserError
from llmdistill.models.adapters import adapter_folder, apply_adapter, cast_parameters
from llmdistill.models.configs import load_config, local_folder, not_loaded, of_base
from llmdistill.models.families import family_of
from llmdistill.models.tokenizer import load_tokenizer

Head = Literal["lm_head", "pretraining", "sequence", "none"]
"""The head of a model: lm_head, the LM head (causal for decoders, masked for encoders); pretraining, the LM head and
BERT's next-sentence head; sequence, a classifier of whole sequences; none, an encoder without a head."""


def auto_class(config: PreTrainedConfig, head: Head) -> Any:
    """The auto class of transformers that loads a model with a head; a decoder has an LM head or a classifier."""
    if head == "sequence":
        return AutoModelForSequenceClassification
    if family_of(config).causal:
        return AutoModelForCausalLM
    return {"lm_head": AutoModelForMaskedLM, "pretraining": AutoModelForPreTraining, "none": AutoModel}[head]


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    head: Head = "lm_head",
    new_head: bool = False,
    num_classes: int | None = None,
) -> PreTrainedModel:
    """Load a model in evaluation mode, by default with its LM head.

    Args:
        path: a folder, or a name on the hub; a peft adapter is merged into its base in fp32 and then cast.
        dtype: dtype of the weights.
        device: device to move the model to; None leaves the model on the device where it was loaded.
        head: the head of the model.
        new_head: whether a head that is missing in the weights is initialised at random (from torch's generator)
            instead of raising an error.
        num_classes: outputs of a new classifier, 1 for a classifier that predicts a score; None takes the config's.

    Raises:
        UserError: as in `load_config`, or there is no safetensors file, weights are missing or do not fit the config,
            or an adapter does not fit its base.
    """
    _, adapter = local_folder(path), adapter_folder(path)
    if adapter is None:
        model = _load_weights(path, dtype, head, new_head, num_classes)
    else:
        whole = partial(_load_weights, dtype=torch.float32, head=head, new_head=new_head, num_classes=num_classes)
        model = apply_adapter(of_base(adapter, whole), adapter)
        cast_parameters(model, dtype)
    return model if device is None else cast(PreTrainedModel, model.to(cast(Any, device)))


def _load_weights(
    path: str | Path, dtype: torch.dtype, head: Head, new_head: bool, num_classes: int | None
) -> PreTrainedModel:
    config = load_config(path)
    if num_classes is not None:
        config.num_labels = num_classes
    if head == "sequence" and config.pad_token_id is None:  # a decoder classifies by its last token before the padding
        config.pad_token_id = load_tokenizer(path).pad_token_id
    try:
        loaded: Any = auto_class(config, head).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, UserError | torch.OutOfMemoryError):
            raise
        raise not_loaded(path, "weights (safetensors)", error) from error
    model, info = loaded
    missing = {name for name in info["missing_keys"] if not _may_be_new(model, name, new_head)}
    if missing:  # transformers would initialise them at random
        raise UserError(
            f"{path}: {len(missing)} weights are missing, such as {min(missing)}: the folder is not a whole checkpoint "
            f"of this architecture{_WITH_HEAD[head]}"
        )
    return cast(PreTrainedModel, model)


_WITH_HEAD: dict[Head, str] = {
    "lm_head": " with its language-model head (terms on hidden states, matrices and relations need none: set the "
    "weights of those on the output to 0)",
    "pretraining": " with its masked-word and next-sentence heads (data.text.next_sentence=false drops the latter)",
    "sequence": " with a classifier",
    "none": "",
}


def _may_be_new(model: PreTrainedModel, name: str, new_head: bool) -> bool:
    """Whether a weight may start at random: with `new_head` those of head and pooler; without a head, the pooler's."""
    in_base = name.startswith(f"{model.base_model_prefix}.") or model.base_model is model
    if ".pooler." in f".{name}":
        return new_head or model.base_model is model
    return new_head and not in_base


def build_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config on the meta device, without weights, to count parameters and to plan.

    Encoders are the base model (with pooler) and decoders the causal LM, because papers count their parameters so.

    Raises:
        UserError: the architecture is not supported.
    """
    auto = AutoModelForCausalLM if family_of(config).causal else AutoModel
    with torch.device("meta"):
        return cast(PreTrainedModel, auto.from_config(config, attn_implementation="sdpa", trust_remote_code=False))
