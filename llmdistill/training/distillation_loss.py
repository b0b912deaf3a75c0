"""The loss of a method for a custom training loop: it runs the teacher and the student and computes the terms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import POSITIONS, Batch, Positions
from llmdistill.config.command_line import method_settings
from llmdistill.config.methods import check_names, with_teacher
from llmdistill.errors import UserError
from llmdistill.internals.transformers_names import leave_out_of_files
from llmdistill.messages import say
from llmdistill.methods import METHODS, Method, build_method
from llmdistill.models.families import max_positions
from llmdistill.models.heads import EMBEDDINGS, find_head
from llmdistill.objective import Objective, PoolingMode
from llmdistill.runtime.engine import PROJECTORS, add_projectors
from llmdistill.step.loss_modes import choose_modes_of_models
from llmdistill.step.tap_models import tap_student, tap_teacher
from llmdistill.step.teacher import Teacher
from llmdistill.teachers.translated import TranslatedTeacher, Translation
from llmdistill.training.loss_inputs import Inputs, check_heads, check_values, find_pooling, read_batch, unwrap

_HOOKED = "_llmdistill_hooked"
"""Attribute of a model that has the hooks of a loss: its identity, which a copy of the model does not have."""


@dataclass(frozen=True)
class LossOutput:
    """The output of `DistillationLoss` for a batch."""

    loss: Tensor
    """The weighted sum of the terms: a scalar, in fp32 or higher precision, with its autograd graph."""
    terms: dict[str, Tensor]
    """Each term by name: unweighted scalars without autograd graph."""

    def backward(self) -> None:
        """Call `loss.backward()`."""
        self.loss.backward()


class DistillationLoss:
    """The loss of a method for two models in memory, computed as in the main job.

        loss = llmdistill.DistillationLoss(teacher, student, method="makd")
        optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4)  # after it: some methods add matrices to learn
        for batch in loader:  # input_ids, attention_mask and labels, as the collators of transformers make them
            result = loss(batch)
            result.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    The logits of a batch are not computed all at once (except for architectures without an entry in
    `models.families.FAMILIES`), and only the hidden tensors that a term needs are kept. Both models have hooks until
    `remove()`; outside a call of the loss they run as before. They must be loaded with `attn_implementation="sdpa"`,
    the default of transformers. Each call allows one backward pass.
    """

    def __init__(
        self,
        teacher: PreTrainedModel,
        student: PreTrainedModel,
        method: str = "makd",
        *,
        also: Sequence[str] = (),
        vocabulary: int | None = None,
        tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
        pooling: PoolingMode | None = None,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        **keywords: Any,
    ) -> None:
        """Build the method for two models, and add hooks to them.

        Args:
            teacher: the teacher; it is set to evaluation mode, and its parameters get no gradient.
            student: the model to train; like the teacher it may be compiled, or have adapters of peft that change its
                weights, such as LoRA. With a classification head (`...ForSequenceClassification`) the labels are
                classes or scores of whole sequences, and with a head for spans (`...ForQuestionAnswering`) the batch
                has start_positions and end_positions (B,); with any other head the labels are tokens.
            method: makd, kd, minilm, minilmv2, distilbert, tinybert, kroneckerbert, sft, or embedding for encoders of
                sentences.
            also: further methods, whose terms are added.
            vocabulary: the number of tokens that both models share, if they pad the vocabulary to different sizes;
                these are the first tokens of both.
            tokenizers: the student's and the teacher's where they differ, for kd: batches are in the student's tokens,
                and the teacher reads the same text in its own, special tokens left out but end tokens.
            pooling: for embedding, how the outputs of the tokens become a sentence's embedding; by default as the
                files of sentence-transformers in the teacher's folder say, and mean without them.
            settings: settings by dotted key: `{"minilm.attention": 2.0}`.
            seed: the seed of the projectors, the matrices that map the student's widths to the teacher's, if the method
                has any. They become part of the student, are trained with it, and are not saved.
            keywords: settings of the method by name: temperature, ratio, logits, teacher_layer ...

        Raises:
            UserError: a setting does not exist or is invalid, the method cannot compare the models, or a model already
                has the hooks of another loss.
        """
        run = student  # a compiled model or one with adapters, which runs as it is
        teacher, student = unwrap("teacher", teacher), unwrap("student", student)
        for role, model in (("teacher", teacher), ("student", student)):
            if (hooked := getattr(model, _HOOKED, None)) is not None:
                remedy = (
                    "is tapped already: call remove() of the other DistillationLoss first"
                    if hooked == id(model)
                    else "is a copy of a tapped model, with copies of its hooks: copy it before a DistillationLoss is "
                    "made, or after its remove()"
                )
                raise UserError(f"the {role} {remedy}")
        self.teacher, self.student = teacher, student
        names = [method, *also]
        head = find_head(student)
        if "embedding" in names:
            self.objective = Objective(tokens=False, targets=EMBEDDINGS, pooling=find_pooling(teacher, pooling))
        elif head is None or head.targets is None:
            self.objective = Objective()
        else:
            self.objective = Objective(tokens=head.has_tokens, targets=head.targets(student.config))
        check_names("method", [method], METHODS)
        check_names("also", also, with_teacher(METHODS))
        # `>` of two truth values: a method needs a teacher, and takes none with other tokens.
        if tokenizers is not None and any(METHODS[name].needs_teacher > METHODS[name].other_tokens for name in names):
            raise UserError(f"tokenizers are given, but method {' + '.join(names)} needs the same tokens: take kd")
        own = method_settings(names, settings or {}, keywords, METHODS)
        self.method: Method = build_method(names, own, teacher.config, student.config, self.objective)
        if teacher is student and self.method.needs_teacher:
            raise UserError("teacher and student are one model: give two, such as copy.deepcopy(model) as the teacher")
        if "dense" in self.method.projections:
            raise UserError(
                "embedding.projection is keep, but the files of sentence-transformers are written by the main job "
                "(llmdistill train, llmdistill.distill) alone: set it to drop"
            )
        sizes = teacher.config.vocab_size, student.config.vocab_size
        translated = tokenizers is not None and self.method.needs_teacher
        if self.method.teacher_positions and vocabulary is None and not translated and sizes[0] != sizes[1]:
            raise UserError(
                f"the teacher has a vocabulary of {sizes[0]} tokens and the student one of {sizes[1]}: give both "
                "tokenizers=(student's, teacher's), or if the larger vocabulary is only padded, vocabulary=the number "
                "of tokens that both have"
            )
        if vocabulary is not None and not 1 <= vocabulary <= min(sizes):
            raise UserError(
                f"vocabulary is {vocabulary}, but the models have {sizes[0]} and {sizes[1]} tokens: give at most that"
            )
        teacher.eval()
        check_heads(self.method, self.objective, teacher, student)
        self._forward: Callable[..., Any] = run
        self._run_by_default = run
        self._is_checked = False
        projectors = add_projectors(student, self.method.projections, seed).to(student.device)
        ignored = {f"{PROJECTORS}.{name}" for name in projectors.state_dict()}
        leave_out_of_files(student, ignored)  # the projectors are no part of the model that is saved
        self._tapped_student = tap_student(
            self.method, student, forward=self._run, projectors=projectors, vocabulary=vocabulary
        )
        self._tapped = [self._tapped_student]
        self._tapped_teacher: Teacher | None = None
        if self.method.needs_teacher:
            self._tapped_teacher = live = tap_teacher(self.method, teacher, vocabulary=vocabulary)
            self._tapped.append(live)
            if tokenizers is not None:
                longest = max_positions(teacher.config, sys.maxsize)
                translation = Translation(*tokenizers, prompts=None, longest=longest)
                self._tapped_teacher = TranslatedTeacher(live, translation, say)
        for model in (teacher, student):
            setattr(model, _HOOKED, id(model))

    def __call__(
        self,
        batch: Inputs | None = None,
        *,
        num_items_in_batch: Tensor | int | Mapping[Positions, Tensor] | None = None,
        model: Callable[..., Any] | None = None,
        **unpacked: Any,
    ) -> LossOutput:
        """Run both models on a batch.

        Args:
            batch: input_ids (B, T); attention_mask (B, T), 1 at real tokens, by default 1 everywhere; labels (B, T),
                not shifted and -100 at positions without a label, or (B,) for a classifier, none for embeddings (for
                margins 0, 1 and 2 at query, positive and negative); and, if the student uses them, token_type_ids,
                next_sentence_label (B,), and position_ids of rows that contain several sequences.
            num_items_in_batch: the divisor of the sums. By default each term is the mean over this batch. For a step
                with several batches or ranks, pass the result of `counts` for all of them: then the losses of the
                batches add up to the loss of the whole step. A single number of labels, as transformers' Trainer passes
                it, is exact for the terms at the labels, and weights the other terms by the batch's share of the
                labels.
            model: the callable to run instead of the student: the same student in a wrapper (DDP, accelerate, an
                engine).
            unpacked: nothing; a batch that is given so is refused by a sentence.

        Returns:
            The loss and its terms.

        Raises:
            UserError: the method needs labels, and the batch has none; or it is no batch.
        """
        if not isinstance(batch, Mapping) or unpacked or "input_ids" not in batch:
            given = f"the keyword {next(iter(unpacked))}" if unpacked else f"a {type(batch).__name__} without input_ids"
            raise UserError(
                f"the loss was called with {given}: give the batch as it is, loss(batch), not loss(**batch)"
            )
        made = self.as_batch(batch)
        if not self._is_checked or made.input_ids.device.type == "cpu":  # a GPU is asked for values once
            check_values(made, self.objective, self.student.config)
        located = made.with_positions(shift=self.method.shift).to(self.student.device)
        counts: Mapping[Positions, Tensor] = located.counts()
        if isinstance(num_items_in_batch, Mapping):
            counts = {name: num_items_in_batch[name].to(located.input_ids.device) for name in POSITIONS}
        elif num_items_in_batch is not None:
            scale = num_items_in_batch / counts[self.objective.positions].clamp(min=1)
            counts = {name: count * scale for name, count in counts.items()}
        # A batch with a small share of the labels has divisors below 1; only a divisor of 0 is replaced by 1.
        divisors = {name: torch.where(count > 0, count, 1) for name, count in counts.items()}
        if self.method.needs_teacher and self.teacher.device != located.input_ids.device:
            self.teacher.to(cast(Any, located.input_ids.device))
        teacher_outputs = None
        self._forward = self._run_by_default if model is None else model
        try:
            if not self._is_checked and self.method.token_terms:
                # At the first batch, where all ranks call the loss together, both models choose how they give losses.
                self._is_checked, training = True, self.student.training
                self.student.eval()
                try:
                    choose_modes_of_models(self._tapped_teacher, self._tapped_student, located)
                finally:
                    self.student.train(training)
            if self._tapped_teacher is not None:
                with torch.no_grad():
                    teacher_outputs = self._tapped_teacher.compute_targets(
                        located, lm_head=self.method.teacher_positions
                    )
            losses = self._tapped_student.compute_losses(
                located, self.method.bind_terms(teacher_outputs, located, divisors)
            )
        except IndexError as error:
            length = located.input_ids.shape[1]
            for role, model in (("teacher", self.teacher), ("student", self.student)):
                if (positions := max_positions(model.config, length)) < length:
                    raise UserError(
                        f"the batch has rows of {length} tokens, but the {role} has positions for {positions}: cut the "
                        "rows to that"
                    ) from error
            raise
        finally:
            self._forward = self._run_by_default
        if torch.is_grad_enabled() and self.student.training and not losses.total.requires_grad:
            raise UserError(
                "no parameter of the student is learned: call student.requires_grad_(), or load its adapter with "
                "is_trainable=True"
            )
        terms = {name: loss.sum / divisors[self.method.positions[name]] for name, loss in losses.terms.items()}
        return LossOutput(losses.total, {name: terms[name] for name in self.method.weights})

    def counts(self, batches: Iterable[Inputs]) -> dict[Positions, Tensor]:
        """Count the tokens, labels and sequences of all batches together.

            counts = loss.counts(batches)  # of a step with accumulation; over ranks, all-reduce each
            for batch in batches:
                loss(batch, num_items_in_batch=counts).loss.backward()

        Returns:
            Int64 scalars by name.
        """
        of_batches = [self.as_batch(batch).counts() for batch in batches]
        return {name: torch.stack([counts[name] for counts in of_batches]).sum() for name in POSITIONS}

    def as_batch(self, inputs: Inputs) -> Batch:
        """Convert a batch from a data collator of transformers to a `Batch`."""
        return read_batch(inputs, self.method, self.objective)

    def remove(self) -> None:
        """Remove the hooks and the projectors from both models; the loss cannot be used afterwards."""
        for tapped in self._tapped:
            tapped.remove()
        for model in (self.teacher, self.student):
            vars(model).pop(_HOOKED, None)
        if hasattr(self.student, PROJECTORS):
            delattr(self.student, PROJECTORS)

    def _run(self, **inputs: Any) -> Any:
        return self._forward(**inputs)
