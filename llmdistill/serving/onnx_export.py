"""Exports a model to ONNX with its factors, compares it with the model, and times it beside the dense model."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from llmdistill.artifacts import new_proven_folder
from llmdistill.batch import Batch
from llmdistill.errors import UserError, install_command
from llmdistill.internals.transformers_names import attention_implementation
from llmdistill.messages import logger
from llmdistill.models.companions import copy_companions
from llmdistill.models.forms import remove_forms
from llmdistill.models.general import cache_argument
from llmdistill.models.load import load_model
from llmdistill.progress import Activity, progress
from llmdistill.runtime.signals import waiting
from llmdistill.runtime.speed import timed
from llmdistill.serving.dense import Describe
from llmdistill.serving.fidelity import compare, outputs_of, read_rows
from llmdistill.students.counting import count_parameters
from llmdistill.students.experts import has_experts
from llmdistill.students.install import is_factorized
from llmdistill.students.merge import merge

TOLERANCE = 1e-5
"""Difference of an output from that of the model in fp64, as a share of the largest output (and of 1 at least), from
which a warning follows; twice that of the model itself in fp32 if this is more: SmolLM2-135M at 60 % of its parameters
is at 5.6e-5, and its ONNX at 6.0e-6."""
FILE, INT8_FILE = "model.onnx", "model_int8.onnx"
_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
_LARGE = 1_900_000_000
"""In bytes: above this the weights lie beside the graph in model.onnx.data, because a protobuf holds 2 GiB."""
_SEQUENCES, _TOKENS, _REPEATS = 8, 128, 9
_Arrays = Mapping[str, "np.ndarray[Any, Any]"]


@torch.no_grad()
def export_onnx(
    model_dir: Path | str,
    out_dir: Path | str,
    *,
    int8: bool = False,
    data: str | None = None,
    describe: Describe | None = None,
) -> dict[str, Any]:
    """Write a model as model.onnx in fp32, with its tokenizer and a config.json that says nothing of factors.

    An encoder takes input_ids, attention_mask and, where it has any, token_type_ids. A decoder takes position_ids and
    past_key_values.N.key and .value (B, heads, tokens before, head width) too, and gives present.N.key and .value; with
    no tokens before, it reads a prompt. Batch and tokens are free. `int8` also writes model_int8.onnx, whose matrices
    are quantized as it runs (dynamically); weights of few bits become floats before. Both are compared with the model
    on rows of `data`, and a warning says which answers change. `describe` adds a card, see `dense.Describe`.

    Returns:
        output, params, bytes, largest_difference of an output from the model's in fp64 (None with a warning if one is
        not finite), comparison, and milliseconds of a pass over 8 sequences of 128 tokens, for decoders also
        milliseconds_per_token of one sequence after 128 tokens. With int8 the same as int8_*, and for a factorized
        model as dense_*, of the model with its factors multiplied out.

    Raises:
        UserError: a package is missing, the model cannot be loaded or has experts, or `out_dir` is not empty.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--to onnx needs {', '.join(missing)}: {install_command('onnx')}")
    rows = read_rows(model_dir, data)
    with new_proven_folder(out_dir) as folder, TemporaryDirectory() as scratch:
        model = load_model(model_dir, dtype=torch.float32, head="saved")
        remove_forms(model)
        if hasattr(model, "qa_outputs"):
            raise UserError(f"--to onnx: {model_dir} has a head for spans, which has two outputs; take --to dense")
        if has_experts(model):
            raise UserError(
                f"--to onnx: the tokens choose among the experts of {model_dir}, which a graph of ONNX has no product "
                "for; take --to dense"
            )
        params, factorized = count_parameters(model), is_factorized(model)
        graphs = {"": _write_graph(model, folder / FILE)}
        exact = outputs_of(model, rows)
        what = f"--to onnx: the graph of {model_dir}"
        comparison = compare(exact, outputs_of(model, rows, graphs[""].runs()), rows, what=what)
        figures: dict[str, Any] = comparison.result()
        difference, own = graphs[""].difference(model)
        figures["largest_difference"] = _finite(difference, what)
        allowed = max(TOLERANCE, 2 * own)
        if comparison.changed or allowed < difference < math.inf:
            logger.warning(
                f"{out_dir} is not equal to {model_dir}: {comparison.describe()}; on random tokens, with padding and "
                f"a cache, outputs differ by {difference:.2g} of the largest one, of which rounding explains "
                f"{allowed:.2g}"
            )
        if int8:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            graph, file = graphs[""], folder / INT8_FILE
            root = logging.getLogger()
            level = root.level
            root.setLevel(logging.ERROR)  # it recommends a preprocessing step that these graphs do not need
            try:
                # With one scale a matrix the rounding loses half as much again.
                of_matrix = {"weight_type": QuantType.QInt8, "per_channel": True}
                quantize_dynamic(graph.file, file, use_external_data_format=len(graph.files) > 1, **of_matrix)
            finally:
                root.setLevel(level)
            graphs["int8_"] = _Graph(file, graph.inputs, graph.outputs)
            what = f"--to onnx --int8: the graph of {model_dir}"
            figures["int8_largest_difference"] = _finite(graphs["int8_"].difference(model)[0], what)
            in_int8 = compare(exact, outputs_of(model, rows, graphs["int8_"].runs()), rows, what=what)
            figures["int8_comparison"] = in_int8.result()["comparison"]
        if factorized:
            merge(model)
            graphs["dense_"] = _write_graph(model, Path(scratch) / FILE)
        # After the merging, which takes the factors out of the config.
        model.config.save_pretrained(folder)
        copy_companions(model_dir, folder)
        figures |= _time_graphs(graphs, model)
        if describe is not None:
            describe(folder, comparison.describe())
    return {"output": str(out_dir), "params": params, **figures}


@dataclass(frozen=True)
class _Graph:
    """A file of ONNX, and its inputs and outputs by name."""

    file: Path
    inputs: dict[str, Any]
    outputs: list[str]

    @property
    def files(self) -> list[Path]:
        """The file, and for a large model that of its weights beside it."""
        return list(self.file.parent.glob(f"{self.file.name}*"))

    def session(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors alone
        return onnxruntime.InferenceSession(self.file, options, providers=["CPUExecutionProvider"])

    def feed(self, ids: Tensor, mask: Tensor, past: _Arrays | None = None) -> dict[str, Any]:
        """Return the inputs for tokens (B, T) and a mask (B, tokens before + T); by default no tokens come before."""
        # Real tokens are counted, as transformers' generate does, so padding on the left does not move them.
        place = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        arrays = {key: value.numpy() for key, value in {**values, "position_ids": place}.items() if key in self.inputs}
        # (B, heads, no tokens, head width)
        empty = {
            name: np.zeros((len(ids), tensor.shape[1], 0, tensor.shape[3]), np.float32)
            for name, tensor in self.inputs.items()
            if name.startswith("past_")
        }
        return {**arrays, **(empty if past is None else past)}

    def past(self, outputs: list[Any]) -> dict[str, Any]:
        """Return the present key and values of a decoder as the past of its next call."""
        named = zip(self.outputs, outputs, strict=True)
        return {f"past_key_values{name.removeprefix('present')}": value for name, value in named if "present" in name}

    def runs(self) -> Callable[[Batch], Tensor]:
        """Return what computes the first output of the graph for a batch."""
        session = self.session()

        def run(batch: Batch) -> Tensor:
            return torch.from_numpy(session.run(self.outputs[:1], self.feed(batch.input_ids, batch.attention_mask))[0])

        return run

    def difference(self, model: PreTrainedModel) -> tuple[float, float]:
        """Return the largest difference from the model in fp64 at real tokens, as a share of its largest output, and
        that of the model in fp32; NaN or infinite if an output is."""
        session, (ids, mask) = self.session(), _make_sequences(model, 3, 40)
        inputs = self.feed(ids, mask)
        places = {key: torch.from_numpy(inputs[key]) for key in ("position_ids",) if key in inputs}
        own: Tensor = model(input_ids=ids, attention_mask=mask, **places)[0]
        # Outputs (B, T, K) have places of padding, those of a classifier (B, C) do not.
        real = mask > 0 if own.dim() == 3 else torch.ones(len(ids), dtype=torch.bool)
        # Each sequence alone, without its padding: eager attention takes its softmax in fp32, where the least number
        # of fp64 is -inf, so in fp64 a place of padding that sees nothing becomes NaN, and so does all that sees it.
        model.double()
        alone = [model(input_ids=row[shown > 0][None])[0] for row, shown in zip(ids, mask, strict=True)]
        # fp64 holds every number of fp32, so the weights come back as they were.
        model.float()
        expected = torch.cat([output.flatten(0, -2) for output in alone])
        outputs = [torch.from_numpy(session.run(self.outputs[:1], inputs)[0])]
        if len(self.outputs) > 1:  # a decoder must also agree for its last token after a cache of the others
            before = session.run(self.outputs, self.feed(ids[:, :-1], mask[:, :-1]))
            last = session.run(self.outputs, self.feed(ids[:, -1:], mask, self.past(before)))[0]
            outputs.append(torch.cat([torch.from_numpy(before[0]), torch.from_numpy(last)], dim=1))
        used = expected != -math.inf  # some models set the logits of unused tokens to it
        largest = max(1.0, expected[used].abs().max().item())
        parts = [(output[real] - expected)[used].abs().max() for output in (own, *outputs)]
        differences = torch.stack(parts) / largest
        return float(differences[1:].max()), float(differences[0])


def _finite(difference: float, what: str) -> float | None:
    """Return a difference, or None with a warning if it is not finite."""
    if math.isfinite(difference):
        return difference
    logger.warning(
        f"{what}: on random tokens, with padding and a cache, outputs are not finite; do not serve padded batches of "
        "it before you have tried them, or take --to dense"
    )
    return None


class _Plain(nn.Module):
    """A model as a function of tensors: tokens, mask and types (B, T) -> logits or hidden states."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **types)[0]


class _Cached(_Plain):
    """A decoder as a function of tensors: keys and values go in and, with those of the new tokens, out."""

    def __init__(self, model: PreTrainedModel, argument: str) -> None:
        super().__init__(model)
        self.argument = argument

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        cache = DynamicCache()
        for layer, (key, value) in enumerate(zip(past[::2], past[1::2], strict=True)):
            cache.update(key, value, layer)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            **{self.argument: cache},
        )
        return (outputs.logits, *_list_tensors(cache))


def _list_tensors(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def _make_sequences(model: PreTrainedModel, count: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return random tokens (B, T) and a mask; the first sequence has padding, on the left for decoders.

    The padding token is left out, because RoBERTa counts positions by it.
    """
    config = model.config.get_text_config()
    length = min(tokens, getattr(config, "max_position_embeddings", tokens) - 4)
    token_ids = torch.arange(config.vocab_size)
    token_ids = token_ids[token_ids != config.pad_token_id] if config.pad_token_id is not None else token_ids
    chosen = torch.randint(len(token_ids), (count, length), generator=torch.Generator().manual_seed(0))
    ids, mask = token_ids[chosen], torch.ones(count, length, dtype=torch.long)
    padding = slice(0, length // 4) if model.can_generate() else slice(length - length // 4, length)
    mask[0, padding] = 0
    if config.pad_token_id is not None:
        ids[0, padding] = config.pad_token_id
    return ids, mask


def _write_graph(model: PreTrainedModel, file: Path) -> _Graph:
    """Write the graph of a model, which keeps its attention implementation."""
    import onnx

    program, inputs, outputs, axes = make_traceable(model)
    implementation = attention_implementation(model)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of packages that this export does not need
    model.set_attn_implementation("eager")  # plain products, which ONNX Runtime fuses itself
    try:
        # Of an exception by a signal torch.export makes an error of its own, or none at all.
        with waiting(), Activity("Writing the graph of ONNX"):
            torch.onnx.export(
                program.eval(),
                tuple(_nest_past(inputs)),
                file,
                dynamo=True,
                dynamic_shapes=tuple(_nest_past(axes)),
                input_names=list(inputs),
                output_names=outputs,
                external_data=sum(parameter.nbytes for parameter in model.parameters()) > _LARGE,
                verbose=False,
            )
    finally:
        model.set_attn_implementation(implementation)
        logger.setLevel(level)
    written = onnx.load(file, load_external_data=False)
    weights = {tensor.name for tensor in written.graph.initializer}
    repeated = [value for value in written.graph.value_info if value.name in weights]
    if repeated:  # old exporters give the shapes of weights twice, and ONNX Runtime transposes only one for int8
        for value in repeated:
            written.graph.value_info.remove(value)
        onnx.save(written, file)
    return _Graph(file, inputs, outputs)


def make_traceable(model: PreTrainedModel) -> tuple[nn.Module, dict[str, Tensor], list[str], dict[str, Any]]:
    """Return the function to export, examples of its inputs by name, the names of its outputs, and the free axes."""
    free = torch.export.Dim.DYNAMIC
    # torch.export takes sizes of 0 and 1 for constants, so each free axis has 2 or more here.
    ids, mask = (tensor[:2, :7] for tensor in _make_sequences(model, 2, 7))
    mask = torch.ones_like(mask)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if not model.can_generate():
        has_types = getattr(model.config, "type_vocab_size", 0) > 1
        if has_types and "token_type_ids" in inspect.signature(model.forward).parameters:
            inputs["token_type_ids"] = torch.zeros_like(ids)
        outputs = ["last_hidden_state" if model.base_model is model else "logits"]
        return _Plain(model), inputs, outputs, {name: {0: free, 1: free} for name in inputs}
    half = ids.shape[1] // 2
    argument, cache = cache_argument(model), DynamicCache(config=model.config)
    if argument is None:
        raise UserError(
            f"--to onnx: {model.config.model_type} models take no keys and values of earlier tokens, which the graph "
            "of a decoder has; take --to dense"
        )
    model(input_ids=ids[:, :half], use_cache=True, **{argument: cache})
    past = _list_tensors(cache)
    inputs["input_ids"] = ids[:, half:]
    inputs["position_ids"] = torch.arange(half, ids.shape[1]).expand(2, -1)
    axes = {name: {0: free, 1: free} for name in inputs}
    layers = [f"{layer}.{part}" for layer in range(len(past) // 2) for part in ("key", "value")]
    names = [f"past_key_values.{layer}" for layer in layers]
    inputs |= dict(zip(names, past, strict=True))
    # Keys and values are (B, heads, tokens, head width).
    axes |= {name: {0: free, 2: free} for name in names}
    return _Cached(model, argument), inputs, ["logits", *(f"present.{layer}" for layer in layers)], axes


def _nest_past(named: Mapping[str, Any]) -> list[Any]:
    """Return values in their order, with those of the past as a list at the end, the signature of `_Cached`."""
    past = [value for name, value in named.items() if name.startswith("past_")]
    return [*(value for name, value in named.items() if not name.startswith("past_")), *([past] if past else [])]


def _time_graphs(graphs: Mapping[str, _Graph], model: PreTrainedModel) -> dict[str, Any]:
    """Return sizes and median times. The graphs alternate, so that other load on the machine affects all alike."""
    ids, mask = _make_sequences(model, _SEQUENCES, _TOKENS)
    mask = torch.ones_like(mask)
    calls: dict[str, Any] = {}
    for prefix, graph in graphs.items():
        session = graph.session()
        calls[f"{prefix}milliseconds"] = session, graph.feed(ids, mask)
        if len(graph.outputs) > 1:
            past = graph.past(session.run(graph.outputs, graph.feed(ids[:1, :-1], mask[:1, :-1])))
            calls[f"{prefix}milliseconds_per_token"] = session, graph.feed(ids[:1, -1:], mask[:1], past)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in progress(range(_REPEATS + 1), "Timing", "rounds"):
        for name, (session, feed) in calls.items():
            times[name].append(1000 * timed(partial(session.run, None, feed)))
    sizes = {f"{prefix}bytes": sum(file.stat().st_size for file in graph.files) for prefix, graph in graphs.items()}
    return sizes | {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up
