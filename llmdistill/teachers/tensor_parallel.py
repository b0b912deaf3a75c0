"""A teacher whose layers are cut across the ranks of a node: each computes its heads and features for the rows of all.

Under ZeRO-3 the weights of every layer travel to every rank in each pass. Here the weights stay, and the sums of two
products of each layer travel, (rows of all ranks, T, W), which is less for a large model on few tokens. What is cut
where is transformers' own plan for the architecture (`base_model_tp_plan` of its config); the embedding and the LM head
stay whole on each rank, because the losses read the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.batch import Batch, Outputs, Positions
from llmdistill.batch import Sequences as SequencesOfRows
from llmdistill.errors import UserError
from llmdistill.models.configs import load_config
from llmdistill.models.general import layer_values
from llmdistill.models.heads import HeadName
from llmdistill.models.sharded_load import Sharding, load_sharded
from llmdistill.runtime.distributed import World, node_group, node_ranks
from llmdistill.step.forward import TappedModel
from llmdistill.step.tap_models import tap_teacher
from llmdistill.step.teacher import Teacher
from llmdistill.teachers.live import teacher_folder
from llmdistill.teachers.source import ModelSource, TeacherContext, TeacherPlan

Cut = Literal["colwise", "rowwise"]
"""colwise: a rank has some outputs of a linear; rowwise: some of its inputs, and the outputs of all ranks are added."""
_ELSEWHERE = "take teacher.sharding node or zero3"


def read_plan(config: PreTrainedConfig, ranks: int) -> dict[str, Cut]:
    """Return transformers' plan for an architecture: pattern of a linear's name in the base model -> how it is cut.

    Raises UserError if there is no plan, if it cuts in other ways, or if the ranks do not divide the heads.
    """
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    cuts: dict[str, Cut] = {}
    for pattern, style in plan.items():
        if style in ("colwise", "rowwise"):
            cuts[pattern] = style  # type: ignore[assignment]
        elif not style.startswith("replicated"):  # norms of single heads, which each rank has whole
            raise UserError(
                f"teacher.sharding tensor: transformers cuts {pattern} of {config.model_type} as {style}, which is not "
                f"supported: {_ELSEWHERE}"
            )
    if not cuts:
        raise UserError(
            f"teacher.sharding tensor: transformers has no plan that cuts the layers of {config.model_type}: "
            f"{_ELSEWHERE}"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        for number in layer_values(config, name):
            if number is not None and number % ranks:
                raise UserError(
                    f"teacher.sharding tensor: the teacher's {name} is {number}, which the {ranks} ranks of a node do "
                    f"not divide: {_ELSEWHERE}, or run on a number of ranks that divides it"
                )
    return cuts


def cut_of(cuts: Mapping[str, Cut], name: str) -> Cut | None:
    """Return how the linear of this name in the model is cut; None if each rank has it whole."""
    return next((cut for pattern, cut in cuts.items() if fnmatchcase(f".{name}", f"*.{pattern}")), None)


def is_cut(cuts: Mapping[str, Cut], parameter: str) -> bool:
    """Return whether a rank has a share of a parameter; the bias of a linear whose inputs are cut is whole."""
    linear, _, leaf = parameter.rpartition(".")
    cut = cut_of(cuts, linear)
    return cut == "colwise" or (cut == "rowwise" and leaf == "weight")


@dataclass(frozen=True, kw_only=True)
class CutSizes:
    """The sizes of a teacher that is cut across the ranks of a node."""

    cut_bytes: int
    """Bytes of the parameters of which each rank has a share; it has all others whole."""
    summed_bytes: int
    """Bytes that are added up over the ranks for each token of a pass."""

    @classmethod
    def of(cls, model: PreTrainedModel, ranks: int) -> CutSizes:
        """Count the sizes of a whole model, which may be on the meta device. Raises UserError as `read_plan` does."""
        cuts = read_plan(model.config, ranks)
        parameters = [parameter for name, parameter in model.named_parameters() if is_cut(cuts, name)]
        outputs = [module.weight.shape[0] for name, module in model.named_modules() if cut_of(cuts, name) == "rowwise"]
        return cls(
            cut_bytes=sum(parameter.nbytes for parameter in parameters),
            summed_bytes=sum(outputs) * model.dtype.itemsize,
        )


@dataclass(frozen=True, kw_only=True)
class TensorSharding(Sharding):
    """Cuts the linears of a plan across the ranks of a group."""

    cuts: dict[str, Cut]
    rank: int
    """This one's place in the group."""
    ranks: int
    device: torch.device
    ds_config: dict[str, Any] = field(default_factory=dict)

    def shard(self, parameter: nn.Parameter, name: str) -> None:
        cut, value = cut_of(self.cuts, name.rpartition(".")[0]), parameter.data
        if is_cut(self.cuts, name):
            value = value.chunk(self.ranks, dim=0 if cut == "colwise" else 1)[self.rank]
        elif cut == "rowwise" and self.rank > 0:
            value = torch.zeros_like(value)  # the outputs are added, and the bias counts once
        # A copy, because a chunk would keep the memory of the whole matrix.
        parameter.data = value.to(self.device, copy=True, memory_format=torch.contiguous_format)


def load_tensor_parallel(path: str, *, dtype: torch.dtype, head: HeadName) -> PreTrainedModel:
    """Load a teacher that is cut across the ranks of this node; every rank must call this function.

    No rank ever holds more than its share and one parameter. The model must get the same rows on all ranks of a node.

    Raises:
        UserError: as in `load_model` and `read_plan`.
    """
    world, ranks = World.current(), node_ranks()
    group = node_group() if len(ranks) < world.size else None
    cuts, place = read_plan(load_config(path), len(ranks)), ranks.index(world.rank)
    sharding = TensorSharding(cuts=cuts, rank=place, ranks=len(ranks), device=world.device, group=group)
    model = load_sharded(path, sharding=sharding, dtype=dtype, head=head)
    nn.Module.to(model, world.device)  # the buffers

    def add_up(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        dist.all_reduce(output, group=group)
        return output

    for name, module in model.named_modules():
        if cut_of(cuts, name) == "rowwise":
            module.register_forward_hook(add_up)
    return model.eval().requires_grad_(False)


class TensorParallelTeacher(Teacher):
    """Runs the model on the rows of all ranks of the node together, and returns the outputs of this rank's rows."""

    def __init__(self, model: TappedModel) -> None:
        """Take a model that `load_tensor_parallel` has loaded; every rank must call this function."""
        world, ranks = World.current(), node_ranks()
        self._model = model
        self._rank, self._ranks = ranks.index(world.rank), len(ranks)
        is_all = self._ranks == world.size
        self._group = None if is_all else node_group()
        # The shapes travel by way of the CPUs: a GPU's answer would make the host wait for all that it has launched.
        needs_own = self._ranks > 1 and (world.device.type != "cpu" or not is_all)
        self._control = node_group("gloo") if needs_own else None
        self._has_window = any(layer_values(model.model.config, "sliding_window"))

    def compute_targets(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Return the inputs of the LM head at positions of this batch; every rank must call it, as often as the others.

        The model runs on the rows of all ranks below each other, and the LM head only on those of this batch.
        """
        batch = batch.with_positions(shift=self._model.shift)
        size, length = batch.input_ids.shape
        shapes: list[Any] = [None] * self._ranks
        dist.all_gather_object(shapes, (size, length, batch.padding), group=self._control)
        sizes = [each[0] for each in shapes]
        longest, most = max(each[1] for each in shapes), max(sizes)
        joint = dict[str, Tensor | None]()
        for name in ("input_ids", "attention_mask", "token_type_ids", "position_ids"):
            own = getattr(batch, name)
            if own is None:  # all ranks have the tensor or none has: that depends on the run's settings
                joint[name] = None
                continue
            # All ranks send tensors of one shape, of which each takes the rows that are no padding.
            padded = functional.pad(own, (0, longest - length, 0, most - size)).contiguous()
            parts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(parts, padded, group=self._group)
            joint[name] = torch.cat([part[:rows] for part, rows in zip(parts, sizes, strict=True)])
        mask = joint["attention_mask"]
        assert mask is not None
        paddings = {each[2] for each in shapes} | ({"right"} if len({each[1] for each in shapes}) > 1 else set())
        padding: Any = next(kind for kind in ("left", "right", "none") if kind in paddings)
        first = sum(sizes[: self._rank]) * longest

        def moved(rows_N: Tensor | None) -> Tensor | None:
            # The flat position b·T + t of this batch, in rows of another length below those of the ranks before.
            return None if rows_N is None else first + rows_N // length * longest + rows_N % length

        needs_sequences = batch.sequences is not None and (
            batch.position_ids is not None or padding == "left" or self._has_window
        )
        rows_of_all = Batch(
            **joint,  # type: ignore[arg-type]
            labels=torch.zeros_like(mask),  # nobody reads them
            label_positions=moved(batch.label_positions),
            token_positions=moved(batch.token_positions),
            padding=padding,
            sequences=SequencesOfRows.of(mask.cpu()).to(mask.device) if needs_sequences else None,
        )
        return self._model.compute_targets(rows_of_all, lm_head=lm_head)


@dataclass(frozen=True)
class TensorParallelSource(ModelSource):
    """Cuts a model across the ranks of each node."""

    gives = replace(ModelSource.gives, layers=False, sequences=False)

    @property
    def is_scored(self) -> bool:
        return True  # in shards, before the training

    def describe(self, teacher: Any) -> str:
        return ", its layers cut across the ranks of a node"

    def check_there(self, plan: TeacherPlan) -> None:
        """Raise a UserError if the ranks do not divide the teacher."""
        read_plan(plan.models.teacher, len(node_ranks()))

    def build(self, context: TeacherContext) -> Teacher:
        plan = context.plan
        folder = teacher_folder(plan, plan.models.teachers[""])
        dtype = plan.models.teachers[""].dtype
        model = load_tensor_parallel(str(folder), dtype=dtype, head=plan.models.teacher_head)
        return TensorParallelTeacher(tap_teacher(plan.method, model, vocabulary=plan.models.vocabulary))
