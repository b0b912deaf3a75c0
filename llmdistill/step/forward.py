"""The forward pass that the trainer calls with a batch; it returns logits and taps, or losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.batch import Batch, HeadInputs, LogitScale, LossSum, Outputs, Positions, Taps
from llmdistill.errors import UserError
from llmdistill.losses.terms import BoundTerms, Losses
from llmdistill.models.families import family_of, has_family, has_segments, is_causal
from llmdistill.models.general import layer_values
from llmdistill.models.heads import find_head
from llmdistill.models.pooling import SentencePooler
from llmdistill.objective import Pooling
from llmdistill.step.learning import HeadLosses, LayerLosses, split_by_positions
from llmdistill.step.lm_head import LMHead
from llmdistill.step.taps import Recorder


class TappedModel:
    """A forward pass that records inner tensors, or computes losses on them while it runs.

    With DeepSpeed, the forward pass is that of the engine: calling the module directly would bypass the engine's hooks.
    The recorder is installed on the engine's module.

    Token losses take the shortcut through the last linear of the LM head, so that the logits of a batch are never in
    memory at once. This is right only if the logits are the output of this linear, or follow from it by the factor and
    the cap that `logit_scale` knows. So an architecture without an entry in `families` starts with its own logits, and
    `step.own_loss` finds out which of the two is right for a model.
    """

    shortcut: bool
    """Whether token losses start from the inputs of the LM head's last linear, and not from the model's logits."""
    makes_mask: bool
    """Whether the model makes its attention mask itself, as in transformers. Packed rows need ours."""
    model: PreTrainedModel
    """The model itself, whatever wraps it in the forward pass."""
    shift: bool
    """Whether position i predicts label i+1, as in decoders."""
    logit_scale: LogitScale
    """What the model does to the output of its LM head, by its config."""
    has_lm_head: bool
    """Whether the model has an LM head that ends in a plain linear, so that there may be a shortcut."""

    def __init__(
        self,
        forward: Callable[..., Any],
        recorder: Recorder,
        *,
        vocabulary: int | None = None,
        pooling: Pooling | None = None,
        projector: nn.Module | None = None,
    ) -> None:
        """Take the forward pass and the recorder of a model.

        Args:
            forward: the model, or the engine around it.
            recorder: the hooks on the model.
            vocabulary: keeps only the first logits, and drops padding rows that the other model does not have.
            pooling: makes the outputs of a model without a head the embeddings of sentences, `sequence_logits`.
            projector: maps these embeddings to the teacher's width, as `projected`.
        """
        self._forward = forward
        self._recorder = recorder
        self._vocabulary = vocabulary
        self.model = recorder.model
        self._pooler = None if pooling is None else SentencePooler(self.model, pooling, projector)
        self._head = LMHead(self.model)
        self.has_lm_head = self._head.is_there
        self.logit_scale = self._head.scale
        config = self.model.config
        head = find_head(self.model)
        self._task_head = None if head is None or head.targets is None else head
        self.shift = is_causal(config)
        # An LM head that does not end in a plain linear has logits, but no linear to take the shortcut through.
        is_plain = self.has_lm_head or self.model.get_output_embeddings() is None
        self.shortcut = has_family(config) and is_plain
        self.makes_mask = not has_family(config) or family_of(config).makes_mask

    @contextmanager
    def modes(self, *, shortcut: bool, makes_mask: bool) -> Iterator[None]:
        """Run the model within the block with other values of these attributes."""
        before = self.shortcut, self.makes_mask
        self.shortcut, self.makes_mask = shortcut, makes_mask
        try:
            yield
        finally:
            self.shortcut, self.makes_mask = before

    def compute_own_logits(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return the logits (B, T, V), and the outputs of the last linear of the LM head, without taps."""
        with self._head.watched() as outputs, self._inputs(batch) as inputs:
            result = self._forward(**inputs)
        logits, _ = self._split_outputs(result, batch)
        assert logits is not None, "the model has no language-model head"
        return logits, outputs

    def run_through_head(
        self, batch: Batch, compute: Callable[[HeadInputs], Tensor], place: Positions = "labels"
    ) -> Tensor | None:
        """Run the model without taps; return the result of `compute` on the LM head's inputs at these positions.

        The result passes through the model's own output in place of the logits, so that ZeRO-3 gathers parameters in
        the backward pass.
        """
        batch = batch.with_positions(shift=self.shift)
        with self._restrict_head(batch, (place,), compute), self._inputs(batch) as inputs:
            result = self._forward(**inputs)
        total = self._split_outputs(result, batch)[0]
        return self._head.restore(total) if self.shortcut and total is not None else total

    def inspect_head(self, batch: Batch, inspect: Callable[[HeadInputs], None]) -> None:
        """Run the model without taps; `inspect` gets the LM head's inputs at the labels, or the logits there."""
        batch = batch.with_positions(shift=self.shift)

        def inspect_rows(head: HeadInputs) -> Tensor:
            inspect(head)
            return head.rows

        logits = self.run_through_head(batch, inspect_rows)
        if not self.shortcut and logits is not None:
            inspect(_select_logits(logits, batch, ("labels",)))

    def without_engine(self) -> TappedModel:
        """Return the same model and taps with a forward pass that calls the model itself."""
        # The hooks and the head belong to the model, so that a shallow copy shares them.
        bare = copy.copy(self)
        bare._forward = self.model
        return bare

    def __call__(self, batch: Batch) -> Outputs:
        """Run the model on a batch, and compute the logits of every token."""
        batch = batch.with_positions(shift=self.shift)
        with self._recorder.recording(mask=batch.mask), self._inputs(batch) as inputs:
            result = self._forward(**inputs)
        logits, sequences = self._split_outputs(result, batch)
        return Outputs(
            logits=None if logits is None else logits[..., : self._vocabulary],
            taps=self._recorder.pop_taps(),
            sequence_logits=sequences,
        )

    def compute_targets(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Run the teacher on a batch; return taps and the LM head's inputs at these kinds of positions."""
        batch = batch.with_positions(shift=self.shift)
        head_inputs: list[HeadInputs] = []

        def keep_inputs(head: HeadInputs) -> Tensor:
            head_inputs.append(head)
            return head.rows  # the model returns it in place of the logits, and nobody reads it

        with (
            self._recorder.recording(mask=batch.mask),
            self._restrict_head(batch, lm_head, keep_inputs),
            self._inputs(batch) as inputs,
        ):
            result = self._forward(**inputs)
        logits, sequences = self._split_outputs(result, batch)
        if lm_head and not self.shortcut and logits is not None:
            keep_inputs(_select_logits(logits, batch, lm_head))
        return Outputs(
            logits=None,
            taps=self._recorder.pop_taps(),
            lm_head=split_by_positions(head_inputs[0], batch, lm_head) if head_inputs else {},
            sequence_logits=sequences,
        )

    @property
    def live(self) -> Mapping[str, TappedModel]:
        """Implements `Teacher.live`: this model runs here."""
        return {"teacher": self}

    def retokenize(self, batch: Batch) -> Batch:
        """Implements `Teacher.retokenize`: its tokens are those of the student."""
        return batch

    def compute_losses(self, batch: Batch, terms: BoundTerms) -> Losses:
        """Run the student on a batch and compute the terms of its loss and their gradients."""
        # The trainer has found the rows on the CPU already; other callers may not have.
        batch = batch.with_positions(shift=self.shift)
        taps = Taps() if terms.teacher is None else terms.teacher.taps
        layers = LayerLosses(terms.layer_terms, taps, batch.attention_mask)
        head = HeadLosses(terms, batch, shift=self.shift, vocabulary=self._vocabulary)

        # Forward pass. The terms of layers are computed as their taps arrive, and those of the LM head in place of its
        # product, so that neither the taps of all layers nor the logits of the batch are in memory at once.
        recording = self._recorder.recording(layers.compute_ready, mask=batch.mask)
        with recording, self._restrict_head(batch, head.positions, head), self._inputs(batch) as inputs:
            result = self._forward(**inputs)
        # The terms have read the taps already; this raises an error if one has not come.
        self._recorder.pop_taps()

        # Terms of the LM head: with the shortcut the output in place of the logits is their total already.
        total, sequences = self._split_outputs(result, batch)
        if head.positions and total is not None:
            rows = None if self.shortcut else _select_logits(total, batch, head.positions)
            total = self._head.restore(total) if rows is None else head(rows)
        if not head.positions:
            # ZeRO-3 gathers parameters in the backward pass from the model's output, so the total must depend on it.
            total = (
                0.0 * torch.stack([tensor.sum().float() for tensor in result.values() if torch.is_tensor(tensor)]).sum()
            )
        assert total is not None, "the student has no language-model head"
        assert total.dim() == 0, "the output is not the total of the head's terms"  # else logits would be the loss

        # Total.
        projected = None if self._pooler is None else self._pooler.projected
        outputs = Outputs(logits=None, taps=Taps(), sequence_logits=sequences, projected=projected)
        other_losses = layers.sums | {
            term.name: term.loss(outputs, terms.teacher, batch) for term in terms.sequence_terms
        }
        total = torch.stack([total, *(terms.factors[name] * loss.sum for name, loss in other_losses.items())]).sum()
        # The log reads the sums after the backward pass, and must not hold the graph until then.
        return Losses(
            total, {name: LossSum(loss.sum.detach(), loss.count) for name, loss in (other_losses | head.sums).items()}
        )

    def remove(self) -> None:
        """Remove the taps and the replaced LM head from the model; this object cannot be used afterwards."""
        self._recorder.remove()
        self._head.remove()
        if self._pooler is not None:
            self._pooler.remove()

    @contextmanager
    def _inputs(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """Yield the arguments of the model's forward pass, which runs within the block with the mask among them."""
        config = self.model.config
        inputs: dict[str, Any] = {"input_ids": batch.input_ids}
        if has_segments(config):  # teacher and student get the same batch, and only one of them may have segments
            inputs["token_type_ids"] = batch.token_type_ids
        if self.shift or not self.makes_mask:  # few encoders accept use_cache
            inputs["use_cache"] = False
        if self.makes_mask:
            for feature, remedy, is_there in (
                ("several sequences in a row", "set data.packing to false", batch.position_ids is not None),
                ("a source with its target", "take an encoder such as BERT or RoBERTa", batch.mask.has_limits),
            ):
                if is_there:  # the mask that a model makes itself covers padding alone
                    raise UserError(
                        f"{config.model_type} makes its attention mask itself, which has no {feature}: {remedy}"
                    )
            inputs["attention_mask"] = batch.attention_mask
        else:
            causal = is_causal(config)
            if batch.mask.has_limits:
                assert not causal, "a decoder's tokens see those before them"
                inputs["attention_mask"] = batch.mask.dense()
            elif not causal and batch.padding != "none":  # without a mask attention runs on its flash kernel
                real_BT = batch.attention_mask != 0
                inputs["attention_mask"] = real_BT[:, None, None, :].expand(-1, 1, real_BT.shape[1], -1)  # (B, 1, T, T)
            # Causality is enough for padding on the right: no real token comes after it, and no loss reads the outputs
            # of the padding. Only `packed_attention` applies a sliding window that is shorter than the rows.
            windows = [window for window in layer_values(config, "sliding_window") if window is not None]
            is_short = batch.input_ids.shape[1] <= min(windows, default=batch.input_ids.shape[1])
            is_enough = is_short and batch.position_ids is None and batch.padding != "left"
            sequences = batch.sequences if causal and not is_enough else None
            inputs |= {"position_ids": batch.position_ids, "sequences": sequences}
        masked = nullcontext() if self.makes_mask else self._recorder.given_mask()
        pooling = nullcontext() if self._pooler is None else self._pooler.pooling(batch.attention_mask)
        with masked, pooling, nullcontext() if has_family(config) else _translate_errors(config):
            yield {name: value for name, value in inputs.items() if value is not None}

    def _restrict_head(
        self, batch: Batch, places: Sequence[Positions], compute: Callable[[HeadInputs], Tensor]
    ) -> AbstractContextManager[None]:
        """Restrict the LM head to the rows at these kinds of positions, one kind after the other, or to no rows."""
        if not self.shortcut:
            return nullcontext()
        if not places:
            # No term reads logits, so the head multiplies no row.
            return self._head.replaced(batch.flat_positions("labels")[:0], None)
        # A position of two kinds has two rows: to find it again among the others the host would have to wait.
        return self._head.replaced(torch.cat([batch.flat_positions(place) for place in places]), compute)

    def _split_outputs(self, result: Any, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Return the outputs of the LM head and of the head for targets; None for a head that the model lacks."""
        if self._pooler is not None:
            return None, self._pooler.embeddings
        of_targets = None if self._task_head is None else self._task_head.output(result, batch)
        if of_targets is not None:
            # The models with a head for pairs of segments beside the LM head name the logits of tokens so.
            return result.get("prediction_logits"), of_targets
        logits = result.get("logits", result.get("prediction_logits"))
        is_of_tokens = self.has_lm_head or (logits is not None and logits.dim() == 3)
        if not self.shortcut and logits is not None and logits.dim() == 3:
            logits = logits[:, : batch.input_ids.shape[1]]  # Perceiver gives logits for all of its positions
        return (logits, None) if is_of_tokens else (None, logits)


@contextmanager
def _translate_errors(config: PreTrainedConfig) -> Iterator[None]:
    """Raise a UserError for rows that the code of an architecture refuses: Reformer accepts one length alone."""
    try:
        yield
    except (AssertionError, IndexError, NotImplementedError, TypeError, ValueError) as error:
        trace = error.__traceback__
        # The innermost frame tells whether the code of the architecture raised the error, or ours in a hook.
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        raised_in = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
        if isinstance(error, UserError) or raised_in.startswith("llmdistill."):  # such as in a hook
            raise
        reason = shorten(str(error) or type(error).__name__, 300, placeholder=" ...")
        raise UserError(
            f"{config.model_type} cannot read these rows, says its own code ({reason}): change the data's limits "
            "or the model's config, or take another architecture"
        ) from error


def _select_logits(logits_BTV: Tensor, batch: Batch, places: Sequence[Positions]) -> HeadInputs:
    """Select the logits at these kinds of positions, one kind after the other, in the form of inputs of an LM head."""
    rows_N = torch.cat([batch.flat_positions(place) for place in places])
    return HeadInputs(logits_BTV.flatten(0, 1).index_select(0, rows_N), None, None)
