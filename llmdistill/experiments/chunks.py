"""Phrases in the layers of encoders, side by side: NMI of clustered spans of CoNLL-2000 (MiniLM Table 10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from llmdistill.artifacts import read_result, write_result
from llmdistill.config.side_by_side import ChunksConfig
from llmdistill.errors import UserError
from llmdistill.experiments.side_by_side import (
    check_kind,
    default_folder,
    model_entries,
    named_models,
    result_file,
    write_results,
)
from llmdistill.factorize.counting import count_parameters
from llmdistill.fingerprints import digest, fingerprint
from llmdistill.models.configs import load_config
from llmdistill.models.families import max_positions
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.report.panels import plot_panels
from llmdistill.report.plots import Curve, Drawing, method_styles
from llmdistill.report.record import make_record
from llmdistill.report.spread import count_seeds, over_seeds, show_seeds
from llmdistill.report.tables import Texts, print_table
from llmdistill.runtime.devices import TORCH_DTYPES, chosen_dtype
from llmdistill.runtime.distributed import World
from llmdistill.tasks.chunk_files import Located, Sentence, draw_spans, located, read_sentences
from llmdistill.tasks.chunks import cluster_score, encode_sentences, end_vectors, is_read, represent

ASKED = ("data", "chunks", "unlabeled", "held_out", "seeds")
"""The settings on which scores depend."""

_TOKENS = 512
"""Largest number of tokens of a sentence, where a model has more positions."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The checked settings, and the spans of each seed."""

    models: Mapping[str, Path]
    folder: Path
    dtype: str
    encoded: Mapping[str, Any]
    """The tokens of the sentences and of their words for each model."""
    drawn: Mapping[int, Sequence[Located]]
    """The spans by seed; they are the same for all models."""
    warnings: Sequence[str]


def evaluate(config: ChunksConfig, *, command: str) -> dict[str, Any]:
    """Score each layer of each model, and return the results as plain JSON values.

    The scores of each model are kept in the output folder as soon as they are there, so that the same command goes on
    with the next model. results.json, report.md and the plot are written at the end.

    Raises:
        UserError: a model is no encoder or cannot be read, the file is malformed, or it has too few spans.
    """
    world = World.alone()
    plan = _plan(config, world)
    scores = {name: _score(name, config, plan, world) for name in plan.models}
    labels = Counter(each.span.label for spans in plan.drawn.values() for each in spans)
    results = {
        **{key: getattr(config, key) for key in ASKED},
        "dtype": plan.dtype,
        "spans": len(plan.drawn[config.seeds[0]]),
        "labels": dict(labels.most_common()),
        "models": model_entries(scores),
        "warnings": list(plan.warnings),
        "run": make_record(command, world.size),
    }
    return write_results(
        plan.folder,
        results,
        title="Phrases in the layers (CoNLL-2000)",
        legend=f"{_title(results)}. The spans are the same for all models.",
        table=table_cells(results),
        drawings=[_draw(results)],
        details={
            "Spans of all seeds by label": ", ".join(f"{name} {count:,}" for name, count in results["labels"].items()),
            "Data": config.data,
        },
        closing="The scores of each model are in a folder of its name, and all of them in results.json.",
    )


def _plan(config: ChunksConfig, world: World) -> _Plan:
    """Check all settings and draw the spans before a model is loaded; raise UserError for a mistake."""
    models = named_models(config.model)
    check_kind(models, causal=False, reason="the first word of a span must see the words after it: give an encoder")
    sentences = read_sentences(config.data)
    encoded = {name: encode_sentences(sentences, load_tokenizer(path), _limit(path)) for name, path in models.items()}
    read = [each for each in located(sentences) if all(is_read(each, tokens) for _, tokens in encoded.values())]
    drawn = {
        seed: draw_spans(read, chunks=config.chunks, unlabeled=config.unlabeled, seed=seed) for seed in config.seeds
    }
    for spans in drawn.values():
        _check_count(config.data, config.held_out, spans)
    return _Plan(
        models=models,
        folder=Path(config.output_dir or default_folder("conll2000", config.model[0])),
        dtype=chosen_dtype(config.dtype, world.device),
        encoded=encoded,
        drawn=drawn,
        warnings=[*_unread(config.data, sentences, encoded), *_fewer(config, drawn)],
    )


def _limit(path: Path) -> int:
    return max_positions(load_config(path), _TOKENS)


def check_file(path: Path) -> None:
    """Check that a file has spans enough for the default settings.

    Raises:
        UserError: the file is missing or malformed, or has too few spans.
    """
    drawn = draw_spans(
        located(read_sentences(path)), chunks=ChunksConfig.chunks, unlabeled=ChunksConfig.unlabeled, seed=0
    )
    _check_count(str(path), ChunksConfig.held_out, drawn)


def _check_count(data: str, held_out: int, spans: Sequence[Located]) -> None:
    """Check that k-means sees at least as many spans as it makes clusters."""
    clusters = len({each.span.label for each in spans})
    if clusters < 2:
        raise UserError(f"{data}: its spans are of {clusters} labels, and clusters need 2; give another file")
    if len(spans) - held_out < clusters:
        raise UserError(
            f"--held_out {held_out}: {data} gives {len(spans)} spans of {clusters} labels, which leaves too few for "
            "as many clusters; hold out fewer, or give a larger file"
        )


def _unread(data: str, sentences: Sequence[Sentence], encoded: Mapping[str, Any]) -> list[str]:
    """Return a sentence for the models that do not read the same words."""
    unread: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for name, (_, tokens) in encoded.items():
        found = [(index, int(word)) for index, each in enumerate(tokens) for word in np.flatnonzero(each[:, 0] < 0)]
        unread.setdefault(tuple(found), []).append(name)
    warnings = []
    for words, names in unread.items():
        if words:
            index, word = words[0]
            place = f"{data}:{sentences[index].line + word}"
            warnings.append(
                f"{len(words)} words without a token, or beyond the model's positions ({', '.join(names)}), the first "
                f"is {sentences[index].words[word]!r} ({place}): no span is drawn that begins or ends with them"
            )
    return warnings


def _fewer(config: ChunksConfig, drawn: Mapping[int, Sequence[Located]]) -> list[str]:
    """Return a sentence if the file has fewer spans than were asked for."""
    asked, found = config.chunks + config.unlabeled, len(drawn[config.seeds[0]])
    if found == asked:
        return []
    return [f"{config.data} has {found} of the {asked} spans that were asked for"]


def _score(name: str, config: ChunksConfig, plan: _Plan, world: World) -> dict[str, Any]:
    """Return the scores of a model, which are kept, or computed and kept then."""
    path = plan.models[name]
    asked = {
        **{key: getattr(config, key) for key in ASKED if key != "data"},
        "dtype": plan.dtype,
        "spans": digest([[[each.sentence, *each.span] for each in spans] for spans in plan.drawn.values()]),
        "content of data": fingerprint(config.data),
        "content of model": fingerprint(str(path)),
    }
    file = result_file(plan.folder, name)
    kept = read_result(file, asked)
    if kept is not None:
        return kept
    print(f"{name}: {path} on {len(plan.drawn)} x {len(plan.drawn[config.seeds[0]])} spans ...", flush=True)
    model = load_model(path, dtype=TORCH_DTYPES[plan.dtype], device=world.device, head="none")
    pad_token_id: Any = load_tokenizer(path).pad_token_id
    by_seed = []
    for seed, spans in plan.drawn.items():
        items, tokens = plan.encoded[name]
        ends = end_vectors(model, items, tokens, spans, pad_token_id=pad_token_id, batch_size=config.batch_size)
        labels = [each.span.label for each in spans]
        by_seed.append([cluster_score(represent(layer), labels, held_out=config.held_out, seed=seed) for layer in ends])
    nmi = [over_seeds(values) for values in zip(*by_seed, strict=True)]
    return write_result(file, asked, {"path": str(path), "params": count_parameters(model), "nmi": nmi})


def table_cells(results: Mapping[str, Any]) -> Texts:
    """Return header and rows as text: a row for each layer, a column for each model."""
    models = results["models"]
    depth = max(len(each["nmi"]) for each in models.values())
    rows = [
        [
            str(layer + 1),
            *(show_seeds(each["nmi"][layer], 3) if layer < len(each["nmi"]) else "" for each in models.values()),
        ]
        for layer in range(depth)
    ]
    return ["layer", *models], rows


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, one row per layer."""
    print_table(f"{_title(results)}.", *table_cells(results), console=console)
    for warning in results["warnings"]:
        (console or Console()).print(f"Warning: {warning}", highlight=False)


def _title(results: Mapping[str, Any]) -> str:
    scored = f"{results['held_out']} held-out spans" if results["held_out"] else "the clustered spans themselves"
    seeds = count_seeds(len(results["seeds"]))
    return f"Normalised mutual information of the clusters and the types of the chunks on {scored}, {seeds}"


def _draw(results: Mapping[str, Any]) -> Drawing:
    """Return the plot of the scores over the layers."""
    models = results["models"]
    styles = method_styles(list(models))
    curves = []
    for name, each in models.items():
        seeds = [value["seeds"] for value in each["nmi"]]
        layers = [float(layer) for layer in range(1, len(seeds) + 1)]
        means = [value["mean"] for value in each["nmi"]]
        curves.append((name, styles[name], Curve(layers, means, list(map(min, seeds)), list(map(max, seeds)))))
    caption = "Mean over seeds; the band goes from the lowest to the highest seed."
    figure = plot_panels({"normalised mutual information": curves}, "layer", scores=True)
    return Drawing("layers", "Phrases by layer", caption, figure)
