"""Perplexity of a decoder on a whole text, window by window, as papers on compression report it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.config import GenerationConfig, RunConfig
from llmdistill.data.begin import begin_tokens
from llmdistill.data.corpus import find_words
from llmdistill.data.sources import Data, kind_of
from llmdistill.data.whole_text import WholeText
from llmdistill.errors import UserError
from llmdistill.fingerprints import fingerprint
from llmdistill.models.families import is_causal, max_positions
from llmdistill.models.unembedded import check_token_ids
from llmdistill.progress import progress
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.tasks.base import Models, ScoredModel, ScoreTable
from llmdistill.tasks.instruction_sets import TEXTS
from llmdistill.tasks.perplexity import perplexity_of, show_perplexity
from llmdistill.tasks.reference_loss import label_loss

USUAL_WINDOW = 2048
"""Tokens of a window in the papers on SVD, unless the model has fewer positions."""
_BATCH_TOKENS = {"cpu": 1024}
"""Tokens of a batch, of one window at least; 8,192 on other devices. A CPU is as fast with fewer, and its bar moves."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of a tokenized text, each of the same number of tokens; what is left at the end is dropped."""

    tokens: Sequence[int]
    """The text, without the tokens that begin it."""
    window: int
    """Tokens of a window, those that begin it included."""
    stride: int
    """Tokens of the text from the start of a window to the start of the next one. Only the last `stride` tokens of a
    window are scored, in the first window all; the others are context, which an earlier window scored. The first token
    of a window without a begin token is predicted by nothing, and is never scored."""
    total: int
    """The number of whole windows of the text."""
    count: int
    """The number of windows that are scored, the first ones."""
    begin: Sequence[int] = ()
    """The tokens before the text in each window, see `begin_tokens`; they are not scored."""
    begin_text: str = ""

    def collate(self, numbers: Sequence[int]) -> Batch:
        """Return some windows as a batch (B, T) with labels at the tokens that are scored."""
        room = self.window - len(self.begin)
        starts = [number * self.stride for number in numbers]
        ids = torch.tensor([[*self.begin, *self.tokens[start : start + room]] for start in starts])
        labels = ids.clone()  # not shifted: each label is predicted by the position before it
        for row, number in enumerate(numbers):
            labels[row, : max(1, len(self.begin)) if number == 0 else self.window - self.stride] = IGNORE_INDEX
        return Batch(ids, torch.ones_like(ids), labels)


@dataclass(frozen=True)
class WindowSizes:
    """How a text is to be cut into windows."""

    window: int | None = None
    """Tokens of a window; None: USUAL_WINDOW, or the model's positions if these are fewer."""
    stride: int | None = None
    """Tokens from window to window, at most the text's tokens in a window; None: so that no two windows overlap."""
    limit: int | None = None
    """Score only so many windows, the first ones."""
    shorten: bool = False
    """Whether a shorter text is one window of its own length."""

    @classmethod
    def of(cls, settings: GenerationConfig) -> WindowSizes:
        return cls(settings.window, settings.stride, settings.limit)


def cut_windows(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    sizes: WindowSizes,
    *,
    name: str,
    data: Data | None = None,
) -> Windows:
    """Tokenize a text in one piece, and cut it into windows that all begin as the tokenizer begins a text.

    `name` is the text's name in messages, and `data` is where it was read.

    Raises:
        UserError: the model is no decoder, it has fewer positions than a window has tokens, the stride is larger than
            the window, the window has no room for the text, or the text is shorter than one window.
    """
    if not is_causal(config):
        raise UserError(
            f"{name} is a text, but {config.model_type} is an encoder, which has no perplexity: take a decoder"
        )
    window, stride = sizes.window, sizes.stride
    length = max_positions(config, USUAL_WINDOW if window is None else window)
    if window is not None and length < window:
        raise UserError(f"window is {window}, but {config.model_type} has positions for {length}; give that or less")
    if stride is not None and stride > length:
        raise UserError(f"stride is {stride}, but a window has {length} tokens: give that or less")
    begin = begin_tokens(tokenizer)
    # `verbose` would warn that the text is longer than the model; it is cut into windows below.
    tokens = tokenizer(text, return_attention_mask=False, return_token_type_ids=False, verbose=False)["input_ids"]
    check_token_ids(tokenizer, [tokens], lambda _, token: name if data is None else find_words(token, data))
    # Each window gets the begin tokens of its own, in `collate`.
    tokens = tokens[len(begin) :] if tokens[: len(begin)] == begin else tokens
    least = len(begin) + (1 if begin else 2)  # with one token to predict
    most = max(least, len(begin) + len(tokens))
    length = min(length, most) if sizes.shorten else length
    room = length - len(begin)
    if length < least:
        raise UserError(f"window is {length}, but {len(begin)} of its tokens begin the text: give {least} or more")
    if len(tokens) < room:
        raise UserError(
            f"{name} has {len(tokens):,} tokens, fewer than a window of {length:,}; give a longer text, or window "
            f"{most} or less"
        )
    step = room if stride is None else min(stride, room)
    total = (len(tokens) - room) // step + 1
    count = total if sizes.limit is None else min(sizes.limit, total)
    return Windows(
        tokens=tokens,
        window=length,
        stride=step,
        total=total,
        count=count,
        begin=begin,
        begin_text=str(tokenizer.decode(begin)) if begin else "",
    )


def score_windows(
    model: PreTrainedModel,
    windows: Windows,
    *,
    batch_size: int,
    name: str = "the text",
) -> dict[str, Any]:
    """Return the perplexity of a decoder in evaluation mode on the windows of a text.

    The ranks share the windows, and every rank must call this function; the result does not depend on their number. A
    forward pass reads at most batch_size windows and about 8,192 tokens (1,024 on a CPU); the bar shows `name`.

    Returns:
        ``{"loss": nats per token, "perplexity": its exponential, "tokens": those that are scored, "windows": those that
        are scored, "total": windows of the text, "window", "stride", "begin": what each window begins with}``.
    """
    world = World.current()
    size = max(1, min(batch_size, _BATCH_TOKENS.get(world.device.type, 8192) // windows.window))
    parts = [range(start, min(start + size, windows.count)) for start in range(0, windows.count, size)]
    # A row for each part; those of other ranks stay 0.
    sums = torch.zeros(len(parts), 2, dtype=torch.float64, device=world.device)
    rounds = progress(
        range(0, len(parts), world.size), f"Perplexity on {name}", "windows" if size == 1 else "batches of windows"
    )
    with label_loss(model, shift=True) as loss_of:
        for first in rounds:
            # A sharded model needs all ranks in each pass: a rank without a part of its own repeats the first one.
            number = first + world.rank
            part = parts[number if number < len(parts) else 0]
            loss_sum, count = loss_of(windows.collate(part))
            if number < len(parts):
                sums[number, 0], sums[number, 1] = loss_sum, count
    sums = all_reduce_sum(sums).cpu()
    # Summed in one order, and exactly, so that the ranks leave no trace in the last digits.
    tokens = int(sums[:, 1].sum())
    loss = math.fsum(sums[:, 0].tolist()) / tokens
    return {
        "loss": loss,
        "perplexity": perplexity_of(loss),
        "tokens": tokens,
        "windows": windows.count,
        "total": windows.total,
        "window": windows.window,
        "stride": windows.stride,
        "begin": windows.begin_text,
    }


def read_windows(
    texts: Mapping[str, WholeText],
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    settings: GenerationConfig,
) -> dict[str, Windows]:
    """Read texts and cut them into windows, as the settings say; see `WholeText.read` and `cut_windows`."""
    sizes = WindowSizes.of(settings)
    return {
        name: cut_windows(text.read(), tokenizer, config, sizes, name=name, data=text.data)
        for name, text in texts.items()
    }


def find_text_tests(tests: Mapping[str, str]) -> dict[str, WholeText]:
    """Return the texts among the test sets of a run: .txt files, and those named as in TEXTS, with their protocol."""
    return {
        name: WholeText(reference, lines=name in TEXTS)
        for name, reference in tests.items()
        if name in TEXTS or kind_of(reference) == "text"
    }


def check_texts(texts: Mapping[str, WholeText]) -> None:
    """Read the texts in files; raise a UserError as `WholeText.read` does."""
    for text in texts.values():
        if kind_of(str(text.data)) == "text":
            text.read()


@dataclass(frozen=True, kw_only=True)
class TextTests:
    """The texts among the test sets of a run, which all its models read in the same windows."""

    texts: Mapping[str, WholeText]
    settings: GenerationConfig
    models: Models
    begins: Sequence[Sequence[int]] = ()
    """The `begin_tokens` of student and teacher."""

    @classmethod
    def of(cls, config: RunConfig, models: Models, tokenizers: Sequence[PreTrainedTokenizerBase]) -> TextTests:
        """Choose the windows: as the settings say, else the usual ones, or those that all models have positions for.

        The tokenizers are those of student and teacher.
        """
        usual = min(max_positions(model, USUAL_WINDOW) for model in (models.teacher, models.student))
        settings = replace(config.scoring, window=config.scoring.window or usual)
        begins = [begin_tokens(tokenizer) for tokenizer in tokenizers]
        return cls(texts=find_text_tests(config.data.tests), settings=settings, models=models, begins=begins)

    def check(self, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
        """Raise a UserError for a text or windows that a model cannot read; see `cut_windows`."""
        read_windows(self.texts, student, self.models.student, self.settings)
        read_windows(self.texts, teacher, self.models.teacher, self.settings)

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        settings: dict[str, Any] = {key: getattr(self.settings, key) for key in ("window", "stride", "limit")}
        # Scores of older versions, whose windows did not begin with these tokens, must not be reused.
        if any(self.begins):
            settings["begin"] = self.begins
        return {
            name: {"reference": fingerprint(str(text.data)), "lines": text.lines, **settings}
            for name, text in self.texts.items()
        }

    def score(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        windows = read_windows({name: self.texts[name]}, scored.tokenizer, scored.model.config, self.settings)[name]
        return score_windows(scored.model, windows, batch_size=self.settings.batch_size, name=name)

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the texts' part of `TaskData.summary`: ``{"texts": {NAME: as score_windows}}``, or nothing."""
        return {"texts": {name: dict(scores[name]) for name in self.texts}} if self.texts else {}

    def sentence(self, summary: Mapping[str, Any]) -> str:
        """Return the texts' part of `TaskData.sentence`."""
        texts = summary.get("texts", {})
        return "  ".join(f"{name} {show_perplexity(score['perplexity'])}" for name, score in texts.items())

    def add_columns(self, table: ScoreTable, results: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
        """Return a table with a column for each text."""
        if not self.texts:
            return table
        scores_by_model = {name: result.get("texts", {}) for name, result in results.items()}
        rows = {
            name: [
                *row,
                *(show_perplexity(scores_by_model[name].get(text, {}).get("perplexity")) for text in self.texts),
            ]
            for name, row in table.rows.items()
        }
        read: Mapping[str, Any] = next(filter(None, scores_by_model.values()), {})
        counts = (f"{name} {score['windows']:,} of {score['total']:,}" for name, score in read.items())
        stride = "" if self.settings.stride is None else f", {self.settings.stride:,} from one to the next"
        scores = [score for by_text in scores_by_model.values() for score in by_text.values()]
        begin = " or ".join(dict.fromkeys(score["begin"] for score in scores if score.get("begin")))
        legend = (
            f"Perplexity of texts (lower is better): windows of {self.settings.window:,} tokens{stride}"
            f"{begin and f', each begins with {begin}'}; scored: {', '.join(counts)}."
        )
        return replace(
            table,
            columns=[*table.columns, *(f"{name} perplexity" for name in self.texts)],
            rows=rows,
            legend=f"{table.legend} {legend}".strip(),
        )
