"""The forward pass that the trainer calls: takes a batch and returns logits and taps, or losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import Batch, HeadInputs, LossSum, Outputs, Taps
from llmdistill.losses.head import TokenLosses, token_losses
from llmdistill.losses.terms import Losses, RunningTerms
from llmdistill.models.families import family_of
from llmdistill.models.heads import LMHead, whole
from llmdistill.models.packing import packed_mask
from llmdistill.models.running import LayerLosses, without_autocast
from llmdistill.models.taps import Recorder


class TappedModel:
    """A forward pass that records inner tensors, or computes losses on them while it runs.

    With DeepSpeed, the forward pass is that of the engine: calling the module directly would bypass the engine's hooks.
    The recorder is installed on the engine's module.
    """

    def __init__(self, forward: Callable[..., Any], recorder: Recorder, *, vocabulary: int | None = None) -> None:
        """`vocabulary` keeps only the first logits, and drops padding rows that the other model does not have."""
        self._forward = forward
        self._recorder = recorder
        self._vocabulary = vocabulary
        self._head = LMHead(recorder.model)
        self._shift = family_of(recorder.model.config).causal

    def __call__(self, batch: Batch) -> Outputs:
        """Run the model on a batch, and compute the logits of every token."""
        with self._recorder.recording():
            result = self._run(batch)
        logits, sequences = self._head_outputs(result)
        return Outputs(
            logits=None if logits is None else logits[..., : self._vocabulary],
            taps=self._recorder.take(),
            sequence_logits=sequences,
        )

    def teach(self, batch: Batch, *, lm_head: bool) -> Outputs:
        """Run the teacher on a batch; returns taps and, if `lm_head`, the LM head's inputs at the rows with labels."""
        batch = batch.with_label_rows(shift=self._shift)
        kept: list[HeadInputs] = []

        def keep(head: HeadInputs) -> Tensor:
            kept.append(head)
            return head.rows

        with self._recorder.recording(), self._rows(batch, lm_head, keep):
            result = self._run(batch)
        return Outputs(
            logits=None,
            taps=self._recorder.take(),
            lm_head=kept[0] if kept else None,
            sequence_logits=self._head_outputs(result)[1],
        )

    def learn(self, batch: Batch, terms: RunningTerms) -> Losses:
        """Run the student on a batch and compute each loss term as soon as the tensors that it needs are available.

        Only tensors that a term needs are kept, and the token terms never compute the logits of a whole batch.
        """
        batch = batch.with_label_rows(shift=self._shift)
        taps = None if terms.teacher is None else terms.teacher.taps
        layers = LayerLosses(terms.layer_terms, taps, batch.attention_mask)
        of_tokens: list[TokenLosses] = []

        def use(head: HeadInputs) -> Tensor:
            of_tokens.append(self._token_losses(head, batch, terms))
            return of_tokens[0].total

        with self._recorder.recording(layers.offer), self._rows(batch, bool(terms.token_terms), use):
            result = self._run(batch)
        self._recorder.take()
        total, sequences = self._head_outputs(result)
        if not terms.token_terms:
            # ZeRO-3 gathers parameters in the backward pass from the model's output, so the total must depend on it.
            total = 0.0 * torch.stack([each.sum().float() for each in result.values() if torch.is_tensor(each)]).sum()
        assert total is not None, "the student has no language-model head"
        losses = layers.sums
        outputs = Outputs(logits=None, taps=Taps(), sequence_logits=sequences)
        losses |= {term.name: term.loss(outputs, terms.teacher, batch) for term in terms.sequence_terms}
        weighted = [terms.factors[name] * loss.sum for name, loss in losses.items()]
        for each in of_tokens:
            count = batch.counts()["labels"]
            losses |= {term.name: LossSum(each.sums[i], count) for i, term in enumerate(terms.token_terms)}
        return Losses(
            torch.stack([total, *weighted]).sum(),
            {name: LossSum(loss.sum.detach(), loss.count) for name, loss in losses.items()},
        )

    def remove(self) -> None:
        """Remove the taps and the replaced LM head from the model; this object cannot be used afterwards."""
        self._recorder.remove()
        self._head.remove()

    def _run(self, batch: Batch) -> Any:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.position_ids is None:
            inputs["attention_mask"] = self._mask(batch)
        else:
            inputs["attention_mask"] = packed_mask(batch.attention_mask, self._recorder.model.config)
            inputs["position_ids"] = batch.position_ids
        if batch.token_type_ids is not None:
            inputs["token_type_ids"] = batch.token_type_ids
        return self._forward(**inputs)

    def _mask(self, batch: Batch) -> Any:
        """The attention mask to pass to transformers.

        Transformers reads the values of a plain (B, T) mask, and on a GPU the host would have to wait for them.
        Therefore a batch on a GPU gets a ready (B, 1, T, T) mask, or None if nothing is padded.
        """
        attention_mask = batch.attention_mask
        if attention_mask.device.type == "cpu" or batch.padded is None:
            return attention_mask
        if not batch.padded:  # without a mask sdpa can use flash attention
            return None
        if self._shift:
            return packed_mask(attention_mask, self._recorder.model.config)
        return (attention_mask != 0)[:, None, None, :].expand(-1, 1, attention_mask.shape[1], -1)

    def _rows(
        self, batch: Batch, lm_head: bool, use: Callable[[HeadInputs], Tensor] | None
    ) -> AbstractContextManager[None]:
        """Restrict the LM head to the rows that predict a label, or to no rows if `lm_head` is False."""
        assert batch.label_rows is not None
        rows_N = batch.label_rows if lm_head else batch.label_rows[:0]
        return self._head.taken_over(rows_N, use if lm_head else None)

    def _token_losses(self, head: HeadInputs, batch: Batch, terms: RunningTerms) -> TokenLosses:
        labels_N = batch.row_labels(shift=self._shift)
        factors = _stacked([terms.factors[term.name] for term in terms.token_terms], labels_N.device)
        teacher = None if terms.teacher is None else terms.teacher.lm_head
        with nullcontext() if teacher is None else whole(teacher), without_autocast(labels_N.device):
            return token_losses(head, teacher, labels_N, terms.token_terms, factors, vocabulary=self._vocabulary)

    def _head_outputs(self, result: Any) -> tuple[Tensor | None, Tensor | None]:
        """The outputs of the LM head and of the head for sequences, each None if the model lacks that head."""
        if "prediction_logits" in result:
            return result.prediction_logits, result.seq_relationship_logits
        logits = result.get("logits")
        return (logits, None) if self._head.is_there else (None, logits)


def _stacked(factors: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """(K,) fp32, without reading values from the device."""

    def made(value: Tensor | float) -> Tensor:  # full() runs a kernel; the host would wait for a copy
        return value.float() if isinstance(value, Tensor) else torch.full((), value, device=device)

    return torch.stack([made(each) for each in factors])
