"""The outputs of a teacher as rows of single examples, and back as the outputs for any batch of these examples.

The rows of an example do not depend on the batch, its padding, or the row in which the example is packed. The names of
the tensors begin with the positions to which their rows belong:

    labels.states, tokens.states        (N, K), inputs of the last linear of the LM head, or these / scale in int8
    labels.scale, tokens.scale          (N,) fp32, the scale of each row of states in int8
    labels.top, tokens.top              (N, k) int32, the most likely tokens
    labels.log_probs, tokens.log_probs  (N, k), their log-probabilities
    labels.tail.2.0, tokens.tail.2.0    (N,), the log-mass of the rest at temperature 2
    sequences.logits                    (B, C), one row an example
    query.3, hidden.5, ...              (N, H, D) or (N, W), a tap at all real tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import POSITIONS, Batch, HeadInputs, Outputs, Positions, TapRequest, Taps, TopK
from llmdistill.losses.head import cut
from llmdistill.losses.other_tokens import exact_logits
from llmdistill.losses.top_k import most_likely
from llmdistill.step.method import Method

_CHUNK = 256
"""Rows whose logits are computed at a time to find the most likely tokens."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The outputs of a teacher that are needed, whatever the batch."""

    positions: tuple[Positions, ...]
    """The kinds of positions at which the distributions over tokens are compared."""
    temperatures: tuple[float, ...]
    """The temperatures at which they are compared, in ascending order."""
    taps: TapRequest
    """The inner tensors."""
    sequences: bool
    """Whether the output of a classifier is needed."""

    @classmethod
    def of(cls, method: Method) -> Request:
        """Return what a method asks of its teacher."""
        temperatures = {float(term.temperature) for term in method.token_terms if term.divergence is not None}
        return cls(
            positions=method.teacher_positions,
            temperatures=tuple(sorted(temperatures)),
            taps=method.teacher_taps,
            sequences=any(term.needs_teacher for term in method.sequence_terms),
        )

    def record(self) -> dict[str, Any]:
        """Return the request as plain JSON values."""
        return {
            "positions": list(self.positions),
            "temperatures": list(self.temperatures),
            "taps": {aspect: sorted(layers) for aspect, layers in sorted(self.taps.items()) if layers},
            "sequences": self.sequences,
        }

    def find_missing(self, held: Mapping[str, Any]) -> str | None:
        """Return the first thing that this request needs and a cache does not hold, as words; None if it has all.

        `held` is the record of the cache: that of its request, with `top_k` (None if the cache holds hidden states).
        """
        for place in self.positions:
            if place not in held["positions"]:
                return f"the distributions at {place}"
        for temperature in self.temperatures:
            # Hidden states give the distribution at any temperature.
            if held["top_k"] is not None and temperature not in held["temperatures"]:
                return f"the mass of the rest at temperature {temperature:g}"
        for aspect, layers in self.taps.items():
            for layer in sorted(layers.difference(held["taps"].get(aspect, ()))):
                # Users count layers from 1.
                return "the embedding" if aspect == "embedding" else f"the {aspect} of layer {layer + 1}"
        return "the output of the classifier" if self.sequences and not held["sequences"] else None


def row_positions(name: str) -> Positions:
    """Return the positions to which the rows of a kept tensor belong, from its name in `teachers.output_rows`."""
    first = name.partition(".")[0]
    return next((place for place in POSITIONS if place == first), "tokens")


def to_rows(
    outputs: Outputs,
    batch: Batch,
    request: Request,
    *,
    top_k: int | None,
    vocabulary: int | None,
    in_8_bits: bool = False,
) -> dict[str, Tensor]:
    """Return the rows of all examples of a batch, one after the other in the order of its `sample_ids`.

    Args:
        outputs: what `TappedModel.compute_targets` returned for the batch.
        batch: with `label_positions`, on any device, where the rows are too.
        request: the outputs to store.
        top_k: number of most likely tokens to keep; None keeps hidden states.
        vocabulary: the first tokens, which are compared; None compares all.
        in_8_bits: whether hidden states are rounded to int8, with a scale for each row.
    """
    rows: dict[str, Tensor] = {}
    for place in request.positions:
        head = outputs.lm_head[place]
        assert isinstance(head, HeadInputs), "a cache is made from a live teacher"
        if top_k is None:
            assert head.weight is not None, "hidden states need the head"
            rows |= round_states(head.rows, place) if in_8_bits else {f"{place}.states": head.rows}
            continue
        head = cut(head, vocabulary)
        parts = [
            most_likely(exact_logits(head._replace(rows=rows_nK), slice(None)), top_k, request.temperatures)
            for rows_nK in head.rows.split(_CHUNK)
        ]
        top = TopK(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.log_probs for part in parts]),
            {t: torch.cat([part.rest[t] for part in parts]) for t in request.temperatures},
        )
        rows |= top_rows(top, place)
    for aspect, layers in request.taps.items():
        for layer in layers:
            tensor = getattr(outputs.taps, aspect)[layer]
            by_token = tensor.transpose(1, 2) if tensor.dim() == 4 else tensor  # (B, T, H, D) or (B, T, W)
            rows[f"{aspect}.{layer}"] = by_token.flatten(0, 1).index_select(0, batch.flat_positions("tokens"))
    if request.sequences:
        assert outputs.sequence_logits is not None, "the teacher has no head for sequences"
        rows["sequences.logits"] = outputs.sequence_logits
    return rows


def round_states(rows_NK: Tensor, place: Positions) -> dict[str, Tensor]:
    """Return rows in int8, the largest of each as 127, and their scales."""
    exact_NK = rows_NK.float()
    scale_N = exact_NK.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return {f"{place}.states": (exact_NK / scale_N[:, None]).round_().to(torch.int8), f"{place}.scale": scale_N}


def top_rows(top: TopK, place: Positions) -> dict[str, Tensor]:
    """Return the rows of the most likely tokens at positions of one kind."""
    # Half the bytes of int64 on the disk.
    rows = {f"{place}.top": top.tokens.int(), f"{place}.log_probs": top.log_probs}
    return rows | {f"{place}.tail.{temperature}": mass for temperature, mass in top.rest.items()}


def rows_of_samples(batch: Batch, place: Positions) -> Tensor:
    """The number of rows of each example of a batch, in the order of its `sample_ids`: (examples,), on the CPU.

    The batch has `label_positions` and is on the CPU.
    """
    sizes = torch.tensor([len(ids) for ids in batch.sample_ids])
    if place == "sequences":
        return torch.ones_like(sizes)
    before_B = sizes.cumsum(0) - sizes
    # The mask has the number, from 1, of a token's example in its row.
    sample_BT = before_B[:, None] + batch.attention_mask - 1
    return torch.bincount(sample_BT.flatten()[batch.flat_positions(place)], minlength=int(sizes.sum()))


def to_outputs(
    read: Callable[[str], Tensor],
    batch: Batch,
    request: Request,
    *,
    top_k: int | None,
    head: HeadInputs | None,
    scaling: Mapping[int, float],
) -> Outputs:
    """Return a teacher's outputs for a batch from the rows of its examples, as `TappedModel.compute_targets` does.

    Taps are 0 at padding, which no loss looks at.

    Args:
        read: returns the rows of the batch's examples of the tensor with this name, on the batch's device.
        batch: with `label_positions`.
        request: the outputs that the method needs.
        top_k: the number of most likely tokens in the cache; None if it has hidden states.
        head: weight and bias of the LM head, for hidden states.
        scaling: `Taps.scaling`.
    """
    taps = Taps(mask=batch.mask, scaling=dict(scaling))
    for aspect, layers in request.taps.items():
        for layer in layers:
            # A tap at all real tokens, (N, H, D) or (N, W), becomes (B, H, T, D) or (B, T, W).
            rows, places = read(f"{aspect}.{layer}"), batch.attention_mask.shape
            flat = rows.new_zeros(places.numel(), *rows.shape[1:]).index_copy_(0, batch.flat_positions("tokens"), rows)
            whole = flat.view(*places, *rows.shape[1:])
            getattr(taps, aspect)[layer] = whole.transpose(1, 2) if whole.dim() == 4 else whole
    lm_head: dict[Positions, HeadInputs | TopK] = {}
    for place in request.positions:
        if top_k is None:
            assert head is not None, "hidden states need the head"
            states_NK = read(f"{place}.states")
            if states_NK.dtype == torch.int8:
                assert head.weight is not None, "a cache has the head of its hidden states"
                states_NK = (states_NK * read(f"{place}.scale")[:, None]).to(head.weight.dtype)
            lm_head[place] = head._replace(rows=states_NK)
        else:
            rest = {t: read(f"{place}.tail.{t}") for t in request.temperatures}
            lm_head[place] = TopK(read(f"{place}.top").long(), read(f"{place}.log_probs"), rest)
    sequences = read("sequences.logits") if request.sequences else None
    return Outputs(logits=None, taps=taps, lm_head=lm_head, sequence_logits=sequences)
