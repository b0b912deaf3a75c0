"""Text: a decoder learns each next token, an encoder masked tokens; the result is the loss on a validation text."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.config import DataConfig, RunConfig
from llmdistill.data.begin import begin_tokens
from llmdistill.data.corpus import Corpus, open_corpus, store_corpus
from llmdistill.data.held_out import find_learned_files
from llmdistill.data.masking import Masking
from llmdistill.data.references import TEACHER, parts_of, text_files
from llmdistill.data.sampler import SequenceLoader, Share
from llmdistill.data.sources import Data, open_rows, write_rows
from llmdistill.data.text import MixedSequences, TextSequence, TextSequences, validation_batches
from llmdistill.errors import UserError
from llmdistill.models.families import FAMILIES, family_of, has_family, has_segments, max_positions
from llmdistill.models.heads import CLASSES
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Objective
from llmdistill.runtime.distributed import on_every, on_main
from llmdistill.runtime.main_first import make_once
from llmdistill.runtime.terminal import warn_main
from llmdistill.tasks.base import Models, ScoredModel, ScoreTable, Task, TaskData
from llmdistill.tasks.perplexity import perplexity_of
from llmdistill.tasks.reference_loss import label_loss
from llmdistill.tasks.text_windows import TextTests, check_texts, find_text_tests


class Text(Task):
    """The task of learning a corpus of plain text."""

    translates = True

    def __init__(self, config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> None:
        """Raise UserError if a test set is no text."""
        super().__init__(config, trains=trains, teacher_writes=teacher_writes)
        tests = config.data.tests
        other = next((name for name in tests if name not in find_text_tests(tests)), None)
        if other is not None:
            raise UserError(
                f"data.tests.{other} {tests[other]} is no text, but data.kind is text: give a plain text (.txt), whose "
                "perplexity is measured"
            )
        if not tests:
            self.scored = ()

    def changing_examples(self, *, causal: bool) -> str | None:
        return None if causal else "data.kind text masks the sequences of an encoder anew in every epoch"

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        self.check_positions(key, reference, config)

    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        """See Task: tokens, and next sentences if the settings request them or BERT's next-sentence head is used."""
        settings = self.config.data.text
        wanted = settings.next_sentence
        next_sentence = family_of(teacher).next_sentence if has_family(teacher) else None
        if wanted is None:
            # A checkpoint saved as a masked LM alone has no weights for the next-sentence head, even in a family that
            # has one.
            has_head = next_sentence is not None and (teacher.architectures or [""])[0] == next_sentence
            wanted = uses_output and has_head and settings.pairs is not False
        if wanted and next_sentence is None:
            having = ", ".join(name for name, family in FAMILIES.items() if family.next_sentence is not None)
            raise UserError(
                f"data.text.next_sentence is true, but {teacher.model_type} has no next-sentence head: take one "
                f"that has it ({having}), or leave next_sentence out"
            )
        return Objective(tokens=True, targets=CLASSES if wanted else None)

    def check_files(self, *, thorough: bool = True) -> None:
        data = self.config.data
        for reference in (*(_list_parts(data).values() if self.trains else ()), data.valid):
            # What the teacher writes is written before it is read.
            others = [part.reference for part in parts_of(reference) if part.reference != TEACHER] if reference else []
            if others and text_files(",".join(others)) is None:
                open_rows(",".join(others), streaming=True)  # it does not contact the hub yet
        check_texts(find_text_tests(data.tests))

    def read(self, models: Models) -> TextData:
        """See Task. The texts are only read when they are tokenized.

        Raises:
            UserError: the parts of the training text cannot be told apart.
        """
        if self.trains:
            _list_parts(self.config.data)
        tokenizer, teachers_tokenizer = load_tokenizer(models.tokenizer_path), load_tokenizer(models.teacher_path)
        return TextData(
            task=self,
            models=models,
            tokenizer=tokenizer,
            teachers_tokenizer=teachers_tokenizer,
            texts=TextTests.of(self.config, models, [tokenizer, teachers_tokenizer]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TextData(TaskData):
    """The text of a run; it is tokenized once the data are `prepare`."""

    task: Text
    tokenizer: PreTrainedTokenizerBase
    models: Models
    teachers_tokenizer: PreTrainedTokenizerBase
    texts: TextTests
    train: Mapping[str, Corpus] | None = None
    """The training text, in one part of the name "" or in the parts that are sampled; None until it is tokenized."""
    valid: Corpus | None = None
    report: str = ""

    @property
    def pairs(self) -> bool:
        """Whether the sequences are pairs of segments: as the settings say, else if the student can use them."""
        setting, models = self.task.config.data.text.pairs, self.models
        if setting is not None:
            return setting
        return self.next_sentence or (not models.causal and has_segments(models.student))

    @property
    def next_sentence(self) -> bool:
        """Whether a pair has the target whether its second segment follows the first."""
        return self.models.objective.targets is not None

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """See Task: the texts whose perplexity is measured; another result is the validation loss in the log."""
        return self.texts.sets

    def teacher_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.teachers_tokenizer

    def teacher_prompts(self) -> None:
        return None

    def score_set(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        return self.texts.score(name, scored)

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return self.texts.summary(scores)

    def sentence(self, model: str, summary: Mapping[str, Any]) -> str:
        return f"Perplexity of the {model}: {self.texts.sentence(summary)}"

    def for_models(self, models: Models) -> TextData:
        return replace(self, models=models)

    def prepare(self) -> TextData:
        """See Task. Rank 0 hashes the text, and tokenizes it if it is not in the cache; all ranks map the tokens.

        Raises:
            UserError: the text cannot be read or is too short.
        """
        settings = self.task.config.data
        on_main(lambda: self.texts.check(self.tokenizer, self.teachers_tokenizer))

        def tokenize(reference: str, fraction: float) -> Corpus:
            make = partial(
                store_corpus,
                reference,
                self.tokenizer,
                field=settings.text.field,
                cache_dir=settings.cache_dir,
                fraction=fraction,
                seed=self.task.config.seed,
            )
            # One process tokenizes, and the others wait for the folder: each mapping the same file costs no memory
            # twice.
            folder = make_once(make)
            return on_every(lambda: open_corpus(folder))

        fraction = settings.text.fraction
        train = {name: tokenize(part, fraction) for name, part in _list_parts(settings).items()}
        valid = None if settings.valid is None else tokenize(settings.valid, 1.0)
        share = "" if fraction == 1 else f"{100 * fraction:.4g} % of it: "
        counts = (f"{name}: {text.report()}" if name else text.report() for name, text in train.items())
        report = "; ".join(counts)
        data = replace(self, train=train, valid=valid)
        if self.task.trains and settings.valid is not None:
            overlap = find_learned_files(settings.train, settings.valid)
            if overlap is not None:
                warn_main(overlap)
        if self.task.trains:
            # Raises UserError if the text is too short, even if the number of steps is given.
            sequences = data._make_train_sequences()
            if isinstance(sequences, MixedSequences):
                report = sequences.report()
        begin = begin_tokens(self.tokenizer) if self.models.causal else []
        spelled = f"; each sequence begins with {self.tokenizer.decode(begin)}" if begin else ""
        return replace(data, report=f"{share}{report}{spelled}")

    def num_steps(self, epochs: int, global_batch_size: int) -> int:
        return -(-epochs * len(self._make_train_sequences()) // global_batch_size)

    def loader(self, share: Share) -> SequenceLoader:
        return SequenceLoader(self._make_train_sequences(), share)

    def teacher_examples(self) -> tuple[Sequence[TextSequence], Callable[[list[TextSequence]], Batch]]:
        """See Task: the sequences of the training text, and those that are validated by the same loss."""
        assert self.train is not None, "the text is not tokenized yet"
        texts = [self._make_sequences(text) for text in self.train.values()]
        parts: list[Any] = [*texts]
        if self.valid is not None:
            valid: Any = self._make_sequences(self.valid)
            # The cache must hold what `validation` reads: only the first valid_sequences.
            parts.append(Subset(valid, range(min(len(valid), self.task.config.data.text.valid_sequences))))
        sequences: Any = ConcatDataset(parts)
        return sequences, texts[0].collate

    def _make_train_sequences(self) -> TextSequences | MixedSequences:
        assert self.train is not None, "the text is not tokenized yet"
        exponent, weights = self.task.config.data.text.sampling_exponent, _read_weights(self.task.config.data)
        try:
            if exponent is None and weights is None:
                return self._make_sequences(self.train[""])
            parts = dict[str, TextSequences]()
            for name, text in self.train.items():
                try:
                    parts[name] = self._make_sequences(text)
                except UserError as error:
                    raise UserError(f"the part {name} of data.train {self.task.config.data.train}: {error}") from error
            return MixedSequences(parts, exponent or 0.0, weights)
        except UserError as error:
            fraction = self.task.config.data.text.fraction
            if fraction == 1:
                raise
            raise UserError(f"of data.text.fraction {fraction}: {error}; or raise the fraction") from error

    def validation(self, share: Share) -> list[Batch]:
        if self.valid is None:
            return []
        return validation_batches(
            self._make_sequences(self.valid),
            limit=self.task.config.data.text.valid_sequences,
            batch_size=share.micro_batch_size,
            rank=share.rank,
            world_size=share.world_size,
        )

    def _make_sequences(self, corpus: Corpus) -> TextSequences:
        settings, masking = self.task.config.data.text, None
        if not self.models.causal:
            masking = Masking.of(self.tokenizer, settings.mask_share, whole_words=settings.whole_words)
        return TextSequences(
            corpus,
            self.tokenizer,
            max_length=self.task.config.data.max_length,
            masking=masking,
            pairs=self.pairs,
            next_sentence=self.next_sentence,
        )

    def results(
        self, summaries: Mapping[str, dict[str, Any]], log: Sequence[Mapping[str, float]], sizes: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """See Task: the validation loss before and after training, None without a validation text; and texts."""
        losses = [row["valid_loss"] for row in log if "valid_loss" in row]
        params = sizes["student_params"]
        entries: dict[str, dict[str, Any]] = {"teacher": {"params": sizes["teacher_params"], "valid_loss": None}}
        # Only the row of step 0 was logged before the first update.
        has_initial_loss = bool(log) and log[0]["step"] == 0
        entries["untrained"] = {"params": params, "valid_loss": losses[0] if has_initial_loss else None}
        if log:
            entries["student"] = {"params": params, "valid_loss": losses[-1] if losses else None}
        return {name: {**result, **summaries.get(name, {})} for name, result in entries.items()}

    def table(self, results: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
        losses = {name: result["valid_loss"] for name, result in results.items()}
        if all(loss is None for loss in losses.values()):
            title = "Perplexity" if self.texts.texts else "The method's loss"
            empty = ScoreTable(title=title, columns=[], rows={name: [] for name in results}, legend="")
            return self.texts.add_columns(empty, results)
        table = ScoreTable(
            title="The method's loss on the validation text",
            columns=["validation loss"],
            rows={name: ["" if loss is None else f"{loss:.4f}"] for name, loss in losses.items()},
            legend=(
                "The validation loss is the method's own, so it says how far the student came and nothing between "
                "methods."
            ),
        )
        return self.texts.add_columns(table, results)


def _list_parts(settings: DataConfig) -> dict[str, str]:
    """Return the references of the parts of the training text by name; a text that is not sampled is one part "".

    Parts are sampled by their weights or by `sampling_exponent`.

    Raises:
        UserError: the training text is no folder, or has no part.
    """
    exponent = settings.text.sampling_exponent
    if exponent is None and _read_weights(settings) is not None:
        return {part.reference: part.reference for part in parts_of(settings.train)}
    if exponent is None:
        return {"": settings.train}
    folder = Path(settings.train)
    paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")] if folder.is_dir() else []
    parts = {path.stem: str(path) for path in paths}
    if len(parts) < max(2, len(paths)):
        why = "has two parts of one name" if len(parts) > 1 else f"has {len(parts)} parts"
        raise UserError(
            f"data.text.sampling_exponent is {exponent}, but data.train {settings.train} "
            f"{why if folder.is_dir() else 'is no folder'}: give a folder with a file or folder for each language, or "
            "leave the exponent out"
        )
    return parts


def _read_weights(settings: DataConfig) -> list[float] | None:
    """Return the weights of the parts of data.train, None if it has none."""
    weights = [part.weight for part in parts_of(settings.train) if part.weight is not None]
    return weights or None


def score_masked(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Data, *, max_length: int, batch_size: int
) -> dict[str, float]:
    """Return an encoder's mean cross-entropy in nats over all masked tokens, its exponential, and their number.

    The text is split into sequences of up to max_length tokens, or of as many as the model has positions.

    Raises:
        UserError: the text cannot be read or is too short.
    """
    max_length = max_positions(model.config, max_length)
    sums, count = list[Tensor](), 0
    with tempfile.TemporaryDirectory() as folder, label_loss(model, shift=False) as loss_of:
        reference = data if isinstance(data, str | Path) else write_rows(data, Path(folder))
        # Through the same store as training, so that masking and cutting are the same code; it lives as long as the
        # block.
        corpus = open_corpus(store_corpus(reference, tokenizer, cache_dir=folder))
        sequences = TextSequences(corpus, tokenizer, max_length=max_length, masking=Masking.of(tokenizer))
        for batch in validation_batches(sequences, limit=sys.maxsize, batch_size=batch_size):
            loss_sum, labels = loss_of(batch)
            sums.append(loss_sum)
            count += labels
    loss = sum(torch.stack(sums).tolist()) / count
    return {"loss": loss, "perplexity": perplexity_of(loss), "tokens": count}
