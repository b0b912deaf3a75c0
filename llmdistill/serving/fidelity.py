"""Compares an exported model with the model that it was made of, on a few texts, in words that a user of it needs.

Greedy answers that change matter more than the largest difference of a logit, which depends on the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.data.collate import collate
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.pairs import read_sentences
from llmdistill.data.prompts import resolve_prompt
from llmdistill.data.sources import kind_of, read_examples
from llmdistill.data.whole_text import WholeText
from llmdistill.errors import UserError
from llmdistill.messages import logger
from llmdistill.models.configs import load_config
from llmdistill.models.families import is_causal, max_positions
from llmdistill.models.tokenizer import has_tokenizer, load_tokenizer
from llmdistill.progress import progress
from llmdistill.tasks.perplexity import perplexity_of, show_perplexity
from llmdistill.tasks.text_windows import WindowSizes, cut_windows

DEFAULT_DATA = "embedded:seen"
"""What is compared on unless the user gives rows of his own; every tokenizer has tokens for these English texts."""
_ROWS, _TOKENS = 48, 128
"""The most rows, and tokens of a row, that are compared."""
_STORED = 2**28
"""Numbers of outputs that are kept for the comparison: 1 GiB in fp32, however large the vocabulary is."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows that both models read, a batch of one row each."""

    name: str
    batches: Sequence[Batch]
    labeled: bool
    """Whether the tokens that follow are answers or a text, which have a perplexity."""


def read_rows(folder: Path | str, data: str | None = None) -> Rows:
    """Return a few rows of `data` in the tokens of a model's folder: answers or texts for a decoder, and sentences for
    an encoder.

    Without `data` they are rows of this package, or random tokens for a folder without a tokenizer.

    Raises:
        UserError: the data cannot be read, or the folder has no tokenizer for them.
    """
    config = load_config(folder)
    length = max_positions(config.get_text_config(), _TOKENS)
    if data is None and Path(folder).is_dir() and not has_tokenizer(Path(folder)):
        return _random_rows(config.get_text_config().vocab_size, length)
    reference = DEFAULT_DATA if data is None else data
    try:
        tokenizer, batches = load_tokenizer(folder), list[Batch]()
        if is_causal(config) and kind_of(reference) == "text":
            sizes = WindowSizes(window=length, limit=_ROWS, shorten=True)
            text = WholeText(reference).read()
            windows = cut_windows(text, tokenizer, config, sizes, name=reference, data=reference)
            batches = [windows.collate([number]) for number in range(windows.count)]
        elif is_causal(config):
            limits = Limits(
                max_prompt_length=max(1, length * 3 // 4),
                max_length=length,
                long_prompts="truncate",
                prompt=resolve_prompt(None, [tokenizer]),
            )
            padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
            items = encode(read_examples(reference)[:_ROWS], tokenizer, limits).items
            batches = [collate([item], pad_token_id=padding) for item in items]
        else:
            own = [example.instruction for example in read_examples(DEFAULT_DATA)] if data is None else []
            for text in (own if data is None else read_sentences(data))[:_ROWS]:
                ids = torch.tensor([tokenizer(text, truncation=True, max_length=length)["input_ids"]])
                batches.append(Batch(ids, torch.ones_like(ids), ids.clone()))
    except UserError:
        if data is not None:
            raise
        return _random_rows(config.get_text_config().vocab_size, length)
    return Rows(name=reference, batches=batches, labeled=is_causal(config))


def _random_rows(vocabulary: int, length: int) -> Rows:
    ids = torch.randint(vocabulary, (2, max(length // 2, 1)), generator=torch.Generator().manual_seed(0))
    batches = [Batch(row, torch.ones_like(row), row.clone()) for row in ids[:, None]]
    return Rows(name="random tokens", batches=batches, labeled=False)


Run = Callable[[Batch], Tensor]
"""What computes the first output of a model (logits, or last hidden states) for a batch."""


def runs(model: PreTrainedModel) -> Run:
    """Return what runs a model of transformers, in evaluation mode."""
    model.eval()

    @torch.no_grad()
    def run(batch: Batch) -> Tensor:
        outputs: Any = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        return outputs[0]

    return run


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a model computes on rows, at the positions that are compared."""

    rows: Sequence[Tensor]
    """For each row the logits (N, V) or (1, C), or the hidden states (N, W), in fp32 at least."""
    labels: Sequence[Tensor] | None
    """For each row of a decoder the tokens (N,) that follow."""
    kind: str
    """What a position chooses: greedy tokens, tokens, classes; or states, which choose nothing."""


def outputs_of(model: PreTrainedModel, rows: Rows, run: Run | None = None) -> Outputs:
    """Return the outputs of a model on rows; `run` stands for another program that has the same outputs."""
    compute = runs(model) if run is None else run
    config, head = model.config, model.base_model is not model
    causal = is_causal(config)
    kept, labels, stored = list[Tensor](), list[Tensor](), 0
    for batch in progress(rows.batches, "Comparing outputs", "rows"):
        output = compute(batch)
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        if output.dim() < 3:  # a class of each sequence, or the place where a span begins
            kept.append(output)
            continue
        located = batch.with_positions(shift=causal)
        positions = located.label_positions if causal and head else None
        kept.append(output[0] if positions is None else output[0].index_select(0, positions))
        if positions is not None:
            labels.append(located.row_labels(shift=causal))
        stored += kept[-1].numel()
        if stored > _STORED:
            break
    has_tokens = bool(labels)
    kind = "greedy tokens" if has_tokens else "states" if not head else "classes" if output.dim() < 3 else "tokens"
    return Outputs(rows=kept, labels=labels if has_tokens else None, kind=kind)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How the outputs of an exported model differ from those of the model that it was made of."""

    rows: str
    kind: str
    positions: int
    """Positions that the other figures speak of: those whose outputs are finite in both models."""
    changed: int
    """Positions whose most likely token or class is another one; 0 for hidden states."""
    not_finite: int
    """Positions where an output of the export is NaN or infinite, and the model's is finite."""
    model_not_finite: int
    """Positions where the model's own outputs are NaN or +inf, or none of them is finite."""
    largest_difference: float
    """Of an output."""
    relative_difference: float
    """Of an output, as a share of the largest output, and of 1 at least."""
    divergence: float | None
    """Kullback-Leibler divergence of the export from the model, in nats per token or class; None for states, and as
    all that follows where no position was compared."""
    mean_difference: float | None
    """Mean difference of the log-probability of a token that follows, or of the most likely one; None for states."""
    most_difference: float | None
    """The largest one of these."""
    least_cosine: float | None
    """The least cosine of a hidden state with that of the model."""
    perplexity: float | None
    """Of the tokens that follow, under the model; None if it is no decoder."""
    exported_perplexity: float | None

    def describe_not_finite(self) -> str:
        """Return where outputs are not finite, as a part of a sentence; empty if they are finite everywhere."""
        total = self.positions + self.not_finite + self.model_not_finite
        parts = [
            f"outputs of {name} are not finite at {count:,} of {total:,} positions"
            for name, count in (("the export", self.not_finite), ("the model itself", self.model_not_finite))
            if count
        ]
        return f"on {self.rows} {' and '.join(parts)}" if parts else ""

    def describe(self) -> str:
        """Return the comparison in words, as a sentence without a full stop."""
        before = self.describe_not_finite()
        if not self.positions:
            return before
        where = f"{before}; of the others" if before else f"on {self.rows}"
        if self.least_cosine is not None:
            return (
                f"{where} the hidden states of {self.positions:,} tokens differ by at most "
                f"{self.relative_difference:.2g} of the largest one, with cosines of at least {self.least_cosine:.5f}"
            )
        assert self.mean_difference is not None
        changes = "changes" if self.changed == 1 else "change"
        kind = {"classes": "most likely classes", "tokens": "most likely tokens"}.get(self.kind, self.kind)
        text = f"{where} {self.changed:,} of {self.positions:,} {kind} {changes}; log-probabilities differ by "
        text += f"{self.mean_difference:.2g} on average and {self.most_difference:.2g} at most, a divergence of "
        text += f"{self.divergence:.2g} nats"
        if self.perplexity is None:
            return text
        own, exported = show_perplexity(self.perplexity), show_perplexity(self.exported_perplexity)
        return f"{text}; perplexity is {exported} after {own}"

    def result(self) -> dict[str, Any]:
        """Return what an export returns of it: largest_difference of an output, and comparison, all figures."""
        figures = {name: value for name, value in asdict(self).items() if value is not None}
        return {"largest_difference": self.largest_difference, "comparison": {"text": self.describe(), **figures}}


def compare(exact: Outputs, exported: Outputs, rows: Rows, *, what: str) -> Comparison:
    """Compare the outputs of an exported model with those of the model that it was made of.

    An output that is NaN or infinite is a warning, which calls the export `what`; its position is left out of the other
    figures.
    """
    positions = changed = broken = own_broken = 0
    difference = largest = divergence = total = most = loss = exported_loss = 0.0
    cosine = 1.0
    for number, (whole, of_export) in enumerate(zip(exact.rows, exported.rows, strict=True)):
        assert of_export.shape == whole.shape, (what, of_export.shape, whole.shape)
        finite = whole.isfinite()  # some models set the logits of unused tokens to -inf
        sound = (whole < math.inf).all(-1) & finite.any(-1)
        both = sound & (of_export < math.inf).all(-1) & (of_export.isfinite() | ~finite).all(-1)
        own_broken += int((~sound).sum())
        broken += int((sound & ~both).sum())
        expected, got, finite = whole[both], of_export[both], finite[both]
        if not len(expected):
            continue
        positions += len(expected)
        difference = max(difference, float((got - expected)[finite].abs().max()))
        largest = max(largest, float(expected[finite].abs().max()))
        if exact.kind == "states":
            cosine = min(cosine, float(functional.cosine_similarity(got, expected, dim=-1).min()))
            continue
        chosen = expected.argmax(-1)
        changed += int((got.argmax(-1) != chosen).sum())
        log_p, log_q = expected.log_softmax(-1), got.log_softmax(-1)
        divergence += float(torch.where(finite, log_p.exp() * (log_p - log_q), 0).sum())
        labels = chosen if exact.labels is None else exact.labels[number][both]
        of_p, of_q = (log.gather(-1, labels[:, None])[:, 0] for log in (log_p, log_q))
        total += float((of_q - of_p).abs().sum())
        most = max(most, float((of_q - of_p).abs().max()))
        loss, exported_loss = loss - float(of_p.sum()), exported_loss - float(of_q.sum())
    has_choice = exact.kind != "states" and positions > 0
    has_tokens = has_choice and exact.labels is not None and rows.labeled
    comparison = Comparison(
        rows=rows.name,
        kind=exact.kind,
        positions=positions,
        changed=changed,
        not_finite=broken,
        model_not_finite=own_broken,
        largest_difference=difference,
        relative_difference=difference / max(1.0, largest),
        divergence=max(0.0, divergence / positions) if has_choice else None,  # rounding may leave it below 0
        mean_difference=total / positions if has_choice else None,
        most_difference=most if has_choice else None,
        least_cosine=cosine if exact.kind == "states" and positions else None,
        perplexity=perplexity_of(loss / positions) if has_tokens else None,
        exported_perplexity=perplexity_of(exported_loss / positions) if has_tokens else None,
    )
    if broken or own_broken:
        remedy = "take another --to, or serve the model itself" if broken else "no export can mend the model"
        logger.warning(f"{what}: {comparison.describe_not_finite()}, and texts that come there get nonsense; {remedy}")
    return comparison
