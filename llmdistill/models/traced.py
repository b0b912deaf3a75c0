"""What the layers of an architecture without an entry in `families` hold, traced by a forward pass without weights.

The pass runs on the meta device, which computes shapes alone. In it an attention function of ours notes who calls
transformers' attention interface, and hooks note what the modules of the layers return.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from llmdistill.errors import UserError
from llmdistill.internals.transformers_names import attention_implementation
from llmdistill.models.general import causal_by_classes, find_layers, is_linear

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

_NAME = "llmdistill_trace"
_ROWS, _TOKENS = 2, 8
_MOST_POSITIONS = 1 << 18
_NOT_OF_MODULES = {"quantization_config", "dtype", "transformers_version", "architectures", "_name_or_path"}
"""Settings that do not change the modules: those of a factorized student have the names of its teacher's."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The parts of a model's layers by their names, the same in all layers, and their sizes."""

    layers: str
    """Name of the list of layers within the base model."""
    attention: str
    """Name within a layer: the module that calls the attention function."""
    ffn_up: str | None
    ffn_gate: str | None
    ffn_down: str
    """Names within a layer, as in `families.Family`."""
    scores_are_products: bool
    """Whether attention is the softmax of the products of queries and keys under a mask of causality and windows."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    """Features of a head of values."""
    intermediate_size: int
    """Width of the feed-forward part; that of the model where a module is tapped whole."""
    windows: tuple[int | None, ...]
    """Sliding attention window of each layer in tokens, including the token itself; None for full attention."""


class _Attention(NamedTuple):
    """A call of the attention function."""

    layer: int
    name: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: Callable[..., Tensor] | None
    """The function of positions that the mask was made by; None if the mask was made by other means."""


class _Call(NamedTuple):
    """A call of a module, with the shapes of its first input and of its output (or first output)."""

    inputs: tuple[int, ...]
    output: tuple[int, ...]


class _Recording(NamedTuple):
    attention: list[_Attention]
    """The calls of the attention function."""
    modules: list[dict[str, list[_Call]]]
    """For each layer, the calls of its modules by their names within it; the layer's own is empty."""


def trace_layers(config: PreTrainedConfig) -> Traced:
    """Trace the parts of an architecture's layers.

    Raises UserError, with what is missing, if the layers differ, do not call transformers' attention interface once
    each with stock sdpa attention, or have no feed-forward part that can be told from the rest.
    """
    settings = {key: value for key, value in config.to_dict().items() if key not in _NOT_OF_MODULES}
    # As text, so that equal configs share an entry of the cache.
    parts = _trace(cast("Any", type(config)), json.dumps(settings, sort_keys=True, default=str))
    if isinstance(parts, str):
        raise UserError(parts)
    return parts


# An architecture that cannot be traced gives a text, because the cache keeps results and no exceptions.
@cache
def _trace(kind: type[PreTrainedConfig], settings: str) -> Traced | str:
    config = kind.from_dict(json.loads(settings))
    causal = causal_by_classes(config)
    try:
        model = _build(config, causal=causal)
    except Exception:  # of any architecture
        return "its layers cannot be built without weights"
    if attention_implementation(model) != "sdpa":
        return "its attention is not transformers' sdpa"
    name = find_layers(model)
    # Once under a name of ours and once as sdpa: code that asks for the name runs otherwise.
    run, stock = _run(model, name, _NAME), _run(model, name, "sdpa")
    if run is None or stock is None:
        return "its forward pass needs the values of tensors, so that its parts cannot be found from its config alone"
    attention, calls = run
    if [call._replace(mask=None) for call in attention] != [call._replace(mask=None) for call in stock[0]] or any(
        (mine.mask is None) != (theirs.mask is None) for mine, theirs in zip(attention, stock[0], strict=True)
    ):
        return "its code makes masks by the name of the attention function"  # DeepSeek-V3.2 and others with an indexer
    layer_calls = [layer.get("", []) for layer in calls]
    width = layer_calls[0][0].output[-1] if layer_calls[0] and layer_calls[0][0].output else 0
    tokens = (_ROWS, _TOKENS, width)
    if any(calls_of_layer != [(tokens, tokens)] for calls_of_layer in layer_calls):
        return "its layers do not each take and return the hidden states of the tokens"
    if [call.layer for call in attention] != list(range(len(calls))) or len({call.name for call in attention}) != 1:
        return "its layers do not each call transformers' attention function once"
    query, key, value = attention[0][2:5]
    if any(call[2:5] != (query, key, value) for call in attention):
        return "its layers differ in their heads"
    parts = _find_feed_forward(model, name, calls, attention[0].name, width)
    if parts is None:
        return "its layers have no feed-forward part that can be told from the rest"
    up, gate, down = parts
    positions = getattr(config, "max_position_embeddings", None)
    # A mask is tried on more positions than any window has.
    most = min(positions, _MOST_POSITIONS) if isinstance(positions, int) and positions > 1 else _MOST_POSITIONS
    windows = [_find_window(call.mask, causal=causal, positions=most) for call in attention]
    return Traced(
        layers=name,
        attention=attention[0].name,
        ffn_up=up,
        ffn_gate=gate,
        ffn_down=down,
        scores_are_products=0 not in windows,  # 0 is a mask of another kind than causality and windows
        num_layers=len(calls),
        hidden_size=width,
        # Queries are (B, H, T, D), keys and values (B, H_kv, T, D).
        num_heads=query[1],
        num_kv_heads=key[1],
        head_dim=query[3],
        value_dim=value[3],
        intermediate_size=width if up is None else calls[0][up][0].output[-1],
        windows=tuple(window or None for window in windows),
    )


def _build(config: PreTrainedConfig, *, causal: bool) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    auto: Any = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    with torch.device("meta"):  # the grouped products of experts take 16 bits alone there
        return cast("PreTrainedModel", auto.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).eval())


def _run(model: PreTrainedModel, layers: str, name: str) -> _Recording | None:
    """Run a model with an attention function of this name, and return the calls; None if it cannot run without values.

    Some models look at the values of a mask, and others at the values of the tokens if there is no mask, so both are
    tried.
    """
    import torch

    ids = torch.zeros(_ROWS, _TOKENS, dtype=torch.long, device="meta")
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        with _recording(model, layers, name) as recording:
            try:
                with torch.no_grad():
                    model(**inputs)
            except Exception:  # of any architecture
                continue
            return recording
    return None


@contextmanager
def _recording(model: PreTrainedModel, layers: str, name: str) -> Iterator[_Recording]:
    import torch
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    blocks = list(model.base_model.get_submodule(layers).children())
    attention, calls, handles = list[_Attention](), [dict[str, list[_Call]]() for _ in blocks], list[Any]()
    masks: list[tuple[Tensor, Callable[..., Tensor]]] = []
    places: dict[Any, tuple[int, str]] = {}

    def make_mask(*, batch_size: int, q_length: int, kv_length: int, **settings: Any) -> Tensor:
        mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        masks.append((mask, settings["mask_function"]))
        return mask

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_settings: Any
    ) -> tuple[Tensor, None]:
        made_by = next((function for mask, function in masks if mask is attention_mask), None)
        # -1 is attention outside of the layers, for which `_trace` refuses the architecture.
        layer, within = places.get(module, (-1, ""))
        attention.append(_Attention(layer, within, tuple(query.shape), tuple(key.shape), tuple(value.shape), made_by))
        # (B, T, H, D), as transformers' attention functions return it
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        result = output[0] if isinstance(output, tuple) else output
        shapes = (tuple(tensor.shape) if torch.is_tensor(tensor) else () for tensor in (first, result))
        layer, within = places[module]
        calls[layer].setdefault(within, []).append(_Call(*shapes))

    for index, block in enumerate(blocks):
        for within, module in block.named_modules():
            places[module] = (index, within)
            handles.append(module.register_forward_hook(note, with_kwargs=True))
    # Functions set on the instances take precedence over registered ones, but transformers (5.x, masking_utils) makes
    # masks only for names that are registered.
    AttentionMaskInterface.register(_NAME, make_mask)
    ALL_ATTENTION_FUNCTIONS[name], ALL_MASK_ATTENTION_FUNCTIONS[name] = attend, make_mask
    try:
        model.set_attn_implementation(name)
        yield _Recording(attention, calls)
    finally:
        del ALL_ATTENTION_FUNCTIONS[name], ALL_MASK_ATTENTION_FUNCTIONS[name]
        for handle in handles:
            handle.remove()


def _find_feed_forward(
    model: PreTrainedModel, layers: str, calls: list[dict[str, list[_Call]]], attention: str, width: int
) -> tuple[str | None, str | None, str] | None:
    """Return the names of up, gate and down projection, or of the only module with matrices besides the attention.

    The latter are experts, also where only some layers have them. None if there is neither.
    """
    beside: list[list[str]] = []
    are_linear = True
    for block, called in zip(model.base_model.get_submodule(layers).children(), calls, strict=True):
        # Only parts that were called count: BART's decoder has an attention to an encoder that it never calls here.
        parts = {name.partition(".")[0] for name in called} - {attention.partition(".")[0]}
        matrices = {
            name: module
            for name, module in block.named_modules()
            if name.partition(".")[0] in parts
            and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        }
        are_linear &= all(is_linear(module) and len(called.get(name, [])) == 1 for name, module in matrices.items())
        beside.append([name for name in called if name in matrices] if are_linear else list(matrices))
    if are_linear and len(beside[0]) in (2, 3) and all(names == beside[0] for names in beside):
        *ups, down = beside[0]  # in the order of their calls
        read, (_, written) = {calls[0][up][0].inputs[-1] for up in ups}, calls[0][down][0]
        inner, made = calls[0][down][0].inputs[-1], {calls[0][up][0].output[-1] for up in ups}
        # A single up projection of twice the inner width holds the gate too.
        if read == {width} and written[-1] == width and (made == {inner} or (len(ups) == 1 and made == {2 * inner})):
            gate = next((up for up in ups if "gate" in up), ups[0]) if len(ups) == 2 else None
            return next(up for up in ups if up != gate), gate, down
    parts_with_matrices = {name.partition(".")[0] for names in beside for name in names}
    shapes = ((_ROWS, _TOKENS, width), (_ROWS * _TOKENS, width))
    part = min(parts_with_matrices, default="")
    if len(parts_with_matrices) == 1 and all(
        [call.output in shapes for call in called.get(part, [])] == [True] for called in calls
    ):
        return None, None, part
    return None


def _find_window(mask: Callable[..., Tensor] | None, *, causal: bool, positions: int) -> int | None:
    """Return the window of an attention mask, None without one; 0 for another kind, such as Llama 4's chunks."""
    import torch

    if mask is None:
        return 0
    zero, keys = torch.tensor(0), torch.arange(positions)

    def seen(query: int) -> Tensor:
        return mask(zero, zero, torch.tensor(query), keys).expand(positions)

    try:
        # The last query of a decoder and the first of an encoder see exactly one whole window.
        window = int(seen(positions - 1).sum()) if causal else int(seen(0).sum())
        # The ends, the edge of the window and the middle: all queries would take positions² comparisons.
        some = {0, 1, window - 1, window, window + 1, positions // 2, positions - 2, positions - 1}
        for query in some & set(range(positions)):
            distance = query - keys
            expected = (distance >= 0) & (distance < window) if causal else distance.abs() < window
            if not torch.equal(seen(query), expected):
                return 0
    except (RuntimeError, TypeError, ValueError):  # a mask of the values of tensors
        return 0
    return None if window == positions else window
