"""The loss of a method in a Trainer of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from llmdistill.batch import POSITIONS
from llmdistill.run.loss import DistillationLoss


class DistillationTrainer(Trainer):
    """A `transformers.Trainer` whose loss is that of a method.

        trainer = llmdistill.DistillationTrainer(student, teacher, args, method="makd", train_dataset=rows,
                                                 data_collator=collator)
        trainer.train()

    Data, collator, optimizer, schedule, checkpoints and launching are the Trainer's own. A step's loss is divided by
    the tokens and labels of the whole step, over ranks and accumulation, as the main job divides it. The mean of each
    term since the last line is logged beside the loss. Not for `torch.nn.DataParallel`: start one process a GPU.
    """

    loss_is_scaled_for_ga = True

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
        """Make the Trainer and the loss.

        Args:
            model: the student.
            teacher_model: it is moved to the student's device when it is first needed.
            args: the Trainer's.
            method: as in `DistillationLoss`.
            also: methods whose terms are added.
            method_settings: settings of the method by their own names: `{"temperature": 2.0}`; those of the methods in
                `also` under `NAME.KEY`.
            vocabulary: as in `DistillationLoss`.
            arguments: the Trainer's other arguments: train_dataset, eval_dataset, data_collator, processing_class ...

        Raises:
            UserError: as `DistillationLoss`.
        """
        given = {key if "." in key else f"{method}.{key}": value for key, value in (method_settings or {}).items()}
        self.distillation = DistillationLoss(
            teacher_model, model, method, also=also, settings=given, vocabulary=vocabulary
        )
        super().__init__(model=model, args=args, **arguments)
        # Releases of transformers before loss_is_scaled_for_ga look at this one.
        self.model_accepts_loss_kwargs = True
        self._term_sums: dict[str, Tensor] = {}
        self._logged_step = 0

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro batches of a step, and the global counts of POSITIONS in place of the number of labels."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        counts = self.distillation.counts(batches)
        stacked = torch.stack([counts[name] for name in POSITIONS]).to(device)
        return batches, self.accelerator.reduce(stacked, "sum")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The method's loss of a micro batch: its share of the step's in training, its own mean in evaluation."""
        counts, ranks = None, 1
        if model.training and num_items_in_batch is not None:
            counts, ranks = dict(zip(POSITIONS, num_items_in_batch, strict=True)), self.accelerator.num_processes
        result = self.distillation(inputs, num_items_in_batch=counts, model=model)
        if model.training:
            for name, term in result.terms.items():
                self._term_sums[name] = self._term_sums.get(name, torch.zeros_like(term)) + term
        loss = result.loss * ranks  # the gradients of the ranks are averaged
        if not return_outputs:
            return loss
        outputs = {"loss": loss}
        if self.compute_metrics is not None:
            outputs["logits"] = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
        return loss, outputs

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add each term's mean over the steps since the last line to the loss's line."""
        steps = self.state.global_step - self._logged_step
        if "loss" in logs and self._term_sums and steps > 0:
            sums = self.accelerator.reduce(torch.stack(list(self._term_sums.values())), "sum")
            logs = {**logs, **dict(zip(self._term_sums, (sums / steps).tolist(), strict=True))}
            self._term_sums, self._logged_step = {}, self.state.global_step
        super().log(logs, *args, **kwargs)
