"""A `transformers.Trainer` that trains with the loss of a method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from llmdistill.batch import POSITIONS
from llmdistill.errors import UserError
from llmdistill.training.distillation_loss import DistillationLoss


class DistillationTrainer(Trainer):
    """A `transformers.Trainer` that trains with the loss of a method.

        trainer = llmdistill.DistillationTrainer(student, teacher, args, method="makd", train_dataset=rows,
                                                 data_collator=collator)
        trainer.train()

    The data, collator, optimizer, schedule, checkpoints and launcher are those of the Trainer. The loss of a step is
    divided by the number of tokens and labels of the whole step, over all ranks and accumulation steps, as in the main
    job. Each log entry contains the loss and the mean of each term since the last entry. `torch.nn.DataParallel` is not
    supported: start one process per GPU.
    """

    loss_is_scaled_for_ga = True  # else transformers divides by the number of accumulation steps once more

    def __init__(
        self,
        model: PreTrainedModel,
        teacher_model: PreTrainedModel,
        args: TrainingArguments | None = None,
        *,
        method: str = "makd",
        also: Sequence[str] = (),
        method_settings: Mapping[str, Any] | None = None,
        vocabulary: int | None = None,
        **arguments: Any,
    ) -> None:
        """Create the Trainer and the loss.

        Args:
            model: the student.
            teacher_model: the teacher; it is moved to the student's device at its first use.
            args: the training arguments of the Trainer.
            method: as in `DistillationLoss`.
            also: further methods, whose terms are added.
            method_settings: settings of the method by name: `{"temperature": 2.0}`; settings of the methods in `also`
                as `NAME.KEY`.
            vocabulary: as in `DistillationLoss`.
            arguments: other arguments of the Trainer: train_dataset, eval_dataset, data_collator, processing_class ...

        Raises:
            UserError: for the same errors as `DistillationLoss`.
        """
        if args is not None and args.label_smoothing_factor:
            raise UserError(
                f"label_smoothing_factor is {args.label_smoothing_factor}, but the loss has no smoothing: set it to 0"
            )
        given = {key if "." in key else f"{method}.{key}": value for key, value in (method_settings or {}).items()}
        self.distillation = DistillationLoss(
            teacher_model, model, method, also=also, settings=given, vocabulary=vocabulary
        )
        super().__init__(model=model, args=args, **arguments)
        # Releases of transformers without loss_is_scaled_for_ga read this attribute instead.
        self.model_accepts_loss_kwargs = True
        self._term_sums: dict[str, Tensor] = {}
        self._term_steps = 0

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro batches of a step, and the global counts of POSITIONS instead of the number of labels."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        self._term_steps += 1
        counts = self.distillation.counts(batches)
        # One collective for all kinds of positions.
        stacked = torch.stack([counts[name] for name in POSITIONS]).to(device)
        return batches, self.accelerator.reduce(stacked, "sum")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a micro batch: in training its share of the step's loss, in evaluation its own mean."""
        counts, ranks = None, 1
        if model.training and num_items_in_batch is not None:
            counts, ranks = dict(zip(POSITIONS, num_items_in_batch, strict=True)), self.accelerator.num_processes
        result = self.distillation(inputs, num_items_in_batch=counts, model=model)
        if model.training:
            for name, term in result.terms.items():
                self._term_sums[name] = self._term_sums.get(name, torch.zeros_like(term)) + term
        loss = result.loss * ranks  # because the gradients are averaged over the ranks
        if not return_outputs:
            return loss
        outputs = {"loss": loss}
        if self.compute_metrics is not None:
            # The loss has no logits, so metrics take a forward pass more.
            outputs["logits"] = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
        return loss, outputs

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the mean of each term over the steps since the last log entry to the entry with the loss."""
        steps = self._term_steps  # not from the Trainer's count, which goes on from a checkpoint
        if "loss" in logs and self._term_sums and steps > 0:
            sums = self.accelerator.reduce(torch.stack(list(self._term_sums.values())), "sum")
            logs = {**logs, **dict(zip(self._term_sums, (sums / steps).tolist(), strict=True))}
            self._term_sums, self._term_steps = {}, 0
        super().log(logs, *args, **kwargs)
