"""Several teachers as one, against each of them alone."""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from tiny import tiny_model

from llmdistill.batch import Batch, HeadInputs
from llmdistill.data.collate import Encoded, collate, collate_packed
from llmdistill.errors import UserError
from llmdistill.methods.kd import KdConfig, build_kd
from llmdistill.step.forward import TappedModel
from llmdistill.step.tap_models import tap_teacher
from llmdistill.teachers.several import AveragedTeachers, TeachersOfRows

ITEMS = [
    Encoded([5, 6, 7], [8, 9, 1]),
    Encoded([3, 4], [5, 1], "skills"),
    Encoded([9], [10, 11, 12, 1]),
    Encoded([4, 4, 4, 4], [2, 1], "skills"),
    Encoded([7, 2], [3, 3, 1], "skills"),
]
ARRANGED = {
    "one a row": partial(collate, pad_token_id=0),
    "packed": partial(collate_packed, pad_token_id=0, max_length=16),
}


@pytest.fixture(scope="module")
def models() -> Mapping[str, TappedModel]:
    made = {"": tiny_model("llama", seed=0), "skills": tiny_model("llama", seed=1)}
    method = build_kd(KdConfig(), made[""].config, made[""].config)
    return {name: tap_teacher(method, model.double()) for name, model in made.items()}


def logits(head: HeadInputs) -> torch.Tensor:
    return head.rows @ head.weight.T


def alone(model: TappedModel, item: Encoded) -> torch.Tensor:
    batch = collate([item], 0).with_positions(shift=True)
    return logits(model.compute_targets(batch, lm_head=("labels",)).lm_head["labels"])


def by_item(batch: Batch) -> list[int]:
    """The number of the example of each label of a batch, in the order of its labels."""
    numbers = {item.sample_id: number for number, item in enumerate(ITEMS)}
    columns = batch.input_ids.shape[1]
    rows = [divmod(place, columns) for place in batch.label_positions.tolist()]
    return [numbers[batch.sample_ids[row][int(batch.attention_mask[row, column]) - 1]] for row, column in rows]


@pytest.mark.parametrize("arrange", ARRANGED.values(), ids=ARRANGED)
def test_each_row_is_taught_by_the_teacher_it_asks_for(models, arrange):
    batch = arrange(ITEMS).with_positions(shift=True)
    found = (
        TeachersOfRows(teachers=models, together=frozenset())
        .compute_targets(batch, lm_head=("labels",))
        .lm_head["labels"]
    )
    numbers = by_item(batch)
    targets = {number: alone(models[item.teacher], item) for number, item in enumerate(ITEMS)}
    seen = dict.fromkeys(targets, 0)
    expected = []
    for number in numbers:
        expected.append(targets[number][seen[number]])
        seen[number] += 1
    whole = torch.full((len(numbers), expected[0].shape[0]), float("nan"), dtype=torch.float64)
    for head, places in zip(found.heads, found.places, strict=True):
        whole[places] = logits(head)
    torch.testing.assert_close(whole, torch.stack(expected), rtol=1e-9, atol=1e-12)
    for name, places in zip(models, found.places, strict=True):
        assert {ITEMS[numbers[place]].teacher for place in places.tolist()} == {name}


def test_a_teacher_runs_only_where_it_is_asked_or_every_rank_must(models):
    batch = collate([item for item in ITEMS if item.teacher], 0).with_positions(shift=True)
    ran = []

    class Counted:
        def __init__(self, name):
            self.name = name

        def compute_targets(self, part, *, lm_head):
            ran.append((self.name, len(part.input_ids)))
            return models[self.name].compute_targets(part, lm_head=lm_head)

    counted = {name: Counted(name) for name in models}
    for together, expected in ((frozenset(), [("skills", 3)]), (frozenset({""}), [("", 1), ("skills", 3)])):
        ran.clear()
        of_rows = TeachersOfRows(teachers=counted, together=together)
        found = of_rows.compute_targets(batch, lm_head=("labels",)).lm_head["labels"]
        assert ran == expected
        assert [len(head.rows) for head in found.heads] == [len(places) for places in found.places]
        assert len(found.heads[-1].rows) == len(batch.label_positions)


def test_a_row_that_asks_for_another_teacher_is_one_sentence(models):
    batch = collate([Encoded([5], [6, 1], "people")], 0)
    with pytest.raises(UserError, match=r"'people': name it in teacher\.others"):
        TeachersOfRows(teachers=models, together=frozenset()).compute_targets(batch, lm_head=("labels",))


def test_averaged_teachers_see_the_whole_batch(models):
    batch = collate(ITEMS, 0).with_positions(shift=True)
    averaged = AveragedTeachers(teachers=models, weights=[3.0, 1.0], average="log_probabilities")
    found = averaged.compute_targets(batch, lm_head=("labels",)).lm_head["labels"]
    assert found.weights == (0.75, 0.25)
    assert found.average == "log_probabilities"
    for head, model in zip(found.heads, models.values(), strict=True):
        torch.testing.assert_close(
            logits(head), logits(model.compute_targets(batch, lm_head=("labels",)).lm_head["labels"])
        )
