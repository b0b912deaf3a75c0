"""Attention maps of models side by side, with their divergence from those of the first model (MiniLM, supplement)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from torch import Tensor

from llmdistill.config.side_by_side import AttentionConfig
from llmdistill.data.pairs import EncodedPair, PairExample, encode_pairs
from llmdistill.data.sources import unreadable
from llmdistill.errors import UserError
from llmdistill.experiments.side_by_side import default_folder, named_models, write_results
from llmdistill.factorize.counting import count_parameters
from llmdistill.models.configs import load_config
from llmdistill.models.families import family_of, max_positions, shape_of
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.report.attention import Panel, plot_attention
from llmdistill.report.plots import Drawing
from llmdistill.report.record import make_record
from llmdistill.report.tables import Texts, print_table
from llmdistill.runtime.devices import TORCH_DTYPES, chosen_dtype
from llmdistill.runtime.distributed import World
from llmdistill.tasks.attention_maps import attention_maps, map_divergence, mean_map

MEAN = "mean"
"""The name of the mean of all heads in the results, where the others have their numbers."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The checked settings."""

    models: Mapping[str, Path]
    layers: Mapping[str, int]
    """The layer of each model, counted from 1."""
    folder: Path
    dtype: str
    texts: Sequence[str]
    items: Sequence[EncodedPair]
    """The tokens of each text, which are those of every model."""
    tokens: Sequence[Sequence[str]]


def evaluate(config: AttentionConfig, *, command: str) -> dict[str, Any]:
    """Draw the maps of each text, write the report, and return the results as plain JSON values.

    Raises:
        UserError: a model cannot be read, has other tokens than the first one, or has no such layer or head.
    """
    world = World.alone()
    plan = _plan(config, world)
    models: dict[str, dict[str, Any]] = {}
    maps = {}
    for name, path in plan.models.items():
        print(f"{name}: {path}, layer {plan.layers[name]} of {len(plan.texts)} text(s) ...", flush=True)
        model = load_model(path, dtype=TORCH_DTYPES[plan.dtype], device=world.device, head="none")
        maps[name] = attention_maps(model, plan.items, layer=plan.layers[name] - 1)
        models[name] = {"path": str(path), "params": count_parameters(model), "layer": plan.layers[name]}
    texts = [_compare(config, plan, maps, number) for number in range(len(plan.texts))]
    for name, entry in models.items():
        every = [text["models"][name] for text in texts]
        entry["kl"] = {head: fmean(each["kl"][head] for each in every) for head in every[0]["kl"]}
        shared = [each["kl_of_all_heads"] for each in every]
        entry["kl_of_all_heads"] = None if None in shared else fmean(shared)
    results = {
        **{key: getattr(config, key) for key in ("data", "max_length", "heads")},
        "dtype": plan.dtype,
        "models": models,
        "texts": texts,
        "run": make_record(command, world.size),
    }
    return write_results(
        plan.folder,
        results,
        title="Attention side by side",
        legend=f"{_title(results)}. The last column is the mean over heads, of models with equally many.",
        table=table_cells(results),
        drawings=[_draw(plan, maps, text, number) for number, text in enumerate(texts)],
        closing="The divergences of each text are in results.json.",
    )


def _plan(config: AttentionConfig, world: World) -> _Plan:
    """Check all settings before a model is loaded; raise UserError for a mistake."""
    models = named_models(config.model)
    layers = _layers(config, models)
    for name, path in models.items():
        config_of_model = load_config(path)
        if not family_of(config_of_model).scores_are_products:
            raise UserError(
                f"--model {name} ({path}): a {config_of_model.model_type} adds to the scores that would be drawn: "
                "leave it out"
            )
        heads = shape_of(config_of_model).num_heads
        for head in config.heads or ():
            if not 1 <= head <= heads:
                raise UserError(f"--heads {head}: the {name} ({path}) has the heads 1 to {heads}")
    texts = [config.text] if config.text is not None else _first_lines(str(config.data), config.examples)
    examples = [PairExample(text, None, None, number) for number, text in enumerate(texts)]
    items: Sequence[EncodedPair] = ()
    for name, path in models.items():
        tokenizer = load_tokenizer(path)
        encoded = encode_pairs(examples, tokenizer, max_positions(load_config(path), config.max_length))
        if items and [each.input_ids for each in encoded] != [each.input_ids for each in items]:
            first = next(iter(models))
            raise UserError(f"--model: {name} ({path}) cuts the text into other tokens than {first}; compare others")
        items = items or encoded
    return _Plan(
        models=models,
        layers=layers,
        folder=Path(config.output_dir or default_folder("attention", config.model[0])),
        dtype=chosen_dtype(config.dtype, world.device),
        texts=texts,
        items=items,
        tokens=[tokenizer.convert_ids_to_tokens(each.input_ids) for each in items],
    )


def _layers(config: AttentionConfig, models: Mapping[str, Path]) -> dict[str, int]:
    """Return the layer of each model, counted from 1."""
    depths = {name: shape_of(load_config(path)).num_layers for name, path in models.items()}
    given = config.layers
    if given is None:
        return depths
    if len(given) not in (1, len(models)):
        raise UserError(f"--layers {given}: there are {len(models)} models; give one layer, or one for each of them")
    layers = dict(zip(models, given if len(given) > 1 else given * len(models), strict=True))
    for name, layer in layers.items():
        if not 1 <= layer <= depths[name]:
            raise UserError(f"--layers {layer}: the {name} ({models[name]}) has the layers 1 to {depths[name]}")
    return layers


def _first_lines(file: str, count: int) -> list[str]:
    """Return the first lines of a file that are not empty."""
    try:
        with Path(file).open(encoding="utf-8-sig") as lines:
            texts = list(islice((line.strip() for line in lines if line.strip()), count))
    except FileNotFoundError as error:
        raise UserError(f"--data {file}: no such file; give a plain text file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(Path(file), "UTF-8 text", error) from error
    if len(texts) < count:
        raise UserError(f"--examples {count}: {file} has {len(texts)} lines of text; ask for fewer")
    return texts


def _compare(config: AttentionConfig, plan: _Plan, maps: Mapping[str, Sequence[Tensor]], number: int) -> dict[str, Any]:
    """Return the divergences of one text: of the maps that are drawn, and of all heads where both have equally many."""
    first = next(iter(maps.values()))[number]
    found = {}
    for name, each in maps.items():
        log_HTT = each[number]
        heads = [MEAN] if config.heads is None else [str(head) for head in config.heads]
        kl = {head: float(map_divergence(_drawn(first, head), _drawn(log_HTT, head))[0]) for head in heads}
        shared = float(map_divergence(first, log_HTT).mean()) if len(first) == len(log_HTT) else None
        found[name] = {"kl": kl, "kl_of_all_heads": shared}
    return {"text": plan.texts[number], "tokens": list(plan.tokens[number]), "models": found}


def _drawn(log_HTT: Tensor, head: str) -> Tensor:
    """Return the map of a row of the figure: (1, T, T)."""
    return mean_map(log_HTT) if head == MEAN else log_HTT[int(head) - 1][None]


def _draw(plan: _Plan, maps: Mapping[str, Sequence[Tensor]], text: Mapping[str, Any], number: int) -> Drawing:
    """Return the figure of a text: the models side by side, and a row for each head."""
    names = list(maps)
    rows = []
    for head in text["models"][names[0]]["kl"]:
        panels = []
        for name in names:
            log_HTT = maps[name][number]
            what = f"mean of {len(log_HTT)} heads" if head == MEAN else f"head {head}"
            kl = "" if name == names[0] else f", KL {text['models'][name]['kl'][head]:.3f}"
            panels.append(Panel(name, f"layer {plan.layers[name]}, {what}{kl}", _drawn(log_HTT, head)[0].exp().numpy()))
        rows.append(panels)
    caption = (
        f"The attention of each token (query) to the others (key). KL is in nats, from {names[0]}, mean over queries."
    )
    return Drawing(f"attention-{number + 1}", text["text"], caption, plot_attention(rows, text["tokens"]))


def table_cells(results: Mapping[str, Any]) -> Texts:
    """Return header and rows as text: a row for each model."""
    heads = list(next(iter(results["models"].values()))["kl"])
    header = [
        "",
        "params",
        "layer",
        *("KL of the mean map" if head == MEAN else f"KL of head {head}" for head in heads),
    ]
    rows = [
        [
            name,
            f"{each['params']:,}",
            str(each["layer"]),
            *(f"{each['kl'][head]:.4f}" for head in heads),
            "–" if each["kl_of_all_heads"] is None else f"{each['kl_of_all_heads']:.4f}",
        ]
        for name, each in results["models"].items()
    ]
    return [*header, "KL of all heads"], rows


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, one row per model."""
    print_table(_title(results), *table_cells(results), turned=True, console=console)


def _title(results: Mapping[str, Any]) -> str:
    first, count = next(iter(results["models"])), len(results["texts"])
    return f"Attention: divergence from {first} in nats, mean over queries{f' and {count} texts' if count > 1 else ''}"
