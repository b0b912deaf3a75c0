"""Compares the token loss of a model, with our masks and through its LM head's last linear, with the model's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import IGNORE_INDEX, Batch, HeadInputs
from llmdistill.step.forward import TappedModel

_MOST_TOKENS = 1024
"""Tokens of the batch that are compared: the model's own logits are all in memory at once."""
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
"""The largest difference of two losses, as a share of the model's own; other masks take other kernels, which round."""


@dataclass(frozen=True, kw_only=True)
class OwnLoss:
    """The mean loss of a token, computed in several ways; NaN for a pass that is not possible."""

    own: float
    """By the model's own masks and logits."""
    ours: float
    """By llmdistill: with our masks, and from the inputs of the LM head if the head is plain."""
    of_product: float
    """With the output of the LM head's last linear as the logits; NaN if it does not run once."""
    has_plain_head: bool
    """Whether the logits are the output of the LM head's last linear, bit by bit, or its `LogitScale`, on all ranks."""
    tolerance: float
    """How far `ours` may be from `own`, as a share of it or, of a loss below 1, in nats."""

    @property
    def is_ours(self) -> bool:
        """Whether llmdistill computes the loss that the model computes."""
        if not math.isfinite(self.own):
            return True  # the weights are broken; the check for finite losses reports it
        return abs(self.ours - self.own) <= self.tolerance * max(1.0, self.own)


@torch.no_grad()
def measure_own_loss(
    tapped: TappedModel, batch: Batch, reduce: Callable[[Tensor], object] = lambda sums: None
) -> OwnLoss:
    """Compute the loss as the model does and as llmdistill does, on the first half of a batch's rows.

    These are cut to about 1,024 tokens. The loss is the cross-entropy of the labels, or of all
    tokens if the rows have no label. The head must be plain bit by bit: a softcap hardly changes the small logits of an
    untrained model.

    Args:
        tapped: a model with an LM head, in evaluation mode; its modes are as before afterwards. All ranks of a sharded
            model must call this function.
        batch: on the device of the model.
        reduce: sums a tensor over the ranks in place, so that they decide alike.
    """
    sample = _cut_sample(batch, shift=tapped.shift)
    rows_N, labels_N = sample.flat_positions("labels"), sample.row_labels(shift=tapped.shift)

    def loss(logits_BTV: Tensor) -> Tensor:
        return _sum_losses(logits_BTV.flatten(0, 1).index_select(0, rows_N), labels_N)

    with tapped.modes(shortcut=False, makes_mask=True):
        logits, outputs = tapped.compute_own_logits(sample)
    own = loss(logits)
    ours = of_product = torch.full_like(own, torch.nan)
    is_plain = False
    if len(outputs) == 1 and outputs[0].shape == logits.shape:
        of_product = loss(outputs[0])
        # Some models cast the product to fp32 behind the linear, which is no other loss.
        cast, scale = logits.to(outputs[0].dtype), tapped.logit_scale
        if scale.is_plain:
            is_plain = torch.equal(outputs[0], cast)
        else:  # the model rounds up to three times on the way
            exact = torch.promote_types(cast.dtype, torch.float32)
            scaled, precision = scale.apply_(outputs[0].to(exact, copy=True)), 4 * torch.finfo(cast.dtype).eps
            is_plain = torch.allclose(scaled.to(cast.dtype), cast, rtol=precision, atol=0)
    with tapped.modes(shortcut=is_plain, makes_mask=tapped.makes_mask):
        if is_plain:
            sums_of_head: list[Tensor] = []

            def add_sum(head: HeadInputs) -> Tensor:
                assert head.weight is not None
                outputs_NV = functional.linear(head.rows.to(head.weight.dtype), head.weight, head.bias)
                exact = torch.promote_types(outputs_NV.dtype, torch.float32)
                sums_of_head.append(_sum_losses(head.scale.apply_(outputs_NV.to(exact)), labels_N))
                return sums_of_head[0]

            try:
                tapped.run_through_head(sample, add_sum)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                # What an unknown model does around its head may need logits of the usual shape. All ranks fail alike.
                if isinstance(error, torch.OutOfMemoryError):
                    raise
            ours = sums_of_head[0] if sums_of_head else ours
        else:  # nothing else differs if the mask is the model's own
            ours = own if tapped.makes_mask else loss(tapped.compute_own_logits(sample)[0])
    # The last number counts the ranks on which the head is not plain.
    sums = torch.stack([own, ours, of_product, own.new_tensor(len(labels_N)), own.new_tensor(not is_plain)])
    reduce(sums)
    # The sums were reduced over the ranks, so that all ranks compare the same numbers.
    mean_own, mean_ours, mean_of_product = (sums[:3] / sums[3]).tolist()
    return OwnLoss(
        own=mean_own,
        ours=mean_ours,
        of_product=mean_of_product,
        has_plain_head=float(sums[4]) == 0,
        tolerance=_TOLERANCES.get(tapped.model.dtype, 3e-2),  # 3e-2 for types of 16 bits
    )


def _cut_sample(batch: Batch, *, shift: bool) -> Batch:
    """Cut out the first rows of a batch, and of packed rows the first sequence."""
    count = max(1, min((len(batch.input_ids) + 1) // 2, _MOST_TOKENS // max(1, batch.input_ids.shape[1])))
    mask = (batch.attention_mask[:count] == 1).long()  # packed rows number their sequences from 1
    real = mask.any(0).nonzero()
    columns = slice(0, min(int(real[-1]) + 1, _MOST_TOKENS) if len(real) else 1)
    ids, mask = batch.input_ids[:count, columns], mask[:, columns]
    labels = batch.labels[:count, columns].masked_fill(mask == 0, IGNORE_INDEX)
    # The cut may have lost the answer with all of its labels.
    if not (labels[:, 1:] != IGNORE_INDEX).any():
        labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels = labels.clone()
    labels[:, 0] = IGNORE_INDEX  # no token before it predicts it
    types = None if batch.token_type_ids is None else batch.token_type_ids[:count, columns]
    return Batch(ids, mask, labels, token_type_ids=types).with_positions(shift=shift)


def _sum_losses(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    return functional.cross_entropy(logits_NV.float(), labels_N, reduction="sum").double()
