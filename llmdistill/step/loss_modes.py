"""Decides at the first batch of a run whether the token losses are computed from the inputs of the LM head."""

from __future__ import annotations

import math
from collections.abc import Mapping

from llmdistill.batch import Batch
from llmdistill.errors import UserError
from llmdistill.runtime.distributed import all_reduce_sum, gather_objects
from llmdistill.runtime.terminal import print_main
from llmdistill.step.forward import TappedModel
from llmdistill.step.not_finite import first_not_finite_parameter
from llmdistill.step.own_loss import OwnLoss, measure_own_loss
from llmdistill.step.teacher import Teacher

LossModes = Mapping[str, Mapping[str, bool]]
"""`TappedModel.shortcut` and `TappedModel.makes_mask` of each model, by its name; a checkpoint stores them."""


def choose_modes_of_models(teacher: Teacher | None, student: TappedModel, batch: Batch) -> LossModes:
    """Choose the modes of teacher and student; a teacher with another tokenizer reads the batch in its own tokens."""
    teacher_modes = {} if teacher is None else choose_loss_modes(teacher.live, teacher.retokenize(batch))
    return {**teacher_modes, **choose_loss_modes({"student": student}, batch)}


def choose_loss_modes(models: Mapping[str, TappedModel], batch: Batch) -> LossModes:
    """Compare our loss with that of each model on the first batch; where they differ, use the model's own logits.

    Every rank must call this function, with models in evaluation mode and its own first batch, and all decide alike. A
    model without an LM head is left as it is. Returns the modes in which the models run from now on. Raises UserError
    if our loss differs from the loss of a model, and the batch needs our attention masks; or if a model has parameters
    that are not finite.
    """
    loss_modes: dict[str, dict[str, bool]] = {}
    for name, tapped in models.items():
        if not tapped.has_lm_head:
            continue
        loss = measure_own_loss(tapped, batch, all_reduce_sum)
        if not math.isfinite(loss.own):
            # To look at the weights whenever a model is loaded takes up to a third of the time of loading.
            of_ranks = gather_objects(first_not_finite_parameter(tapped.model))
            broken = next((name for name in of_ranks if name is not None), None)
            if broken is not None:
                raise UserError(
                    f"the {name}'s parameter {broken} has values that are not finite: copy or download the model again"
                )
        shortcut, makes_mask = loss.has_plain_head and loss.is_ours, tapped.makes_mask or not loss.is_ours
        if not shortcut:
            print_main(f"Note        {name}: {_describe_difference(tapped, loss)}")
        # The masks of such a model differ from ours, and only ours keep the sequences of a packed row apart.
        if makes_mask and (batch.position_ids is not None or batch.mask.has_limits):
            difference = _describe_difference(tapped, loss)
            raise UserError(
                f"{name}: {difference}; its own masks do not support packed rows: set data.packing to false"
            )
        loss_modes[name] = {"shortcut": shortcut, "makes_mask": makes_mask}
    set_loss_modes(models, loss_modes)
    return loss_modes


def set_loss_modes(models: Mapping[str, TappedModel], loss_modes: LossModes) -> None:
    """Set the modes in which models run."""
    for name in models.keys() & loss_modes.keys():
        models[name].shortcut, models[name].makes_mask = loss_modes[name]["shortcut"], loss_modes[name]["makes_mask"]


def _describe_difference(tapped: TappedModel, loss: OwnLoss) -> str:
    """Describe the difference and its consequence."""
    kind = tapped.model.config.model_type
    if loss.has_plain_head:
        return f"the first batch has the loss {loss.own:.4g} by {kind} itself and {loss.ours:.4g} by llmdistill"
    return (
        f"the logits of {kind} are more than the product of its LM head (loss of the first batch {loss.own:.4g}, of "
        f"the product alone {loss.of_product:.4g}): the model's own are taken, for whole batches"
    )
