"""LoRA adapters (peft): reading adapter folders, training students with adapters, merging them into stock models."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmdistill.config import LoraConfig
from llmdistill.errors import UserError
from llmdistill.files import LFS_REMEDY, is_lfs_pointer, read_json
from llmdistill.models.families import layers_of
from llmdistill.models.general import is_linear
from llmdistill.models.student_form import StudentForm
from llmdistill.models.weight_files import check_weight_files

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_Loaded = TypeVar("_Loaded")


def is_adapter(path: str | Path) -> bool:
    """Return whether a folder or a hub name is a peft adapter."""
    return adapter_folder(path) is not None


def adapter_folder(path: str | Path) -> Path | None:
    """Return the folder of an adapter, downloading a hub name; None if it is no adapter or the hub does not answer."""
    if os.path.exists(path):
        return Path(path) if (Path(path) / CONFIG_FILE).is_file() else None
    return _download_adapter(str(path))


@cache
def _download_adapter(name: str) -> Path | None:
    """Download an adapter from the hub. Cached per name, because a request to an unreachable hub takes a while."""
    from huggingface_hub import snapshot_download
    from transformers.utils import peft_utils

    try:
        file = peft_utils.find_adapter_config_file(name)
    except (OSError, ValueError):  # no such name on the hub, or not a valid name
        return None
    if file is None:
        return None
    # The pickled adapter_model.bin is never downloaded.
    return Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.jinja", WEIGHTS_FILE]))


def of_base(adapter: Path, load: Callable[[str], _Loaded]) -> _Loaded:
    """Call `load` with the base of an adapter: a path relative to the adapter's folder if it exists, else as given.

    Raises UserError, which names the adapter's config file, if it is damaged, if it names no base or an adapter as
    base, or if `load` raises UserError.
    """
    check_weight_files(adapter)
    file = adapter / CONFIG_FILE
    content = read_json(file)
    name = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(name, str) or not name:
        raise UserError(f"{file}: it names no base model: set base_model_name_or_path to a folder or a hub name")
    base = str((adapter / name).resolve()) if os.path.isdir(adapter / name) else name
    if is_adapter(base):
        raise UserError(f"{file}: its base {name} is an adapter itself: merge that one first, or name its base")
    try:
        return load(base)
    except UserError as error:
        raise UserError(f"{file}: base_model_name_or_path: {error}") from error


def apply_adapter(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Merge an adapter into its base, given in fp32 so that only the final cast rounds, and return the stock model.

    The outputs of the merged model are compared with those of peft's own model. An adapter that changes only the token
    embedding or only the LM head unties them, and an adapter with more or fewer embeddings than the base resizes it.
    Raises UserError if the adapter has no safetensors file, cannot be merged, or does not fit the base.
    """
    from peft import PeftConfig, PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if not (folder / WEIGHTS_FILE).is_file():
        raise UserError(
            f"{folder}: the adapter has no {WEIGHTS_FILE}: save it as safetensors (a pickled .bin is never read)"
        )
    if is_deepspeed_zero3_enabled():
        raise UserError(
            f"{folder}: an adapter cannot be merged into a base that ZeRO-3 shards while loading: "
            "write the merged model first (llmdistill.models.load.merge_adapter) and load that"
        )
    settings = read_json(folder / CONFIG_FILE)
    kinds: dict[str, type[PeftConfig]] = {name.value: kind for name, kind in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = kinds.get(str(settings.get("peft_type")), PeftConfig)
    if issubclass(kind, PromptLearningConfig) or kind.__name__ == "XLoraConfig":  # they may name files of their own
        raise UserError(
            f"{folder / CONFIG_FILE}: adapters of type {settings['peft_type']} cannot be merged into their base; give "
            "the base alone, or an adapter that changes weights, such as LoRA"
        )
    if settings.get("megatron_config"):  # peft imports the module that megatron_core names
        raise UserError(f"{folder / CONFIG_FILE}: megatron_config is set: adapters of Megatron are not read")
    if settings.get("layer_replication"):
        raise UserError(
            f"{folder / CONFIG_FILE}: layer_replication gives copies of a layer different adapters, which cannot be "
            "merged into one layer: train an adapter without it, or give the base alone"
        )
    # If the adapter brings its own embeddings, for added tokens, the base needs as many rows before peft loads it.
    rows_by_module, table = embedding_rows(folder), cast(nn.Embedding, base.get_input_embeddings()).weight
    rows = next(iter(rows_by_module.values()), table.shape[0])
    if rows != table.shape[0]:
        head = base.get_output_embeddings()
        if len(rows_by_module) == 1 and head is not None and head.weight is not table:
            raise UserError(
                f"{folder}: the adapter has {rows} rows of {next(iter(rows_by_module))} alone, and its base has "
                f"{table.shape[0]}: save it with modules_to_save for embeddings and LM head"
            )
        # The adapter's own rows replace the new ones, so computing good ones would be wasted.
        base.resize_token_embeddings(rows, mean_resizing=False)
    model = _load_adapter(base, folder, settings)
    expected_outputs = _compute_outputs(model.eval())
    try:
        merged = _merge(model, is_tied=base.config.tie_word_embeddings)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{folder}: the adapter cannot be merged into its base ({_shorten(str(error))}); train it again, or give "
            "the base alone"
        ) from error
    difference = (_compute_outputs(merged.eval()) - expected_outputs).abs().max().item()
    if not difference <= _TOLERANCE * max(1.0, expected_outputs.abs().max().item()):  # also for NaN
        raise UserError(
            f"{folder}: the adapter cannot be merged into its base: an output differs by {difference:.2g} from peft's "
            "model; train another one, or give the base alone"
        )
    return merged.requires_grad_(True)


def _load_adapter(base: PreTrainedModel, folder: Path, settings: dict[str, Any]) -> Any:
    """Load an adapter onto its base. Raises UserError if it does not fit, or its settings are not of its weights."""
    from peft import PeftModel, get_peft_model_state_dict

    state = base.state_dict().keys()
    try:
        with safe_open(str(folder / WEIGHTS_FILE), framework="pt") as file:
            saved = set(file.keys())
            most = max((max(file.get_slice(name).get_shape(), default=0) for name in saved), default=0)
        # Check the ranks of LoRA before peft allocates matrices of them: a mistyped rank would fill the memory.
        pattern = settings.get("rank_pattern")
        ranks = {"r": settings.get("r"), **(pattern if isinstance(pattern, dict) else {})}
        for key, rank in ranks.items() if settings.get("peft_type") == "LORA" else ():
            if type(rank) is not int or not 1 <= rank <= most:
                raise UserError(
                    f"{folder / CONFIG_FILE}: {key} is {repr(rank)[:60]}, but the adapter's weights have ranks from 1 "
                    f"to {most}: take the file that belongs to the weights"
                )
        # Without CUDA, peft's BOFT leaves CC and CXX set to gcc, by which DeepSpeed would compile its extensions anew.
        with warnings.catch_warnings(), patch.dict(os.environ):
            warnings.simplefilter("ignore")  # missing and unknown weights are checked below
            model: Any = PeftModel.from_pretrained(base, str(folder), torch_device="cpu")
        expected = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except ImportError as error:  # of libraries that do not go together, which no other adapter mends
        versions = []
        for name in dict.fromkeys(["peft", (error.name or "peft").partition(".")[0]]):
            try:
                versions.append(f"{name} (now {version(name)})")
            except PackageNotFoundError:
                versions.append(f"{name} (now missing)")
        raise UserError(
            f"{folder}: peft cannot read the adapter ({_shorten(str(error))}): install other versions of "
            f"{' and '.join(versions)}"
        ) from error
    except Exception as error:  # peft raises many types for values that it does not expect
        raise _misfit_error(folder, base, str(error) or type(error).__name__) from error
    # peft saves the base's matrix beside an adapter of the embedding or the LM head, so those names are known too.
    own = {name.replace(".default.", ".") for name in model.state_dict()}
    possible = own | {f"base_model.model.{name}" for name in state}
    missing = sorted(expected - saved)
    unknown = sorted(saved - expected - possible)
    if missing or unknown:
        what = f"it lacks {missing[0]}" if missing else f"the base has no place for its {unknown[0]}"
        raise _misfit_error(folder, base, what)
    return model


def _merge(model: Any, *, is_tied: bool) -> PreTrainedModel:
    """Merge the adapter of peft's model into the base; `is_tied` says whether its LM head was its embedding."""
    # Untie shared weights first: merging into one module would otherwise change the other one, too.
    seen: set[int] = set()
    for module in model.get_base_model().modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
            seen.add(id(parameter))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says that the copies are not tied
        # safe_merge makes peft refuse merged weights that are not finite.
        merged = cast(PreTrainedModel, model.merge_and_unload(safe_merge=True))
    merged.config.tie_word_embeddings = is_tied  # which peft has set to false for the copies
    # Tie again what is still equal; a model whose LM head now differs from its embedding stays untied.
    parameters = dict(merged.named_parameters(remove_duplicate=False))
    ties = merged.get_expanded_tied_weights_keys(all_submodels=True).items()
    there = [pair for pair in ties if parameters.keys() >= set(pair)]
    if all(torch.equal(parameters[target], parameters[source]) for target, source in there):
        merged.tie_weights()
    else:
        merged.config.tie_word_embeddings = False
        merged.all_tied_weights_keys = merged.get_expanded_tied_weights_keys(all_submodels=True)
    return merged


_TOLERANCE = 1e-3
"""Largest difference of an output after the merging, as a share of the largest output (and of 1 at least)."""


@torch.no_grad()
def _compute_outputs(model: Any) -> Tensor:
    """Return the first output for two random sequences."""
    ids = torch.randint(model.config.get_text_config().vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    return cast(Tensor, model(input_ids=ids, attention_mask=torch.ones_like(ids))[0])


def embedding_rows(folder: Path) -> dict[str, int]:
    """Return the number of rows of each full token embedding and LM head in an adapter, by the module's name."""
    if not (folder / WEIGHTS_FILE).is_file():
        return {}
    try:
        with safe_open(str(folder / WEIGHTS_FILE), framework="pt") as file:
            matches = ((_EMBEDDING.search(name), name) for name in file.keys())  # noqa: SIM118 - it is no dict
            return {match[1]: int(file.get_slice(name).get_shape()[0]) for match, name in matches if match is not None}
    except (OSError, SafetensorError):  # the loading of the weights reports it
        return {}


_EMBEDDING = re.compile(
    r"\.(embed_tokens|wte|word_embeddings|embed_in|lm_head|embed_out)(?:\.base_layer|\.modules_to_save)?\.weight$"
)
"""The names that architectures give their token embedding and LM head."""
_OF_EMBEDDING = re.compile(_EMBEDDING.pattern.partition(")")[0] + r")\.")


def unties_embeddings(folder: Path) -> bool:
    """Return whether merging an adapter unties LM head and token embedding: it changes one, or each differently."""
    settings = read_json(folder / CONFIG_FILE)
    if settings.get("ensure_weight_tying") or not (folder / WEIGHTS_FILE).is_file():
        return False
    try:
        with safe_open(str(folder / WEIGHTS_FILE), framework="pt") as file:
            names = [name for name in file.keys() if _OF_EMBEDDING.search(name)]  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError):  # the loading of the weights reports it
        return False
    # A full matrix alone proves nothing, because peft also saves the base's; trained single tokens change both.
    matrices = {match[1] for name in names if (match := _EMBEDDING.search(name))}
    adapted = (name for name in names if not _EMBEDDING.search(name) and "trainable_tokens" not in name)
    saved = {str(name).rpartition(".")[2] for name in settings.get("modules_to_save") or ()}
    return not matrices.isdisjoint(saved) or any(adapted)


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the parameters in place. Buffers keep their dtype, as in a model loaded in that dtype (RoPE's are fp32)."""
    for parameter in model.parameters():
        # Through .data, because ties and hooks hold the Parameter itself.
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


class Adapters(StudentForm):
    """LoRA: adapters learn alone, and a saved student has them merged."""

    settings = LoraConfig

    def is_chosen(self, settings: LoraConfig) -> bool:
        return settings.rank is not None

    def describe(self, settings: LoraConfig) -> str:
        return f", adapters of rank {settings.rank} alone are trained"

    def trains_alone(self) -> bool:
        return True

    def add(self, model: PreTrainedModel, settings: LoraConfig, seed: int) -> None:
        add_lora(model, settings, seed)

    def finish(self, model: PreTrainedModel, settings: LoraConfig, state: Mapping[str, Tensor]) -> None:
        add_lora(model, settings, seed=0)  # the seed is irrelevant: the trained adapters replace these
        load_adapters(model, state)
        merge_lora(model)


def add_lora(model: PreTrainedModel, settings: LoraConfig, seed: int) -> None:
    """Add adapters to the linears of a model, in place, and freeze all other parameters.

    At the start B is zero, so the adapters change nothing, and A depends only on the seed; the global random state does
    not change. The model keeps its class and its module names, so taps record the adapted outputs.

    Raises UserError if a target matches no linear of the layers, or if a chosen module is a Kronecker product.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    assert settings.rank is not None
    dtype = model.dtype
    config = PeftConfig(
        r=settings.rank,
        lora_alpha=cast(int, settings.alpha),
        lora_dropout=settings.dropout,
        target_modules=_resolve_targets(model, settings.targets),
        init_lora_weights=False,
    )
    # peft's linears draw weights from the global generator, even if these are replaced below.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft sets fan_in_fan_out for each module by its type and warns
        inject_adapter_in_model(config, model)
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for _, layer in _adapted_layers(model):
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        # LoRA's initialization, the default of torch's linears. peft itself would draw from the global generator.
        values = nn.init.kaiming_uniform_(torch.empty(a.shape), a=5**0.5, generator=generator)
        a.data, b.data = values.to(a.device, dtype), torch.zeros_like(b, dtype=dtype)
        a.requires_grad_(True)
        b.requires_grad_(True)


@torch.no_grad()
def merge_lora(model: PreTrainedModel) -> None:
    """Merge the adapters into their linears, in place. The model then has no adapters and all parameters are trainable.

    W + alpha / rank · BA is computed in fp64, so that only the cast to the dtype of the stored matrix rounds.
    """
    for name, layer in _adapted_layers(model):
        base = layer.get_base_layer()
        a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
        delta = layer.scaling["default"] * (b @ a)
        # Conv1D stores (inputs, outputs).
        weight = base.weight.double() + (delta.T if isinstance(base, Conv1D) else delta)
        base.weight.data = weight.to(base.weight.dtype)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, base)
    vars(model).pop("peft_config", None)
    model.requires_grad_(True)


def load_adapters(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Load the adapters that `add_lora` added from a state dict of these alone; raises RuntimeError if it differs."""
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if wanted != state.keys():
        differing = min(wanted ^ state.keys())
        raise RuntimeError(f"the adapters' state and the model differ, first in {differing}")
    model.load_state_dict(state, strict=False)


def _adapted_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _resolve_targets(model: PreTrainedModel, targets: list[str] | None) -> list[str]:
    """Return the full names of the linears to adapt. A target may also be the name of a factorized linear."""
    layers = layers_of(model)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    # The factors of a Kronecker product are parameters of one module, not linears.
    own = {name: {key for key, _ in module.named_parameters(recurse=False)} for name, module in layers.named_modules()}
    kronecker = [
        name
        for name, keys in own.items()
        if {"A", "B"} <= keys and (targets is None or any(_matches(name, target) for target in targets))
    ]
    if kronecker:
        remedy = "name dense linears in student.lora.targets"
        remedy = remedy if targets is None else f"take {kronecker[0]} out of targets"
        raise UserError(
            f"student.lora.rank: adapters go on linears, but {kronecker[0]} of the student's layers is a Kronecker "
            f"product: {remedy}, or leave the rank out to train all weights"
        )
    names = [f"{prefix}.{name}" for name, module in layers.named_modules() if is_linear(module)]
    if targets is None:
        return names
    for target in targets:
        if not any(_matches(name, target) for name in names):
            there = sorted({_strip_factor(name).rpartition(".")[2] for name in names})
            raise UserError(
                f"student.lora.targets: {target!r} is no linear of the student's layers: there are {', '.join(there)}"
            )
    return [name for name in names if any(_matches(name, target) for target in targets)]


def _strip_factor(name: str) -> str:
    """Return the name of the linear of which this is a factor; any other name as it is."""
    return name.removesuffix(".A").removesuffix(".B")


def _matches(name: str, target: str) -> bool:
    """Return whether the name of a linear, or of the linear that it is a factor of, ends with the target."""
    return any(f".{candidate}".endswith(f".{target}") for candidate in (name, _strip_factor(name)))


def _misfit_error(folder: Path, base: PreTrainedModel, reason: str) -> UserError:
    if is_lfs_pointer(folder / WEIGHTS_FILE):
        return UserError(f"{folder / WEIGHTS_FILE}: {LFS_REMEDY}")
    return UserError(
        f"{folder}: the adapter does not fit its base, a {type(base).__name__} ({_shorten(reason)}): "
        f"correct base_model_name_or_path in {CONFIG_FILE}"
    )


def _shorten(text: str) -> str:
    return shorten(text, 300, placeholder=" ...")
