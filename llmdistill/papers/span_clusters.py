"""What the layers of an encoder know of phrases: clusters of span representations against the types of the chunks.

Jawahar et al. 2019, section 3, and MiniLM Table 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.data.pairs import EncodedPair, collate_pairs
from llmdistill.data.sampler import scoring_batches
from llmdistill.errors import UserError
from llmdistill.models.families import shape_of
from llmdistill.models.unembedded import check_token_ids
from llmdistill.papers.conll import Located, Sentence
from llmdistill.progress import progress
from llmdistill.tasks.item_outputs import scoring_forward

NOT_READ = -1
"""The token of a word that the model does not read."""

_INITIALIZATIONS = 10
"""First centers that k-means tries; the clusters with the smallest squared distances count."""


def encode_sentences(
    sentences: Sequence[Sentence], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[EncodedPair], list[np.ndarray]]:
    """Tokenize sentences, their words with a space between them, cut after `max_length` tokens.

    Returns:
        The tokens of each sentence, with the special tokens around them, and the first and the last token of each of
        its words (words, 2), NOT_READ if the model does not read the word whole.

    Raises:
        UserError: the tokenizer does not tell the characters of its tokens.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} does not tell the characters of its tokens: save it as "
            "tokenizer.json, by transformers' AutoTokenizer"
        )
    # As text, not as words: byte-level tokenizers take words only with a setting that most of them are saved without.
    texts = [" ".join(sentence.words) for sentence in sentences]
    encoded = tokenizer(texts, truncation=True, max_length=max_length, return_offsets_mapping=True, verbose=False)
    check_token_ids(tokenizer, encoded["input_ids"], lambda number, _: texts[number])
    types = encoded.get("token_type_ids") or [None] * len(texts)
    items = [EncodedPair(ids, kinds, None) for ids, kinds in zip(encoded["input_ids"], types, strict=True)]
    tokens = []
    for sentence, offsets in zip(sentences, encoded["offset_mapping"], strict=True):
        ends_of_words = np.full((len(sentence.words), 2), NOT_READ)
        starts = np.cumsum([0, *(len(word) + 1 for word in sentence.words)])
        for token, (start, end) in enumerate(offsets):
            # A token may begin with the space before its word, or be a space; special tokens have no character.
            word = int(np.searchsorted(starts, end, side="left")) - 1
            if start < min(end, starts[word + 1] - 1):
                first = ends_of_words[word, 0]
                ends_of_words[word] = first if first != NOT_READ else token, token
        if len(offsets) >= max_length:  # the sentence may be cut, and its last word with it
            ends_of_words[starts[1:] - 1 > max(end for _, end in offsets)] = NOT_READ
        tokens.append(ends_of_words)
    return items, tokens


@torch.no_grad()
def end_vectors(
    model: PreTrainedModel,
    items: Sequence[EncodedPair],
    tokens: Sequence[np.ndarray],
    drawn: Sequence[Located],
    *,
    pad_token_id: int,
    batch_size: int,
) -> np.ndarray:
    """Return every layer's output at the first and the last token of each span: (layers, spans, 2, width), fp32.

    The model is an encoder in evaluation mode; `encode_sentences` returns `items` and `tokens`.
    """
    layers = range(shape_of(model.config).num_layers)
    needed = sorted({place.sentence for place in drawn})
    spans_of: dict[int, list[int]] = {index: [] for index in needed}
    for number, place in enumerate(drawn):
        spans_of[place.sentence].append(number)
    vectors = np.empty((len(layers), len(drawn), 2, model.config.hidden_size), dtype=np.float32)
    collate = partial(collate_pairs, pad_token_id=pad_token_id)
    batches = scoring_batches([items[index] for index in needed], collate, batch_size=batch_size)
    with scoring_forward(model, {"hidden": frozenset(layers)}) as forward:
        for rows, batch in progress(batches, "Scoring", "batches"):
            hidden = forward(batch).taps.hidden
            spans = [(row, number) for row, place in enumerate(rows) for number in spans_of[needed[place]]]
            row_N = torch.tensor([row for row, _ in spans], device=model.device)
            numbers = [number for _, number in spans]
            ends_N2 = torch.tensor([_ends(drawn[number], tokens) for number in numbers], device=model.device)
            for layer in layers:
                vectors[layer, numbers] = hidden[layer][row_N[:, None], ends_N2].float().cpu().numpy()  # (N, 2, W)
    return vectors


def _ends(drawn: Located, tokens: Sequence[np.ndarray]) -> tuple[int, int]:
    words = tokens[drawn.sentence]
    return int(words[drawn.span.first, 0]), int(words[drawn.span.last, 1])


def is_read(drawn: Located, tokens: Sequence[np.ndarray]) -> bool:
    """Whether a model reads the first and the last word of a span."""
    return NOT_READ not in _ends(drawn, tokens)


def represent(ends_N2W: np.ndarray) -> np.ndarray:
    """Return the representation of each span (N, 4·W): both ends, their element-wise product, and their difference."""
    first, last = ends_N2W[:, 0], ends_N2W[:, 1]
    return np.concatenate([first, last, first * last, first - last], axis=1)


def cluster_score(features: np.ndarray, labels: Sequence[str], *, held_out: int, seed: int) -> float:
    """Return the normalized mutual information of labels and clusters, from 0 to 1.

    k-means with as many clusters as there are labels sees all rows of the features (rows, width) but the last
    `held_out`, and these are scored; with 0 it sees and scores all rows. `seed` is that of the first centers.
    """
    cut = len(labels) - held_out
    means: Any = KMeans(n_clusters=len(set(labels)), n_init=_INITIALIZATIONS, random_state=seed).fit(features[:cut])
    scored = slice(cut, None) if held_out else slice(None)
    return float(normalized_mutual_info_score(labels[scored], means.predict(features[scored])))
