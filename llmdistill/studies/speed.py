"""The speed of several models side by side, as papers measure it (MiniLM Table 4, KroneckerBERT A.1)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from llmdistill.config.side_by_side import SpeedConfig
from llmdistill.data.pairs import collate_pairs, encode_pairs
from llmdistill.errors import UserError
from llmdistill.models.configs import load_config
from llmdistill.models.families import has_segments, is_causal
from llmdistill.models.heads import HeadName
from llmdistill.models.load import build_random
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.report.tables import TitledTable
from llmdistill.runtime.devices import TORCH_DTYPES
from llmdistill.runtime.speed import Inputs, check_length, parameter_split, time_batches, timing
from llmdistill.students.shapes import parse_shape, shape_config
from llmdistill.studies.side_by_side import ComparedModels, ModelScores, ModelSuite
from llmdistill.tasks.glue import GLUE_TASKS, read_split


def _score(config: SpeedConfig, models: ComparedModels) -> ModelScores:
    paths = models.paths
    configs = {name: load_config(path) for name, path in paths.items()}
    first = next(iter(configs))
    shapes = {shape: shape_config(configs[first], parse_shape(shape, key="--shapes")) for shape in config.shapes}
    if paths.keys() & shapes.keys():
        raise UserError(f"--shapes {', '.join(paths.keys() & shapes.keys())}: a model has this name; leave one out")
    for name, of_model in {**configs, **shapes}.items():
        check_length(name, of_model, config.max_length)
    # Before any model is loaded, so that a mistake in --task costs no time.
    examples: list[Any] = []
    if config.task is not None:
        names, needed = {glue.hub: name for name, glue in GLUE_TASKS.items()}, config.batches * config.batch_size
        if config.task not in names:
            raise UserError(f"--task {config.task}: take the examples of a task of GLUE ({', '.join(names)})")
        examples = list(read_split(names[config.task], "train", config.data_dir)[:needed])
        if len(examples) < needed:
            raise UserError(
                f"--task {config.task}: {len(examples):,} training examples, but {config.batches} batches of "
                f"{config.batch_size} hold {needed:,}; lower --batches or --batch_size"
            )
    loaded = {name: models.load(name, _head(configs[name])) for name in paths}
    for shape, of_model in shapes.items():
        model: Any = build_random(of_model, _head(of_model), seed=0)  # random weights take the time of trained ones
        loaded[shape] = model.to(device=models.device, dtype=TORCH_DTYPES[models.dtype]).eval()
    if config.task is None:
        # Full batches of tokens that every model has: the papers pad each example to the same length.
        high = min(model.config.vocab_size for model in loaded.values())
        ids = torch.from_numpy(np.random.default_rng(0).integers(high, size=(config.batch_size, config.max_length)))
        inputs: Inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        batches: dict[str, list[Inputs]] = {name: [inputs] * (config.warmup + config.batches) for name in loaded}
    else:
        batches = {}
        for name, model in loaded.items():
            tokenizer: Any = load_tokenizer(paths.get(name, paths[first]))
            items, own = encode_pairs(examples, tokenizer, config.max_length), list[Inputs]()
            for start in range(0, len(items), config.batch_size):
                batch = collate_pairs(items[start : start + config.batch_size], tokenizer.pad_token_id)
                inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
                if has_segments(model.config):
                    inputs["token_type_ids"] = batch.token_type_ids
                own.append(inputs)
            batches[name] = [*islice(cycle(own), config.warmup), *own]
    rows: dict[str, dict[str, Any]] = {
        name: {
            "path": str(paths[name]) if name in paths else "random weights",
            "params": parameter_split(model),
            "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches[name][config.warmup :]),
        }
        for name, model in loaded.items()
    }

    def measure() -> dict[str, dict[str, Any]]:
        for kind, training in {"forward": False, **({"step": True} if config.training else {})}.items():
            # The models take turns batch by batch, so that a machine that slows down slows all of them.
            seconds = time_batches(loaded, batches, warmup=config.warmup, training=training)
            reference = timing(seconds[first])["median"]
            for name, times in seconds.items():
                timed = timing(times)
                rows[name][kind] = {"seconds": sum(times), **timed, "speedup": reference / timed["median"]}
        return rows

    return ModelScores(results={"models": models.measure_together(measure)})


def _head(config: PreTrainedConfig) -> HeadName:
    return "lm_head" if is_causal(config) else "none"


def make_table(results: Mapping[str, Any]) -> TitledTable:
    """Return a row for each model: the parameters, the seconds of all batches, and those of a training step."""
    trains = "step" in next(iter(results["models"].values()))
    header = ["", "Emd", "Trm", f"{results['batches']} batches", "speed-up", "tokens/s"]
    header += ["training step", "speed-up"] if trains else []
    rows = []
    for name, model in results["models"].items():
        forward = model["forward"]
        row = [name, f"{model['params']['embedding']:,}", f"{model['params']['transformer']:,}"]
        speed = model["tokens"] / forward["seconds"]
        row += [f"{forward['seconds']:.1f} s", f"{forward['speedup']:.1f}x", f"{speed:,.0f}"]
        if trains:
            step = model["step"]
            row += [f"{1000 * step['median']:.0f} ms ± {1000 * step['iqr'] / 2:.0f}", f"{step['speedup']:.1f}x"]
        rows.append(row)
    length, task = results["max_length"], results["task"]
    what = f"{length} random tokens" if task is None else f"examples of {task}, at most {length} tokens"
    title = (
        f"Seconds for {results['batches']} batches of {results['batch_size']} sequences ({what}), {results['dtype']}; "
        "medians compared"
    )
    return TitledTable(title, header, rows)


SUITE = ModelSuite(
    name="speed",
    title="Speed",
    settings=("batches", "batch_size", "max_length", "task", "warmup"),
    values=lambda _, results: {
        (kind, key): results[kind][key] for kind in ("forward", "step") if kind in results for key in results[kind]
    },
    score=_score,
    table=make_table,
    note=" Parameters of the token embedding (Emd) and of the layers (Trm).",
    closing="All figures are in results.json.",
)
