"""The first value of the matrix between the embeddings of a student and of its wider teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.methods import Method
from llmdistill.progress import progress
from llmdistill.runtime.distributed import World, broadcast_object
from llmdistill.tasks.forward import scoring_forward
from llmdistill.teacher.cached import Teacher

_SENTENCES = 4096
_BATCH_SIZE = 32


@torch.no_grad()
def nearest_rotation(
    method: Method,
    untrained: Callable[[], PreTrainedModel],
    teacher: Teacher,
    examples: tuple[Sequence[Any], Callable[[list[Any]], Batch]],
    world: World,
) -> Tensor:
    """Return the orthogonal matrix that brings the untrained student's embeddings nearest to the teacher's.

    It is the solution of the orthogonal Procrustes problem (Schönemann 1966): U Vᵀ of the singular value decomposition
    U Σ Vᵀ = Tᵀ S, where the rows of T and S are the embeddings of at most 4,096 sentences, divided by their lengths.
    Each rank runs the teacher on all of them in the same batches, so that the matrix does not depend on their number;
    rank 0 runs the student. Every rank must call this function.

    Args:
        method: its pooling makes the embeddings.
        untrained: loads the student in fp32.
        teacher: the teacher of the run.
        examples: the sentences, and the function that collates them.
        world: the ranks.

    Returns:
        (teacher's width, student's width), in fp32 on the CPU.
    """
    items, collate = examples
    chosen = [items[index] for index in range(0, len(items), -(-len(items) // _SENTENCES))]
    chosen.sort(key=len, reverse=True)
    student = untrained().to(world.device) if world.is_main else None  # type: ignore[arg-type]
    product: Tensor | float = 0.0
    for start in progress(range(0, len(chosen), _BATCH_SIZE), "Matching embeddings", "batches"):
        batch = collate(chosen[start : start + _BATCH_SIZE]).to(world.device)
        theirs = teacher.teach(batch, lm_head=()).sequence_logits
        assert theirs is not None, "the teacher gives no embeddings"
        if student is not None:
            with scoring_forward(student, pooling=method.pooling) as forward:
                ours = forward(batch).sequence_logits
            assert ours is not None
            first, second = (functional.normalize(each.double(), dim=-1) for each in (theirs, ours))
            product = product + first.T @ second
    if student is not None:
        assert isinstance(product, Tensor)
        left, _, right = torch.linalg.svd(product.cpu(), full_matrices=False)
        product = (left @ right).float()
    found: Tensor = broadcast_object(product)
    return found
