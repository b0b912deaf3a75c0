"""A teacher whose layers are cut across the ranks of a node: each computes its heads and features for the rows of all.

Under ZeRO-3 the weights of every layer travel to every rank in each pass. Here the weights stay, and the sums of two
products of each layer travel, (rows of all ranks, T, W), which is less for a large model on few tokens. What is cut
where is transformers' own plan for the architecture (`base_model_tp_plan` of its config). A rank also has only some
tokens of the embedding, whose outputs are added up, and of the LM head, whose logits the ranks exchange when the losses
need them (`losses.vocabulary_shards`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.batch import Batch, HeadInputs, Outputs, Positions, TeacherRows
from llmdistill.batch import Sequences as SequencesOfRows
from llmdistill.errors import UserError
from llmdistill.losses.vocabulary_shards import VocabularyShards, split_sizes
from llmdistill.models.configs import load_config
from llmdistill.models.families import has_family
from llmdistill.models.general import layer_values
from llmdistill.models.heads import HeadName
from llmdistill.models.sharded_load import Sharding, load_sharded
from llmdistill.runtime.distributed import World, node_group, node_ranks
from llmdistill.step.forward import TappedModel
from llmdistill.step.tap_models import tap_teacher
from llmdistill.step.teacher import Teacher
from llmdistill.teachers.live import teacher_folder
from llmdistill.teachers.source import ModelSource, TeacherContext, TeacherPlan

Cut = Literal["colwise", "rowwise", "embedding", "lm_head"]
"""colwise: a rank has some outputs of a linear; rowwise: some of its inputs, and the outputs of all ranks are added;
embedding: some tokens, and the outputs of all ranks are added; lm_head: some tokens."""
_OF_VOCABULARY: dict[str, Cut] = {
    "embed_tokens": "embedding",
    "embed_in": "embedding",
    "lm_head": "lm_head",
    "embed_out": "lm_head",
}
"""The end of a module's name -> how it is cut; the embedding and the LM head of the architectures that have a plan."""
_ELSEWHERE = "take teacher.sharding node or zero3"


def read_plan(config: PreTrainedConfig, ranks: int) -> dict[str, Cut]:
    """Return transformers' plan for an architecture, and ours for its vocabulary: pattern of a name -> how it is cut.

    Raises UserError if there is no plan, if it cuts in other ways, if the ranks do not divide the heads, or if the
    model is factorized.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"teacher.sharding tensor: the teacher has factors or few bits, which cannot be cut: {_ELSEWHERE}"
        )
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
    # Without an entry in `families` the losses start from the model's own logits, for which it needs its whole head.
    return cuts | _OF_VOCABULARY if has_family(config) else cuts


def cut_of(cuts: Mapping[str, Cut], name: str) -> Cut | None:
    """Return how the module of this name in the model is cut; None if each rank has it whole."""
    return next((cut for pattern, cut in cuts.items() if fnmatchcase(f".{name}", f"*.{pattern}")), None)


def is_cut(cuts: Mapping[str, Cut], parameter: str) -> bool:
    """Return whether a rank has a share of a parameter; the bias of a linear whose inputs are cut is whole."""
    linear, _, leaf = parameter.rpartition(".")
    cut = cut_of(cuts, linear)
    return cut in ("colwise", "embedding", "lm_head") or (cut == "rowwise" and leaf == "weight")


@dataclass(frozen=True, kw_only=True)
class CutSizes:
    """The sizes of a teacher that is cut across the ranks of a node."""

    cut_bytes: int
    """Bytes of the parameters of which each rank has a share; it has all others whole. If the ranks do not divide the
    vocabulary, some of them have one row more than their share."""
    summed_bytes: int
    """Bytes that are added up over the ranks for each token of a pass."""
    logit_bytes: int
    """Bytes of the logits that the ranks make together for each position; 0 if they do not share the LM head."""

    @classmethod
    def of(cls, model: PreTrainedModel, ranks: int) -> CutSizes:
        """Count the sizes of a whole model, which may be on the meta device. Raises UserError as `read_plan` does."""
        cuts = read_plan(model.config, ranks)
        parameters = [parameter for name, parameter in model.named_parameters() if is_cut(cuts, name)]
        shapes = [
            (cut_of(cuts, name), module.weight.shape) for name, module in model.named_modules() if cut_of(cuts, name)
        ]
        added = [shape[0] if cut == "rowwise" else shape[1] for cut, shape in shapes if cut in ("rowwise", "embedding")]
        return cls(
            cut_bytes=sum(parameter.nbytes for parameter in parameters),
            summed_bytes=sum(added) * model.dtype.itemsize,
            logit_bytes=sum(shape[0] for cut, shape in shapes if cut == "lm_head") * model.dtype.itemsize,
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
            # The ranks need not divide the vocabulary.
            value = value.tensor_split(self.ranks, dim=1 if cut == "rowwise" else 0)[self.rank]
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
        cut = cut_of(cuts, name)
        if cut == "embedding":
            _look_up_own_tokens(module, sum(split_sizes(module.num_embeddings, len(ranks))[:place]))
        if cut in ("rowwise", "embedding"):
            module.register_forward_hook(add_up)
    return model.eval().requires_grad_(False)


def _look_up_own_tokens(embedding: nn.Module, first: int) -> None:
    """Let an embedding, of which this rank has the tokens from `first` on, give zeros for all others."""
    plain_forward, size = embedding.forward, len(embedding.weight)  # type: ignore[arg-type]
    # Training alone reads it, and it may be another rank's token.
    embedding.padding_idx = None  # type: ignore[assignment]

    def forward(input_ids: Tensor) -> Tensor:
        own_ids = input_ids - first
        is_elsewhere = (own_ids < 0) | (own_ids >= size)
        return plain_forward(own_ids.clamp(0, size - 1)).masked_fill(is_elsewhere[..., None], 0.0)

    embedding.forward = forward


class _Shape(NamedTuple):
    """What a rank tells the others of its batch."""

    size: int
    length: int
    padding: str | None
    counts: dict[Positions, int]
    """The positions at which the losses need logits."""


class TensorParallelTeacher(Teacher):
    """Runs the model on the rows of all ranks of the node together, and returns the outputs of this rank's rows."""

    def __init__(self, model: TappedModel) -> None:
        """Take a model that `load_tensor_parallel` has loaded; every rank must call this function."""
        world, ranks = World.current(), node_ranks()
        self._model = model
        self._rank, self._ranks = ranks.index(world.rank), len(ranks)
        is_all = self._ranks == world.size
        self._group = None if is_all else node_group()
        # The shapes travel through the CPUs: to read them from a GPU, the host would wait for all that it has launched.
        needs_own = self._ranks > 1 and (world.device.type != "cpu" or not is_all)
        self._control = node_group("gloo") if needs_own else None
        config = model.model.config
        self._has_window = any(layer_values(config, "sliding_window"))
        cuts = read_plan(config, self._ranks)
        head = next((module for name, module in model.model.named_modules() if cut_of(cuts, name) == "lm_head"), None)
        self._tokens: tuple[int, ...] | None = None
        """Of each rank the number of its tokens in the LM head; None if each has the whole head."""
        if head is not None and self._ranks > 1:
            assert model.shortcut, "a model that computes logits itself has its whole head on each rank"
            self._tokens = split_sizes(head.out_features, self._ranks)

    def compute_targets(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Return what the logits at positions of this batch follow from; every rank must call it, as often as others.

        The model runs on the rows of all ranks below each other, and the LM head on the positions of all ranks if they
        share it, else on those of this batch.
        """
        batch = batch.with_positions(shift=self._model.shift)
        if self._ranks == 1:
            return self._model.compute_targets(batch, lm_head=lm_head)
        size, length = batch.input_ids.shape
        counts = {place: len(batch.flat_positions(place)) for place in lm_head}
        shapes: list[Any] = [None] * self._ranks
        dist.all_gather_object(shapes, _Shape(size, length, batch.padding, counts), group=self._control)
        outputs = self._model.compute_targets(self._join(batch, shapes), lm_head=lm_head)
        if self._tokens is None:
            return outputs
        shards: dict[Positions, TeacherRows] = {}
        for place, head in outputs.lm_head.items():
            assert isinstance(head, HeadInputs), "a model here gives the inputs of its head"
            assert head.weight is not None, "a shared head has no logits yet"
            shards[place] = VocabularyShards(
                rows=head.rows.split([shape.counts[place] for shape in shapes]),
                weight=head.weight,
                bias=head.bias,
                scale=head.scale,
                sizes=self._tokens,
                rank=self._rank,
                group=self._group,
            )
        return replace(outputs, lm_head=shards)

    def _join(self, batch: Batch, shapes: Sequence[_Shape]) -> Batch:
        """Return the rows of all ranks below each other; padding goes where a rank has shorter rows."""
        longest = max(shape.length for shape in shapes)

        def gather(own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
            # All ranks send tensors of one shape, of which each takes what is no padding.
            padding = [0, 0] * (own.dim() - 1) + [0, max(sizes) - len(own)]
            padded = functional.pad(own, padding).contiguous()
            parts = [torch.empty_like(padded) for _ in sizes]
            dist.all_gather(parts, padded, group=self._group)
            return [part[:size] for part, size in zip(parts, sizes, strict=True)]

        joint = dict[str, Tensor | None]()
        for name in ("input_ids", "attention_mask", "token_type_ids", "position_ids"):
            own = getattr(batch, name)
            # All ranks have the tensor or none has: that depends on the run's settings.
            if own is not None:
                own = functional.pad(own, (0, longest - own.shape[1]))
                own = torch.cat(gather(own, [shape.size for shape in shapes]))
            joint[name] = own
        mask = joint["attention_mask"]
        assert mask is not None
        paddings = {shape.padding for shape in shapes} | {
            "right"
            for shape in shapes
            if shape.length < longest  # what shorter rows get
        }
        padding: Any = next(kind for kind in ("left", "right", "none") if kind in paddings)

        def moved(positions_N: Tensor, rank: int) -> Tensor:
            # The flat position b·T + t of a rank's batch, in rows of another length below those of the ranks before.
            length, above = shapes[rank].length, sum(shape.size for shape in shapes[:rank])
            return above * longest + positions_N // length * longest + positions_N % length

        positions = dict[Positions, Tensor]()
        for place in shapes[0].counts:
            own_N = batch.flat_positions(place)
            if self._tokens is None:
                positions[place] = moved(own_N, self._rank)
            else:
                of_ranks = gather(own_N, [shape.counts[place] for shape in shapes])
                positions[place] = torch.cat([moved(each_N, rank) for rank, each_N in enumerate(of_ranks)])
        needs_sequences = batch.sequences is not None and (
            batch.position_ids is not None or padding == "left" or self._has_window
        )
        return Batch(
            **joint,  # type: ignore[arg-type]
            labels=torch.zeros_like(mask),  # nobody reads them
            label_positions=positions.get("labels", mask.new_empty(0)),
            token_positions=positions.get("tokens"),
            padding=padding,
            sequences=SequencesOfRows.of(mask.cpu()).to(mask.device) if needs_sequences else None,
        )


@dataclass(frozen=True)
class TensorParallelSource(ModelSource):
    """Cuts a model across the ranks of each node."""

    gives = replace(ModelSource.gives, layers=False, sequences=False)

    @property
    def is_scored(self) -> bool:
        return True  # in shards, before the training

    def describe(self, teacher: Any) -> str:
        return ", cut across the ranks of a node"

    def check_available(self, plan: TeacherPlan) -> None:
        """Raise a UserError if the ranks do not divide the teacher."""
        read_plan(plan.models.teacher, len(node_ranks()))

    def build(self, context: TeacherContext) -> Teacher:
        plan = context.plan
        folder = teacher_folder(plan, plan.models.teachers[""])
        dtype = plan.models.teachers[""].dtype
        model = load_tensor_parallel(str(folder), dtype=dtype, head=plan.models.teacher_head)
        return TensorParallelTeacher(tap_teacher(plan.method, model, vocabulary=plan.models.vocabulary))
