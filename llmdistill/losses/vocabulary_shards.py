"""A teacher's LM head of which each rank of a group has some tokens: the ranks exchange the logits of each chunk.

Each rank multiplies the chunks of all ranks by its own part of the matrix, (v, K), and then sends every rank the
columns of its rows. So a rank has all V logits of one chunk of its own rows, as with the whole matrix, and each
divergence stays what it is. For n ranks, N rows of each and numbers of b bytes:

    memory    a rank holds b·V·K / n bytes of the matrix, and b·N·K·(n-1) bytes of the other ranks' rows
    products  N·V·K multiplications a rank, as many as with the whole matrix
    traffic   a rank sends b·N·V·(n-1) / n bytes
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from llmdistill.batch import HeadInputs, LogitScale


def split_sizes(number: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of the parts into which `torch.tensor_split` divides a number of rows."""
    return tuple(number // parts + (part < number % parts) for part in range(parts))


class VocabularyShards(NamedTuple):
    """The rows of all ranks of a group, and this rank's part of the LM head that they all go through."""

    rows: tuple[Tensor, ...]
    """Of each rank its rows, (N, K), at positions of one kind; N may differ, and be 0."""
    weight: Tensor
    """(v, K), of this rank's tokens."""
    bias: Tensor | None
    """(v,)."""
    scale: LogitScale
    """The logits as a function of the head's output."""
    sizes: tuple[int, ...]
    """Of each rank the number of its tokens, in the order of the vocabulary."""
    rank: int
    """This one's place in the group."""
    group: Any
    """The process group; None: all ranks."""

    @property
    def heads(self) -> tuple[HeadInputs, ...]:
        """Empty: no rank has a whole head, and DeepSpeed shards none of its parts."""
        return ()

    @property
    def num_rows(self) -> int:
        """The rows of the rank that has most: every rank must ask for the logits of so many."""
        return max(map(len, self.rows))

    def cut(self, vocabulary: int | None) -> VocabularyShards:
        """Return the same with the first `vocabulary` tokens alone."""
        if vocabulary is None:
            return self
        firsts = accumulate(self.sizes, initial=0)
        sizes = tuple(min(max(0, vocabulary - first), size) for first, size in zip(firsts, self.sizes, strict=False))
        own = sizes[self.rank]
        bias_v = None if self.bias is None else self.bias[:own]
        return self._replace(weight=self.weight[:own], bias=bias_v, sizes=sizes)

    def logits_at(self, here: slice) -> Tensor:
        """Return the logits of this rank's rows among some of `num_rows`, (n, V); all ranks ask for the same slices.

        They have the dtype of the weight, or at least fp32 if the model scales them.
        """
        parts = [rows_NK[here] for rows_NK in self.rows]
        counts, own = [len(part) for part in parts], len(self.weight)
        rows_nK = torch.cat(parts).to(self.weight.dtype)
        if self.bias is None:
            outputs_nv = rows_nK @ self.weight.T
        else:
            outputs_nv = torch.addmm(self.bias.to(self.weight.dtype), rows_nK, self.weight.T)
        mine = counts[self.rank]
        received = outputs_nv.new_empty(mine * sum(self.sizes))
        if not received.is_meta:  # a forecast has no other ranks
            dist.all_to_all_single(
                received,
                outputs_nv.flatten(),
                [mine * size for size in self.sizes],
                [count * own for count in counts],
                group=self.group,
            )
        # What was sent makes room before the columns of the ranks are put side by side.
        del outputs_nv
        blocks = received.split([mine * size for size in self.sizes])
        logits_nV = torch.cat([block.view(mine, size) for block, size in zip(blocks, self.sizes, strict=True)], dim=1)
        if self.scale.is_plain:
            return logits_nV
        return self.scale.apply_(logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32)))
