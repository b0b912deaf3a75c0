"""Plots the hidden states of fine-tuned models on a task's dev set with t-SNE (KroneckerBERT Figure 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score
from transformers import PreTrainedModel

from llmdistill.artifacts import read_result, write_result
from llmdistill.batch import Aspect
from llmdistill.data.pairs import EncodedPair, collate_pairs, encode_pairs
from llmdistill.data.sampler import scoring_batches
from llmdistill.fingerprints import fingerprint
from llmdistill.models.configs import load_config
from llmdistill.models.families import is_causal, shape_of
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.progress import progress
from llmdistill.report.plots import COLORS, MARKERS, STYLE, Panel, frame_panel, new_figure, save_plot
from llmdistill.tasks.classification import list_targets
from llmdistill.tasks.glue import Glue
from llmdistill.tasks.item_outputs import scoring_forward

EXAMPLES = 1000
"""Maximum number of examples in the plot; they are sampled with a fixed seed from a longer dev set."""

_BATCH_SIZE = 32
_PERPLEXITY = 30.0
"""scikit-learn's default; lower if there are few examples."""

_MAX_PANELS = 4  # side by side


@dataclass(frozen=True, kw_only=True)
class DrawnFeatures:
    """The features that are drawn: those of one layer on the dev set of a task."""

    task: Glue
    aspect: Aspect
    """The features of the layer, of the model's width."""
    layer: int | None
    """From 1; None is the middle layer of each model."""
    max_length: int
    """The largest number of tokens of an example."""
    dtype: torch.dtype
    """In which the models are loaded."""


def draw(
    drawn: DrawnFeatures, models: Mapping[str, str], folder: Path, name: str, device: torch.device
) -> dict[str, Any]:
    """Plot each model's hidden states on the dev set side by side; one rank calls this function.

    `models` are fine-tuned on the task: folders or hub names by the titles of their panels. The plot is NAME.png and
    NAME.svg in the folder; NAME.json has every point, and is not computed again.

    Returns:
        The number of examples, and for each model its layer and `silhouette`: the separation of the classes in its
        features before t-SNE, from -1 to 1; None for a regression task.
    """
    data, classes, file = drawn.task.read_files(), drawn.task.entry.classes, folder / f"{name}.json"
    prints = {title: fingerprint(path) for title, path in models.items()}
    depends_on = {
        **{"models": prints, "layer": drawn.layer, "aspect": drawn.aspect},
        **{"max_length": drawn.max_length, "examples": data.digest, "dtype": str(drawn.dtype)},
    }
    earlier = read_result(file, depends_on)
    if earlier is not None and (folder / f"{name}.png").is_file():
        return _summary(earlier)
    dev = data.sets["dev"].examples
    rows = list(range(len(dev)))
    if len(dev) > EXAMPLES:  # at random, as files are often sorted
        rows = sorted(np.random.default_rng(0).choice(len(dev), EXAMPLES, replace=False).tolist())
    examples = [dev[row] for row in rows]
    targets = list_targets(examples)
    points_of, clouds = {}, []
    for title, path in models.items():
        number = middle_layer(path) if drawn.layer is None else drawn.layer
        tokenizer: Any = load_tokenizer(path)
        model = load_model(path, dtype=drawn.dtype, device=device, head="sequence")
        items = encode_pairs(examples, tokenizer, drawn.max_length)
        padding = tokenizer.pad_token_id
        features = layer_features(model, items, layer=number, aspect=drawn.aspect, pad_token_id=padding)
        points = embed(features)
        apart = float(silhouette_score(features, targets)) if classes and len(np.unique(targets)) > 1 else None
        points_of[title] = {"path": path, "layer": number, "silhouette": apart, "points": points.round(3).tolist()}
        note = "" if apart is None else f", silhouette {round(apart, 2) + 0.0:.2f}"  # + 0.0 takes the sign off -0.0
        clouds.append(Panel(title, f"layer {number}{note}", points))
    save_plot(plot_clusters(clouds, targets, classes), folder, name)
    return _summary(write_result(file, depends_on, {"rows": rows, "targets": targets.tolist(), "models": points_of}))


def _summary(result: Mapping[str, Any]) -> dict[str, Any]:
    models = {title: {key: model[key] for key in ("layer", "silhouette")} for title, model in result["models"].items()}
    return {"examples": len(result["rows"]), "models": models}


def middle_layer(path: str) -> int:
    """Return the middle layer of a model, counted from 1: the 6th of 12."""
    return max(1, shape_of(load_config(path)).num_layers // 2)


@torch.no_grad()
def layer_features(
    model: PreTrainedModel, items: Sequence[EncodedPair], *, layer: int, aspect: Aspect, pad_token_id: int
) -> np.ndarray:
    """Return the features of a layer, from 1, in fp32 (rows, width): at the first token of an encoder, else the last.

    A decoder's first token cannot represent the example, because it attends only to itself.
    """
    features = np.empty((len(items), model.config.hidden_size), dtype=np.float32)
    batches = scoring_batches(items, partial(collate_pairs, pad_token_id=pad_token_id), batch_size=_BATCH_SIZE)
    with scoring_forward(model, {aspect: frozenset({layer - 1})}) as forward:
        for indices, batch in progress(batches, "Features", "batches"):
            features_BTW = getattr(forward(batch).taps, aspect)[layer - 1]
            # The last token: `collate_pairs` pads on the right.
            token_B = batch.attention_mask.sum(1) - 1 if is_causal(model.config) else torch.zeros(len(indices)).long()
            chosen_BW = features_BTW[torch.arange(len(indices)), token_B.to(model.device)]
            features[indices] = chosen_BW.float().cpu().numpy()
    return features


def embed(features: np.ndarray) -> np.ndarray:
    """Return the points (rows, 2) of t-SNE, which are deterministic for given features."""
    # t-SNE compares each point with three times as many neighbors as the perplexity.
    perplexity = min(_PERPLEXITY, max(1.0, (len(features) - 1) / 3))
    points: np.ndarray = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    return points


@rc_context(STYLE)
def plot_clusters(clouds: Sequence[Panel], targets: np.ndarray, classes: Sequence[str]) -> Figure:
    """Plot the clouds (rows, 2) of the same examples side by side, colored by class or score (KroneckerBERT Figure 4).

    `targets` (rows,) are indices of `classes`, or scores if there are no classes.
    """
    columns = min(len(clouds), _MAX_PANELS)
    lines = -(-len(clouds) // columns)
    figure = new_figure(2.9 * columns + 0.4, 3.0 * lines + 0.4)
    panels = list(np.atleast_1d(figure.subplots(lines, columns)).flat)
    small: dict[str, Any] = {"s": max(4.0, min(20.0, 6000 / len(targets))), "alpha": 0.75, "linewidths": 0}
    for axes, cloud in zip(panels, clouds, strict=False):
        if classes:
            for index, name in enumerate(classes):
                look = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)], "label": name}
                axes.scatter(*cloud.values[targets == index].T, **look, **small)
        else:
            axes.scatter(*cloud.values.T, c=targets, cmap="viridis", **small)
        frame_panel(axes, cloud)
        # The axes of t-SNE and its distances between far points have no meaning, so there are no ticks.
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_box_aspect(1)
    for axes in panels[len(clouds) :]:
        axes.set_visible(False)
    if classes:
        # A bare number would be unclear in the legend.
        names = [f"class {name}" if name.isdigit() else name for name in classes]
        handles, _ = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4), markerscale=2)
    else:
        figure.colorbar(panels[0].collections[0], ax=panels, label="score", shrink=0.7, aspect=24, pad=0.02)
    return figure
