"""Phrases in the layers of encoders, side by side: NMI of clustered spans of CoNLL-2000 (MiniLM Table 10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from llmdistill.config.side_by_side import ChunksConfig
from llmdistill.errors import UserError
from llmdistill.fingerprints import digest, fingerprint
from llmdistill.models.configs import load_config
from llmdistill.models.families import max_positions
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.papers.conll import Located, draw_spans, locate_spans, read_sentences
from llmdistill.papers.span_clusters import cluster_score, encode_sentences, end_vectors, is_read, represent
from llmdistill.report.panels import plot_panels
from llmdistill.report.plots import Drawing, curve_of, method_styles
from llmdistill.report.tables import TitledTable, count_seeds, over_seeds, show_seeds
from llmdistill.studies.side_by_side import ComparedModels, ModelScores, ModelSuite

_SETTINGS = ("data", "chunks", "unlabeled", "held_out", "seeds")

_TOKENS = 512
"""Largest number of tokens of a sentence, where a model has more positions."""


def _score(config: ChunksConfig, models: ComparedModels) -> ModelScores:
    models.check_kind(causal=False, reason="the first word of a span must see the words after it: give an encoder")
    sentences = read_sentences(config.data)
    tokenizers: dict[str, Any] = {name: load_tokenizer(path) for name, path in models.paths.items()}
    encoded = {
        name: encode_sentences(sentences, tokenizers[name], max_positions(load_config(path), _TOKENS))
        for name, path in models.paths.items()
    }
    # Only spans that every model reads, so that all are scored on the same ones.
    read = [span for span in locate_spans(sentences) if all(is_read(span, tokens) for _, tokens in encoded.values())]
    drawn = {
        seed: draw_spans(read, chunks=config.chunks, unlabeled=config.unlabeled, seed=seed) for seed in config.seeds
    }
    for spans in drawn.values():
        _check_count(config.data, config.held_out, spans)
    depends_on = {
        **{key: getattr(config, key) for key in _SETTINGS if key != "data"},
        "dtype": models.dtype,
        "spans": digest([[[place.sentence, *place.span] for place in spans] for spans in drawn.values()]),
        "content of data": fingerprint(config.data),
    }

    def score(name: str, model: PreTrainedModel) -> dict[str, Any]:
        by_seed = []
        for seed, spans in drawn.items():
            padding, labels = tokenizers[name].pad_token_id, [place.span.label for place in spans]
            ends = end_vectors(model, *encoded[name], spans, pad_token_id=padding, batch_size=config.batch_size)
            by_seed.append(
                [cluster_score(represent(of_layer), labels, held_out=config.held_out, seed=seed) for of_layer in ends]
            )
        return {"nmi": [over_seeds(values) for values in zip(*by_seed, strict=True)]}

    size = len(drawn[config.seeds[0]])
    entries = models.score_models(score, depends_on=depends_on, on=f"{len(drawn)} x {size} spans", head="none")
    labels = dict(Counter(place.span.label for spans in drawn.values() for place in spans).most_common())
    # Models that do not read the same words share a sentence with those that miss the same ones.
    unread: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for name, (_, tokens) in encoded.items():
        places = [
            (index, int(word))
            for index, of_sentence in enumerate(tokens)
            for word in np.flatnonzero(of_sentence[:, 0] < 0)
        ]
        unread.setdefault(tuple(places), []).append(name)
    warnings = []
    for words, names in unread.items():
        if words:
            index, word = words[0]
            where = f"{config.data}:{sentences[index].line + word}"
            warnings.append(
                f"{len(words)} words without a token, or beyond the model's positions ({', '.join(names)}), the first "
                f"is {sentences[index].words[word]!r} ({where}): no span is drawn that begins or ends with them"
            )
    wanted = config.chunks + config.unlabeled
    if size < wanted:
        warnings.append(f"{config.data} has {size} of the {wanted} spans that were asked for")
    return ModelScores(
        results={"spans": size, "labels": labels, "models": entries, "warnings": warnings},
        drawings=[_draw(entries)],
        details={
            "Spans of all seeds by label": ", ".join(f"{name} {count:,}" for name, count in labels.items()),
            "Data": config.data,
        },
    )


def check_file(path: Path) -> None:
    """Raises UserError if a file is missing or malformed, or has too few spans for the default settings."""
    usual = ChunksConfig  # the class, whose attributes are the defaults
    drawn = draw_spans(locate_spans(read_sentences(path)), chunks=usual.chunks, unlabeled=usual.unlabeled, seed=0)
    _check_count(str(path), usual.held_out, drawn)


def _check_count(data: str, held_out: int, spans: Sequence[Located]) -> None:
    """Check that k-means sees at least as many spans as it makes clusters."""
    clusters = len({place.span.label for place in spans})
    if clusters < 2:
        raise UserError(f"{data}: its spans are of {clusters} labels, and clusters need 2; give another file")
    if len(spans) - held_out < clusters:
        raise UserError(
            f"--held_out {held_out}: {data} gives {len(spans)} spans of {clusters} labels, which leaves too few for "
            "as many clusters; hold out fewer, or give a larger file"
        )


def make_table(results: Mapping[str, Any]) -> TitledTable:
    models = results["models"]
    columns = [[show_seeds(value, 3) for value in model["nmi"]] for model in models.values()]
    rows = [[str(layer), *scores] for layer, scores in enumerate(zip_longest(*columns, fillvalue=""), start=1)]
    scored = f"{results['held_out']} held-out spans" if results["held_out"] else "the clustered spans themselves"
    seeds = count_seeds(len(results["seeds"]))
    title = f"Normalized mutual information of the clusters and the types of the chunks on {scored}, {seeds}."
    return TitledTable(title, ["layer", *models], rows)


def _draw(models: Mapping[str, Any]) -> Drawing:
    styles = method_styles(list(models))
    curves = []
    for name, model in models.items():
        by_layer = {float(layer): value["seeds"] for layer, value in enumerate(model["nmi"], start=1)}
        curves.append((name, styles[name], curve_of(by_layer)))
    caption = "Mean over seeds; the band goes from the lowest to the highest seed."
    figure = plot_panels({"normalized mutual information": curves}, "layer", scores=True)
    return Drawing("layers", "Phrases by layer", caption, figure)


SUITE = ModelSuite(
    name="conll2000",
    title="Phrases in the layers (CoNLL-2000)",
    settings=_SETTINGS,
    values=lambda _, results: {
        (f"layer {layer}", "nmi"): value["mean"] for layer, value in enumerate(results["nmi"], start=1)
    },
    score=_score,
    table=make_table,
    transposed=False,
    note=" The spans are the same for all models.",
)
