"""A live teacher whose linears have few bits (`teacher.quantize`), and how far this moves its predictions.

Only the teacher of the steps is rounded: its scores, the making of the student and caches take the exact one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.batch import Batch, HeadInputs
from llmdistill.config.teacher import TeacherBits
from llmdistill.errors import UserError
from llmdistill.files import byte_size
from llmdistill.losses.agreement import divergence_from
from llmdistill.models.rounding import bits_of, check_torchao, quantized_linears, round_linears
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.runtime.terminal import print_main, warn_main
from llmdistill.step.forward import TappedModel
from llmdistill.step.taps import Recorder
from llmdistill.teachers.live import LiveSource
from llmdistill.teachers.source import LoadedTeacher, TeacherContext, TeacherPlan

MOST_NATS = 1e-2
"""A divergence from the exact teacher above this is warned of, in nats a token."""
_FP8_CAPABILITY = (8, 9)
"""The first GPUs that multiply in fp8: L4, L40S; then H100."""


@dataclass(frozen=True)
class RoundedSource(LiveSource):
    """Rounds a model, and runs it in the steps."""

    def check_available(self, plan: TeacherPlan) -> None:
        one = plan.models.teachers[self.name]
        check_bits(f"{one.key}.quantize", one.settings.quantize, World.current().device)

    def load(self, context: TeacherContext) -> LoadedTeacher:
        teacher, one = super().load(context), context.plan.models.teachers[self.name]
        round_teacher(teacher.model, f"{one.key}.quantize", one.settings.quantize, context.first_batch)
        return teacher


def check_bits(key: str, bits: TeacherBits, device: torch.device) -> None:
    """Raise a UserError if this machine cannot run a teacher with these weights; `key` is the setting."""
    check_torchao(f"{key} {bits}")
    has_fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
    if bits == "fp8" and not has_fp8:
        raise UserError(f"{key} fp8 needs a GPU that multiplies in fp8, such as an L40S or H100: take int8")


@torch.no_grad()
def round_teacher(
    model: PreTrainedModel, key: str, bits: TeacherBits, first_batch: Callable[[], Batch] | None
) -> float | None:
    """Round the linears of a teacher's layers in place, and print the memory and the change of its predictions.

    The exact teacher and the rounded one run on the first batch, if there is one and the teacher has an LM head. Every
    rank must call this function. Returns the mean KL(exact ‖ rounded) over the labels of all ranks, in nats; None
    without a batch. Raises UserError if the teacher has no linears, or few bits already.
    """
    if (saved := bits_of(model.config)) is not None:
        raise UserError(f"{key} is {bits}, but this teacher has {saved} weights already: leave it out")
    tapped = TappedModel(model, Recorder(model, {}))
    batch = None
    if first_batch is not None and tapped.has_lm_head:
        batch = first_batch().with_positions(shift=tapped.shift).to(World.current().device)
    before, exact = _weight_bytes(model), None if batch is None else _predict(tapped, batch)
    if bits == "fp8":
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

        names = set(quantized_linears(model))
        quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()), lambda _, name: name in names)
    else:
        round_linears(model, bits)
    nats = None if batch is None or exact is None else _divergence(exact, _predict(tapped, batch))
    tapped.remove()
    text = f"Teacher     its linears in {bits}: {byte_size(before)} are {byte_size(_weight_bytes(model))}"
    if nats is None:
        print_main(text)
        return None
    print_main(f"{text}; on the first batch its predictions are {nats:.2g} nats a token from the exact ones")
    if nats > MOST_NATS:
        warn_main(
            f"{key} {bits}: its predictions are {nats:.2g} nats a token (KL) from those of the exact teacher, which "
            f"the student cannot tell from knowledge: take {'none' if bits == 'int8' else 'int8'}"
        )
    return nats


def _predict(tapped: TappedModel, batch: Batch) -> HeadInputs:
    head = tapped.compute_targets(batch, lm_head=("labels",)).lm_head["labels"]
    assert isinstance(head, HeadInputs), "a live teacher gives whole distributions"
    return head


def _divergence(exact: HeadInputs, rounded: HeadInputs) -> float:
    """Return the mean KL(exact ‖ rounded) in nats over the rows of all ranks."""
    kl = divergence_from(exact, rounded)
    sums = torch.stack([kl.double(), kl.new_tensor(len(exact.rows), dtype=torch.float64)])
    all_reduce_sum(sums)
    total, count = sums.tolist()
    return total / max(1.0, count)


def _weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters, for a weight of torchao those of its parts."""
    return sum(part.nbytes for parameter in model.parameters() for part in _parts(parameter))


def _parts(tensor: Tensor) -> list[Tensor]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [tensor] if flatten is None else [part for name in flatten()[0] for part in _parts(getattr(tensor, name))]
