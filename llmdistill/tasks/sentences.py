"""Sentences: an encoder learns the teacher's embeddings, and is scored by the correlation of its cosines with people's.

The score is that of STS: Spearman's rank correlation between the cosine of two embeddings and the given similarity.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import ConcatDataset
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.data.pairs import (
    PAIRS,
    TRIPLE,
    EncodedPair,
    PairExample,
    SentencePair,
    collate_pairs,
    encode_pairs,
    read_pairs,
    read_sentences,
    read_triples,
)
from llmdistill.data.references import parts_of
from llmdistill.data.sampler import Share, TrainLoader, scoring_batches
from llmdistill.data.sources import open_rows
from llmdistill.data.store import ItemGroups, SplitWriter, in_pieces
from llmdistill.embedded import locate, locate_data
from llmdistill.errors import UserError
from llmdistill.files import write_text
from llmdistill.models.families import is_causal
from llmdistill.models.heads import EMBEDDINGS
from llmdistill.models.pooling import SentenceSettings, dense_width, has_dense, read_sentence_settings
from llmdistill.objective import Objective, Pooling
from llmdistill.runtime.distributed import World
from llmdistill.tasks.base import VALID, ScoredModel, ScoreTable
from llmdistill.tasks.classification import rank_correlation
from llmdistill.tasks.item_outputs import compute_values, scoring_forward
from llmdistill.tasks.stored import StoredData, StoredTask, TaskFiles

_LOST = 1.0
"""Points of Spearman's correlation by which training may lower it without a warning."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SentenceData(StoredData):
    """The sentences of a run, and the scores of models on pairs of them."""

    task: Sentences

    def describe_training(self) -> str:
        return f"{len(self.train):,} sentences" if self.task.trains else "not read, as nothing is trained"

    @cached_property
    def similarities(self) -> dict[str, Sequence[float]]:
        """The similarity of each pair of the scored sets, whose two sentences are side by side in `encoded`."""
        return {name: self.text(name) for name in self.meta["sets"]}

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        pooling = self.task.settings.pooling
        settings = {"sentences": self.digest, "pooling": list(pooling.modes), "normalize": pooling.normalize}
        return dict.fromkeys(self.meta["sets"], settings)

    def num_steps(self, epochs: int, global_batch_size: int) -> int:
        return -(-epochs * len(ItemGroups(self.train, self.task.rows_per_example)) // global_batch_size)

    def loader(self, share: Share) -> TrainLoader[list[EncodedPair]]:
        """See Task; a batch of triples has three times as many sentences."""
        rows = ItemGroups(self.train, self.task.rows_per_example)

        def collate(rows: Sequence[Sequence[EncodedPair]]) -> Batch:
            return self.collate(list(chain.from_iterable(rows)))

        return TrainLoader(rows, replace(share, bucket_steps=self.task.config.data.bucket_steps), collate)

    def teacher_examples(self) -> tuple[Sequence[EncodedPair], Callable[[list[EncodedPair]], Batch]]:
        """See Task: the sentences one by one, and those of the validation set, on which the loss is measured."""
        sets: list[Any] = [self.encoded[name] for name in ("train", VALID) if name in self.encoded]
        examples: Any = ConcatDataset(sets)
        return examples, self.collate

    def validation(self, share: Share) -> list[Batch]:
        sentences, rank = self.encoded.get(VALID, ()), {"rank": share.rank, "world_size": share.world_size}
        batches = scoring_batches(sentences, self.collate, batch_size=share.micro_batch_size, **rank)
        return [batch for _, batch in batches]

    def validation_score(self, scored: ScoredModel) -> float:
        return float(self.score_set(VALID, scored)["spearman"])

    def score_set(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        """See Task: Spearman's correlation of the cosines with the similarities, times 100."""
        embeddings = embed_sentences(
            scored.model,
            self.encoded[name],
            self.tokenizer,
            self.task.settings.pooling,
            batch_size=self.batch_size,
        )
        # The two sentences of a pair stand side by side: (pairs,).
        cosines = functional.cosine_similarity(embeddings[::2], embeddings[1::2], dim=-1).double().numpy()
        scores = np.array(self.similarities[name], dtype=np.float64)
        if World.current().is_main:
            rows = (f"{cosine:.6f}\t{score:g}\n" for cosine, score in zip(cosines, scores, strict=True))
            write_text(scored.predictions / f"{name}.tsv", "".join(["cosine\tscore\n", *rows]))
        return {"spearman": 100 * rank_correlation(cosines, scores), "pairs": len(scores)}

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {"spearman": {name: score["spearman"] for name, score in scores.items()}}

    def sentence(self, model: str, summary: Mapping[str, Any]) -> str:
        shown = "  ".join(f"{name} {value:.2f}" for name, value in summary["spearman"].items())
        return f"Spearman of the {model}: {shown or 'no test sets'}"

    def end_warnings(self, summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """See TaskData: a student whose training has lowered its score, as a rate that is too high does."""
        measured = [summaries[name]["spearman"] for name in ("untrained", "student") if name in summaries]
        scores = [statistics.fmean(by_set.values()) for by_set in measured if by_set]
        if len(scores) < 2 or scores[1] > scores[0] - _LOST:
            return []
        return [
            f"training has lowered the student's Spearman from {scores[0]:.1f} to {scores[1]:.1f}: lower "
            f"train.learning_rate ({self.task.config.train.peak_learning_rate:g}), or train for more steps"
        ]

    def table(self, results: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
        return ScoreTable(
            title="Spearman x 100 on each set",
            columns=[f"{name} (n = {len(scores):,})" for name, scores in self.similarities.items()],
            rows={
                model: [f"{result['spearman'][name]:.2f}" for name in self.similarities]
                for model, result in results.items()
            },
            legend=(
                "Spearman's rank correlation between the cosine of two sentences' embeddings and the similarity that "
                "people gave them, x 100."
            ),
        )


class Sentences(StoredTask[SentenceData]):
    """The task of giving sentences the teacher's embeddings."""

    data_class = SentenceData
    head = "embedding"
    validation_metric = "Spearman"
    key = "sentences"
    schema = PAIRS

    @property
    def rows_per_example(self) -> int:
        """See Task: three sentences of a triple."""
        return TRIPLE if self.config.data.sentences.triples else 1

    @cached_property
    def settings(self) -> SentenceSettings:
        """How embeddings are made: as the run's settings say, else as the files beside the teacher do."""
        model, own = self.config.teacher.model or self.config.student.model, self.config.data.sentences
        stored = read_sentence_settings(locate(str(model))) or SentenceSettings(pooling=Pooling(), max_length=None)
        if self.config.teacher.model is not None and has_dense(locate(str(model))):
            raise UserError(
                f"teacher.model {model} ends in a Dense, and a student learns the embeddings of Transformer, Pooling "
                "and perhaps Normalize: take a teacher without it"
            )
        pooling = stored.pooling
        if own.pooling is not None:
            pooling = replace(pooling, modes=(own.pooling,))
        if own.normalize is not None:
            pooling = replace(pooling, normalize=own.normalize)
        longest = self.config.data.max_length
        return replace(stored, pooling=pooling, max_length=min(longest, stored.max_length or longest))

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        if is_causal(config):
            raise UserError(
                f"{key} {reference} is a decoder ({config.model_type}), and embeddings of sentences are learned by "
                "encoders: take an encoder"
            )
        path, settings = locate(reference), self.config.method_settings.get("embedding")
        is_trained_on = "embedding" not in self.config.methods() or getattr(settings, "projection", "drop") == "keep"
        if key == "student.model" and not is_trained_on and path.is_dir() and has_dense(path):
            raise UserError(
                f"student.model {reference} ends in a Dense: set embedding.projection to keep, which trains it on, or "
                "take a student without it"
            )

    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        student, width = self.config.student.model, len(self.settings.pooling.modes) * teacher.hidden_size
        own = None if student is None else dense_width(locate(student))
        if self.trains and self.config.teacher.model is not None and own not in (None, width):
            raise UserError(
                f"student.model {student} ends in a Dense of {own}, and the embeddings of the teacher have {width}: "
                "take the teacher that it has learned from, or a student without a Dense"
            )
        return Objective(tokens=False, targets=EMBEDDINGS, pooling=self.settings.pooling)

    def paths(self) -> list[Path] | None:
        parts = [part.reference for reference in self._list_references().values() for part in parts_of(reference)]
        paths = [locate_data(part) for part in parts]
        return paths if all(map(os.path.isfile, paths)) else None

    def _list_references(self) -> dict[str, str]:
        """List the references of the data sets: train if the run trains, the validation set, and the test sets."""
        data = self.config.data
        references = {"train": data.train if self.trains else None, VALID: data.valid}
        return {**{name: reference for name, reference in references.items() if reference is not None}, **data.tests}

    def check_files(self, *, thorough: bool = True) -> None:
        """See Task: the files of scored sets, which are small, are read completely."""
        for name, reference in self._list_references().items():
            is_file = os.path.isfile(locate_data(reference))
            if name != "train" and is_file:
                read_pairs(locate_data(reference))
            elif not is_file:
                open_rows(reference, streaming=True)

    def read_files(self) -> TaskFiles[str, list[SentencePair]]:
        references = self._list_references()
        read = read_triples if self.config.data.sentences.triples else read_sentences
        train = read(references.pop("train")) if self.trains else []
        return TaskFiles(train, {name: read_pairs(reference) for name, reference in references.items()})

    def token_settings(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "max_length": settings.max_length,
            "prompt": settings.prompt,
            "lower_case": settings.lower_case,
            "triples": self.config.data.sentences.triples,
            "reader": 2,  # which fields of a row are sentences
            "sets": list(self._list_references()),
        }

    def write(
        self, files: TaskFiles[str, list[SentencePair]], tokenizer: PreTrainedTokenizerBase, writer: SplitWriter
    ) -> dict[str, Any]:
        """See StoredTask. The sentences of a pair follow each other; their similarities are stored beside them."""
        sets = {
            name: [text for pair in pairs for text in (pair.sentence1, pair.sentence2)]
            for name, pairs in files.sets.items()
        }
        for name, texts in {"train": files.train, **sets}.items():
            if texts:
                # A row without a target would count as one that is only predicted; ours is the place in the triple.
                sentences_per_example = self.rows_per_example if name == "train" else 1
                rows = [
                    PairExample(self.settings.text(text), None, number % sentences_per_example, number)
                    for number, text in enumerate(texts)
                ]
                length = int(self.settings.max_length or 0)
                writer.add(name, (encode_pairs(piece, tokenizer, length) for piece in in_pieces(rows)), PAIRS)
        for name, pairs in files.sets.items():
            writer.add_text(name, [pair.score for pair in pairs])
        return {"sets": list(files.sets)}


def embed_sentences(
    model: PreTrainedModel,
    items: Sequence[EncodedPair],
    tokenizer: PreTrainedTokenizerBase,
    pooling: Pooling,
    *,
    batch_size: int,
) -> Tensor:
    """Return the embedding of each sentence, (sentences, W), in fp32 on the CPU; every rank must call this function."""
    padding: Any = tokenizer.pad_token_id
    collate = partial(collate_pairs, pad_token_id=padding)

    def to_cpu(embeddings_BW: Tensor, _: Sequence[int]) -> Iterable[Tensor]:
        return embeddings_BW.float().cpu()

    with scoring_forward(model, pooling=pooling) as forward:
        return torch.stack(compute_values(forward, items, collate, to_cpu, batch_size=batch_size))
