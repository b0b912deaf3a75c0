"""Cross-entropy of labels under a model, and the perplexity of the references of instructions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch, HeadInputs
from llmdistill.data.collate import collate
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.sampler import scoring_batches
from llmdistill.losses.head import token_losses
from llmdistill.losses.terms import TokenTerm
from llmdistill.progress import progress
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.step.forward import TappedModel
from llmdistill.step.taps import Recorder
from llmdistill.tasks.perplexity import perplexity_of

_LOGITS = 2**27
"""Largest number of logits of a batch, half a GiB in fp32; a batch has one example at least."""


@contextmanager
def label_loss(model: PreTrainedModel, *, shift: bool) -> Iterator[Callable[[Batch], tuple[Tensor, int]]]:
    """Yield a function that returns the sum of the cross-entropy in nats over a batch's labels, and their number.

    The sum stays on the model's device, so that the host prepares the next batch while the device computes.

    Only the logits of some rows exist at a time, unless the architecture is an unknown one, which may change them after
    the last linear of the LM head. shift: each position predicts the next label (decoders).
    """
    # With the attention mask of a step: transformers' own code would read the values of a mask in each batch.
    tapped = TappedModel(model, Recorder(model, {}))
    assert tapped.shift == shift, "the labels are those of this model"

    @torch.no_grad()
    def loss_of(batch: Batch) -> tuple[Tensor, int]:
        located = batch.with_positions(shift=shift).to(model.device)
        labels_N, sums = located.row_labels(shift=shift), list[Tensor]()

        def sum_losses(inner: HeadInputs) -> None:
            weight = torch.ones(1, device=inner.rows.device)
            sums.append(token_losses(inner, None, labels_N, [TokenTerm("labels", None)], weight).sums)

        tapped.inspect_head(located, sum_losses)
        return sums[0].reshape(()), len(labels_N)

    try:
        yield loss_of
    finally:
        tapped.remove()


def score_references(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    limits: Limits,
    *,
    batch_size: int,
) -> dict[str, Any]:
    """Return how well a decoder predicts the first reference of each example, its end token included.

    The ranks share the examples, and every rank must call this function. The tokens are those of the given tokenizer,
    so that models with different tokenizers cannot be compared.

    Returns:
        ``{"reference_loss": nats per token, "perplexity": its exponential, "reference_tokens"}``; nothing for a model
        whose loss is not finite, for a tokenizer without an end token, or without examples.
    """
    world = World.current()
    if tokenizer.eos_token_id is None:
        return {}
    # Padding is masked, so that any token will do for a tokenizer without one of its own.
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    vocabulary = model.config.get_text_config().vocab_size
    batches = scoring_batches(
        encode(examples, tokenizer, replace(limits, turns="last")).items,  # earlier answers are no references
        partial(collate, pad_token_id=padding),
        batch_size=max(1, min(batch_size, _LOGITS // (limits.max_length * vocabulary))),
        rank=world.rank,
        world_size=world.size,
    )
    with label_loss(model, shift=True) as loss_of:
        pairs = [loss_of(batch) for _, batch in progress(batches, "Perplexity of the references", "batches")]
    # fsum rounds once, so that the order of the batches leaves no trace.
    losses = torch.stack([loss for loss, _ in pairs]).tolist() if pairs else []
    sums = [math.fsum(losses), sum(number for _, number in pairs)]
    total, count = all_reduce_sum(torch.tensor(sums, dtype=torch.float64, device=world.device)).tolist()
    loss = total / count if count else math.nan
    if not math.isfinite(loss):
        return {}
    return {"reference_loss": loss, "perplexity": perplexity_of(loss), "reference_tokens": int(count)}
