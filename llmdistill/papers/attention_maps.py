"""Attention maps of models side by side, with their divergence from those of the first model (MiniLM, supplement)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.config.side_by_side import AttentionConfig
from llmdistill.data.pairs import EncodedPair, PairExample, collate_pairs, encode_pairs
from llmdistill.data.readers import text_lines
from llmdistill.errors import UserError
from llmdistill.losses.attention import repeat_heads
from llmdistill.messages import say
from llmdistill.models.configs import load_config
from llmdistill.models.families import family_of, is_causal, max_positions, shape_of
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.report.plots import STYLE, Drawing, Panel, frame_panel, new_figure
from llmdistill.report.tables import TitledTable
from llmdistill.students.counting import count_parameters
from llmdistill.studies.side_by_side import ComparedModels, ModelScores, ModelSuite
from llmdistill.tasks.item_outputs import scoring_forward

MEAN = "mean"
"""The name of the mean of all heads in the results, where the others have their numbers."""

_TOKEN = 0.135
"""Inches of a token on an axis, so that its text can be read."""
_SMALLEST = 2.3
"""Inches of the smallest panel, so that its note fits above it."""


@torch.no_grad()
def attention_maps(model: PreTrainedModel, items: Sequence[EncodedPair], *, layer: int) -> list[Tensor]:
    """Return the logarithms of a layer's attention distributions on each text: (H, T, T), fp64, -inf where not seen.

    They are computed from queries and keys, for stock and factorized models alike, and in logarithms, so that no share
    is rounded to 0. The model must be in evaluation mode; `layer` counts from 0.
    """
    maps, window = [], shape_of(model.config).windows[layer]
    with scoring_forward(model, {"query": frozenset({layer}), "key": frozenset({layer})}) as forward:
        for item in items:
            # One text alone has no padding, so that any id will do.
            taps = forward(collate_pairs([item], pad_token_id=0)).taps
            query_HTD = taps.query[layer][0].double()
            key_HTD = repeat_heads(taps.key[layer], len(query_HTD))[0].double()  # heads of a group share a key
            scores_HTT = query_HTD @ key_HTD.transpose(1, 2) * taps.scaling[layer]
            visible_TT = torch.ones(scores_HTT.shape[1:], dtype=torch.bool, device=scores_HTT.device)
            if is_causal(model.config):
                visible_TT = visible_TT.tril()
            if window is not None:  # the last `window` keys, that of the query included
                visible_TT = visible_TT.triu(1 - window)
            maps.append(scores_HTT.masked_fill(~visible_TT, -math.inf).log_softmax(-1).cpu())
    return maps


def mean_map(log_HTT: Tensor) -> Tensor:
    """Return the logarithm of the mean distribution over heads: (1, T, T)."""
    return log_HTT.logsumexp(0, keepdim=True) - math.log(len(log_HTT))


def map_divergence(teacher_HTT: Tensor, student_HTT: Tensor) -> Tensor:
    """Return KL(A^T‖A^S) of each head in nats, mean over the queries (MiniLM eq. 5), of logarithms: (H,)."""
    shares_HTT = teacher_HTT.exp()
    # Where the teacher sees no key the term is 0, but 0 · -inf would be nan.
    terms_HTT = torch.where(shares_HTT > 0, shares_HTT * (teacher_HTT - student_HTT), 0.0)
    return terms_HTT.sum(-1).mean(-1)


def _score(config: AttentionConfig, models: ComparedModels) -> ModelScores:
    # One layer of each model, from 1: that of all, one for each, or the last.
    given: list[int | None] = [None] if config.layers is None else [*config.layers]
    if len(given) not in (1, len(models.paths)):
        raise UserError(
            f"--layers {given}: there are {len(models.paths)} models; give one layer, or one for each of them"
        )
    layers = {}
    for (name, path), layer in zip(
        models.paths.items(), given if len(given) > 1 else given * len(models.paths), strict=True
    ):
        of_model = load_config(path)
        if not family_of(of_model).scores_are_products:
            raise UserError(
                f"--model {name} ({path}): a {of_model.model_type} adds to the scores that would be drawn: leave it out"
            )
        shape = shape_of(of_model)
        layers[name] = shape.num_layers if layer is None else layer
        if not 1 <= layers[name] <= shape.num_layers:
            raise UserError(f"--layers {layer}: the {name} ({path}) has the layers 1 to {shape.num_layers}")
        for head in config.heads or ():
            if not 1 <= head <= shape.num_heads:
                raise UserError(f"--heads {head}: the {name} ({path}) has the heads 1 to {shape.num_heads}")
    if config.text is not None:
        texts = [config.text]
    elif not Path(str(config.data)).is_file():
        raise UserError(f"--data {config.data}: no such file; give a plain text file")
    else:
        lines = (line.strip() for line in text_lines(Path(str(config.data))))
        texts = list(islice(filter(None, lines), config.examples))
        if len(texts) < config.examples:
            raise UserError(
                f"--examples {config.examples}: {config.data} has {len(texts)} lines of text; ask for fewer"
            )
    items, tokens = _encode(config, models.paths, texts)
    of_texts: list[dict[str, Any]] = []
    drawings = []

    def measure() -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        maps = {}
        for name, path in models.paths.items():
            say(f"{name}: {path}, layer {layers[name]} of {len(texts)} text(s) ...")
            model = models.load(name, "none")
            maps[name] = attention_maps(model, items, layer=layers[name] - 1)
            entries[name] = {"path": str(path), "params": count_parameters(model), "layer": layers[name]}
        for number, text in enumerate(texts):
            of_text = {name: of_model[number] for name, of_model in maps.items()}
            of_texts.append({"text": text, "tokens": tokens[number], "models": _compare(config, of_text)})
            drawings.append(_draw(f"attention-{number + 1}", layers, of_text, of_texts[-1]))
        for name, entry in entries.items():
            divergences = [text["models"][name] for text in of_texts]
            entry["kl"] = {head: fmean(of_text["kl"][head] for of_text in divergences) for head in divergences[0]["kl"]}
            shared = [of_text["kl_of_all_heads"] for of_text in divergences]
            entry["kl_of_all_heads"] = None if None in shared else fmean(shared)
        return entries

    entries = models.measure_together(measure)
    return ModelScores(results={"models": entries, "texts": of_texts}, drawings=drawings)


def _encode(
    config: AttentionConfig, paths: Mapping[str, Path], texts: Sequence[str]
) -> tuple[Sequence[EncodedPair], list[Any]]:
    """Return the tokens of each text, which are those of every model, as ids and as words."""
    examples = [PairExample(text, None, None, number) for number, text in enumerate(texts)]
    items: Sequence[EncodedPair] = ()
    for name, path in paths.items():
        tokenizer = load_tokenizer(path)
        encoded = encode_pairs(examples, tokenizer, max_positions(load_config(path), config.max_length))
        if items and [item.input_ids for item in encoded] != [item.input_ids for item in items]:
            first = next(iter(paths))
            raise UserError(f"--model: {name} ({path}) cuts the text into other tokens than {first}; compare others")
        items = items or encoded
    # All tokenizers make the same ids, so the words of the last one stand for all models.
    return items, [tokenizer.convert_ids_to_tokens(item.input_ids) for item in items]


def _compare(config: AttentionConfig, maps: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the divergences of one text: of the maps that are drawn, and of all heads where both have equally many."""
    first = next(iter(maps.values()))
    divergences = {}
    for name, log_HTT in maps.items():
        heads = [MEAN] if config.heads is None else [str(head) for head in config.heads]
        kl = {head: float(map_divergence(_drawn(first, head), _drawn(log_HTT, head))[0]) for head in heads}
        shared = float(map_divergence(first, log_HTT).mean()) if len(first) == len(log_HTT) else None
        divergences[name] = {"kl": kl, "kl_of_all_heads": shared}
    return divergences


def _drawn(log_HTT: Tensor, head: str) -> Tensor:
    return mean_map(log_HTT) if head == MEAN else log_HTT[int(head) - 1][None]


def _draw(name: str, layers: Mapping[str, int], maps: Mapping[str, Tensor], text: Mapping[str, Any]) -> Drawing:
    """Return the figure of a text: the models side by side, and a row for each head."""
    first = next(iter(maps))
    rows = []
    for head in text["models"][first]["kl"]:
        panels = []
        for model, log_HTT in maps.items():
            what = f"mean of {len(log_HTT)} heads" if head == MEAN else f"head {head}"
            kl = "" if model == first else f", KL {text['models'][model]['kl'][head]:.3f}"
            panels.append(Panel(model, f"layer {layers[model]}, {what}{kl}", _drawn(log_HTT, head)[0].exp().numpy()))
        rows.append(panels)
    caption = (
        f"The attention of each token (query) to the others (key). KL is in nats, from {first}, mean over queries."
    )
    return Drawing(name, text["text"], caption, plot_attention(rows, text["tokens"]))


@rc_context(STYLE)
def plot_attention(rows: Sequence[Sequence[Panel]], tokens: Sequence[str]) -> Figure:
    """Plot the panels of each row side by side, in one scale of colors a row, with the tokens on the axes.

    All rows have equally many panels. The values of a panel are (T, T): the share of each key in a query's attention.
    """
    columns, side = len(rows[0]), max(_SMALLEST, _TOKEN * len(tokens))
    labels = 0.075 * max(map(len, tokens)) + 0.2  # inches: a letter of a token, and the name of the axis
    figure = new_figure(columns * (side + 0.15) + labels + 0.7, len(rows) * (side + 0.55) + labels)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    places = range(len(tokens))
    for line, panels in enumerate(rows):
        # Most of the attention goes to one or two tokens; by its root the rest can be seen beside them.
        scale = PowerNorm(0.5, vmin=0, vmax=max(float(panel.values.max()) for panel in panels))
        for column, panel in enumerate(panels):
            axes = grid[line, column]
            image = axes.imshow(panel.values, cmap="Blues", norm=scale, interpolation="none")
            frame_panel(axes, panel)
            axes.set_xticks(places, tokens if line == len(rows) - 1 else [""] * len(tokens), rotation=90, fontsize=7)
            axes.set_yticks(places, tokens if column == 0 else [""] * len(tokens), fontsize=7)
            axes.tick_params(length=0)
            axes.grid(visible=False)
        figure.colorbar(image, ax=grid[line].tolist(), label="share of the attention", shrink=0.8, aspect=24, pad=0.01)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    return figure


def make_table(results: Mapping[str, Any]) -> TitledTable:
    first, count = next(iter(results["models"])), len(results["texts"])
    heads = list(results["models"][first]["kl"])
    shown = ["KL of the mean map" if head == MEAN else f"KL of head {head}" for head in heads]
    rows = [
        [
            name,
            f"{model['params']:,}",
            str(model["layer"]),
            *(f"{model['kl'][head]:.4f}" for head in heads),
            "–" if model["kl_of_all_heads"] is None else f"{model['kl_of_all_heads']:.4f}",
        ]
        for name, model in results["models"].items()
    ]
    texts = f" and {count} texts" if count > 1 else ""
    title = f"Attention: divergence from {first} in nats, mean over queries{texts}"
    return TitledTable(title, ["", "params", "layer", *shown, "KL of all heads"], rows)


SUITE = ModelSuite(
    name="attention",
    title="Attention side by side",
    settings=("data", "max_length", "heads"),
    values=lambda _, results: {(f"head {head}", "kl"): value for head, value in results["kl"].items()},
    score=_score,
    table=make_table,
    note=" The last column is the mean over heads, of models with equally many.",
    closing="The divergences of each text are in results.json.",
)
