from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from llmdistill.batch import Outputs, Taps
from llmdistill.config import DataConfig, RunConfig
from llmdistill.config.data import TaskConfig
from llmdistill.data.pairs import EncodedPair, PairExample, collate_pairs
from llmdistill.errors import UserError
from llmdistill.runtime.distributed import World
from llmdistill.tasks import make_task
from llmdistill.tasks.classification import chance_score, predict
from llmdistill.tasks.glue_files import GLUE_TASKS

COLLATE = partial(collate_pairs, pad_token_id=0)
ITEMS = [EncodedPair([1 + n % 5] * (1 + 7 * n % 4), None, 0) for n in range(11)]
"""Of different lengths, so that they are batched in another order than they stand in."""


def forward(batch) -> Outputs:
    """Class 1 where the first token is even; as a score, the token itself."""
    first = batch.input_ids[:, 0].float()
    is_even = first % 2 == 0
    return Outputs(None, Taps(), torch.stack([(~is_even).float(), is_even.float()], dim=1))


def scores(batch) -> Outputs:
    return Outputs(None, Taps(), batch.input_ids[:, :1].float() / 2)


WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_answers_stand_in_the_items_order(batch_size) -> None:
    found = predict(forward, ITEMS, COLLATE, GLUE_TASKS["RTE"], batch_size=batch_size, world=WORLD)
    assert found.tolist() == [int(item.input_ids[0] % 2 == 0) for item in ITEMS]
    assert found.dtype == np.int64
    found = predict(scores, ITEMS, COLLATE, GLUE_TASKS["STS-B"], batch_size=batch_size, world=WORLD)
    assert found.tolist() == [item.input_ids[0] / 2 for item in ITEMS]


def test_chance_is_the_best_single_answer() -> None:
    for task, metric, chance in (
        *(("RTE", "accuracy", 75), ("MRPC", "f1", 100 * 2 * 0.75 / 1.75), ("MRPC", "accuracy", 75)),
        *(("CoLA", "matthews", 0), ("STS-B", "pearson", 0)),
    ):
        targets = (0.0, 1.5, 5.0) if task == "STS-B" else (0, 1, 1, 1)
        examples = [PairExample("a", "b", target, number) for number, target in enumerate(targets)]
        assert chance_score(task, examples, metric) == pytest.approx(chance), (task, metric)


def test_a_metric_that_the_task_does_not_have() -> None:
    task = TaskConfig(name="rte", metric="f1")
    with pytest.raises(UserError, match=r"^data\.task\.metric is f1: RTE has accuracy; name one of them$"):
        make_task(RunConfig(ds_config="", data=DataConfig(kind="task", task=task)))
