"""Metrics of written texts, by well-kept libraries: sacrebleu, nltk's METEOR, rouge-score."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal, cast

from llmdistill.tasks.rouge import rouge_scores

TextMetric = Literal["bleu4", "meteor", "rouge1", "rouge2", "rougeL"]

NAMES: dict[str, str] = {
    "bleu4": "BLEU-4",
    "meteor": "METEOR",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
}
"""The metrics as papers write them, in sentences and tables."""


def text_metrics(
    metrics: Sequence[TextMetric], predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[TextMetric, float]:
    """Compute metrics of texts, each from 0 to 100, for one or more references of each text.

    BLEU-4 is that of the corpus (Papineni et al. 2002), as sacrebleu computes it on its own tokens in lower case, with
    its default smoothing, which changes nothing where a 4-gram matches. The others are means over the texts with the
    best reference of each: ROUGE as in `rouge_scores`, METEOR as in `meteor_scores`.
    """

    def score(metric: TextMetric) -> float:
        if metric == "bleu4":
            from sacrebleu.metrics import BLEU

            most = max(map(len, references))
            # sacrebleu takes the first references of all texts, then the second ones; None where a text has fewer.
            columns = [[texts[place] if place < len(texts) else None for texts in references] for place in range(most)]
            # 13a: the tokens of mteval-v13a, the script of WMT.
            bleu = BLEU(lowercase=True, tokenize="13a").corpus_score(list(predictions), cast("Any", columns))
            return float(bleu.score)
        if metric == "meteor":
            return statistics.fmean(meteor_scores(predictions, references))
        return statistics.fmean(rouge_scores(predictions, references, metric))

    return {metric: score(metric) for metric in metrics}


def meteor_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return the METEOR of each text (Banerjee and Lavie 2005) with its best reference, by nltk, on sacrebleu's tokens.

    Words match if they are equal in lower case, if their Porter stems are, or if WordNet has them in one synset; the
    last only where nltk's data hold WordNet, see `has_synonyms`. The papers' METEOR is the Java program of its authors
    (version 1.5), with other parameters, synonyms and paraphrases: its scores are not these.
    """
    from nltk.translate.meteor_score import meteor_score
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokenize = Tokenizer13a()
    # In place of WordNet: no word has a synonym.
    synonyms = {} if has_synonyms() else {"wordnet": SimpleNamespace(synsets=lambda _word: [])}

    def split_words(text: str) -> list[str]:
        return str(tokenize(text)).split()

    return [
        100
        * float(
            meteor_score(
                [split_words(reference) for reference in several], split_words(prediction), **cast("Any", synonyms)
            )
        )
        for prediction, several in zip(predictions, references, strict=True)
    ]


def has_synonyms() -> bool:
    """Return whether nltk finds WordNet on this machine; it is no package, and nothing is downloaded."""
    from nltk.corpus import wordnet

    try:
        wordnet.ensure_loaded()
    except LookupError:
        return False
    return True
