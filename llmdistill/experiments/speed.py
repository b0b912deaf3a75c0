"""The speed of several models side by side, as papers measure it (MiniLM Table 4, KroneckerBERT A.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.config.speed import SpeedConfig
from llmdistill.data.pairs import collate_pairs, encode_pairs
from llmdistill.errors import UserError
from llmdistill.experiments.side_by_side import default_folder, named_models, write_results
from llmdistill.models.configs import load_config
from llmdistill.models.families import has_segments, is_causal
from llmdistill.models.load import Head, build_random, load_model
from llmdistill.models.shapes import parse_shape, shaped_config
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.report.record import make_record
from llmdistill.report.tables import Texts, print_table
from llmdistill.runtime.devices import TORCH_DTYPES, chosen_dtype
from llmdistill.runtime.distributed import World
from llmdistill.runtime.speed import Inputs, check_length, parameter_split, time_batches
from llmdistill.tasks.glue_files import GLUE_TASKS, read_split


def evaluate(config: SpeedConfig, *, command: str) -> dict[str, Any]:
    """Time the models, write results.json and report.md, and return the results as plain JSON values.

    Raises:
        UserError: a model cannot be read or has too few positions, a shape does not fit the first model, or the task
            has too few examples.
    """
    world = World.alone()
    paths = named_models(config.model)
    configs = {name: load_config(path) for name, path in paths.items()}
    first = next(iter(configs))
    shapes = {shape: shaped_config(configs[first], parse_shape(shape, key="--shapes")) for shape in config.shapes}
    if paths.keys() & shapes.keys():
        raise UserError(f"--shapes {', '.join(paths.keys() & shapes.keys())}: a model has this name; leave one out")
    for name, each in {**configs, **shapes}.items():
        check_length(name, each, config.max_length)
    examples = _examples(config)
    name_of_dtype = chosen_dtype(config.dtype, world.device)
    dtype = TORCH_DTYPES[name_of_dtype]
    models = {
        name: load_model(path, dtype=dtype, device=world.device, head=_head(configs[name]))
        for name, path in paths.items()
    }
    for shape, each in shapes.items():
        model: Any = build_random(each, _head(each), seed=0)
        models[shape] = model.to(device=world.device, dtype=dtype).eval()
    batches = _random_batches(config, models)
    if examples is not None:
        tokenizers = {name: load_tokenizer(paths.get(name, paths[first])) for name in models}
        batches = {name: _encoded(config, examples, tokenizers[name], model) for name, model in models.items()}
    kinds = {"forward": False, **({"step": True} if config.training else {})}
    seconds = {
        kind: time_batches(models, batches, warmup=config.warmup, training=training) for kind, training in kinds.items()
    }
    rows = {
        name: {
            "path": str(paths[name]) if name in paths else "random weights",
            "params": parameter_split(model),
            "tokens": sum(int(each["attention_mask"].sum()) for each in batches[name][config.warmup :]),
            **{kind: _timing(found[name], found[first]) for kind, found in seconds.items()},
        }
        for name, model in models.items()
    }
    folder = Path(config.output_dir or default_folder("speed", config.model[0]))
    asked = {key: getattr(config, key) for key in ("batches", "batch_size", "max_length", "task", "warmup")}
    results = {**asked, "dtype": name_of_dtype, "models": rows, "run": make_record(command, world.size)}
    return write_results(
        folder,
        results,
        title="Speed",
        legend=_title(results) + ". Parameters of the token embedding (Emd) and of the layers (Trm).",
        table=table_cells(results),
        closing="All figures are in results.json.",
    )


def _timing(seconds: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return {
        "seconds": sum(seconds),
        "median": float(median),
        "iqr": float(high - low),
        "speedup": float(np.median(base) / median),
    }


def _head(config: PreTrainedConfig) -> Head:
    return "lm_head" if is_causal(config) else "none"


def _examples(config: SpeedConfig) -> list[Any] | None:
    """Return the examples of the task, as many as the batches hold; None without a task."""
    if config.task is None:
        return None
    names, needed = {glue.hub: name for name, glue in GLUE_TASKS.items()}, config.batches * config.batch_size
    if config.task not in names:
        raise UserError(f"--task {config.task}: take the examples of a task of GLUE ({', '.join(names)})")
    examples = read_split(names[config.task], "train", config.data_dir)[:needed]
    if len(examples) < needed:
        raise UserError(
            f"--task {config.task}: {len(examples):,} training examples, but {config.batches} batches of "
            f"{config.batch_size} hold {needed:,}; lower --batches or --batch_size"
        )
    return list(examples)


def _encoded(
    config: SpeedConfig, examples: list[Any], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> list[Inputs]:
    items = encode_pairs(examples, tokenizer, config.max_length)
    padding: Any = tokenizer.pad_token_id
    batches = list[Inputs]()
    for start in range(0, len(items), config.batch_size):
        batch = collate_pairs(items[start : start + config.batch_size], padding)
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if has_segments(model.config):
            inputs["token_type_ids"] = batch.token_type_ids
        batches.append(inputs)
    return [*batches[: config.warmup], *batches]


def _random_batches(config: SpeedConfig, models: Mapping[str, PreTrainedModel]) -> dict[str, list[Inputs]]:
    """Return full batches of tokens that every model has; the papers pad each example to the same length."""
    high = min(model.config.vocab_size for model in models.values())
    shape = (config.batch_size, config.max_length)
    ids = torch.from_numpy(np.random.default_rng(0).integers(high, size=shape))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {name: [inputs] * (config.warmup + config.batches) for name in models}


def table_cells(results: Mapping[str, Any]) -> Texts:
    """Return header and rows as text: the parameters, the seconds of all batches, and those of a training step."""
    trains = "step" in next(iter(results["models"].values()))
    header = ["", "Emd", "Trm", f"{results['batches']} batches", "speed-up", "tokens/s"]
    header += ["training step", "speed-up"] if trains else []
    rows = []
    for name, each in results["models"].items():
        forward = each["forward"]
        row = [name, f"{each['params']['embedding']:,}", f"{each['params']['transformer']:,}"]
        speed = each["tokens"] / forward["seconds"]
        row += [f"{forward['seconds']:.1f} s", f"{forward['speedup']:.1f}x", f"{speed:,.0f}"]
        if trains:
            step = each["step"]
            row += [f"{1000 * step['median']:.0f} ms ± {1000 * step['iqr'] / 2:.0f}", f"{step['speedup']:.1f}x"]
        rows.append(row)
    return header, rows


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, one row per model."""
    print_table(_title(results), *table_cells(results), turned=True, console=console)


def _title(results: Mapping[str, Any]) -> str:
    length, task = results["max_length"], results["task"]
    what = f"{length} random tokens" if task is None else f"examples of {task}, at most {length} tokens"
    return (
        f"Seconds for {results['batches']} batches of {results['batch_size']} sequences ({what}), {results['dtype']}; "
        "medians compared"
    )
