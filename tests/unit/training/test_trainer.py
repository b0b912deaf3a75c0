"""The loop's arithmetic, with an engine that only remembers what it was asked."""

import json
import math
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import pytest
import torch
from plain_engine import PlainEngine
from tiny import tiny_model

from llmdistill.batch import LossSum
from llmdistill.config import TrainConfig
from llmdistill.data.collate import Encoded, collate
from llmdistill.data.sampler import scoring_batches
from llmdistill.errors import UserError
from llmdistill.losses.terms import Losses
from llmdistill.methods.sft import make_sft
from llmdistill.runtime.distributed import World
from llmdistill.step.tap_models import tap_student
from llmdistill.training.callbacks.finite import FiniteSteps
from llmdistill.training.callbacks.log_rows import LogRows
from llmdistill.training.callbacks.loss_watch import LossWatch
from llmdistill.training.callbacks.saving import Checkpoints
from llmdistill.training.callbacks.stopping import Stopping
from llmdistill.training.callbacks.validation import Validation
from llmdistill.training.log import RunLog
from llmdistill.training.trainer import Trainer

from support import log_rows, train_loader

WORLD = World(rank=0, size=1, device=torch.device("cpu"))
pytestmark = pytest.mark.usefixtures("cpu_world")


class Engine(PlainEngine):
    """Plain SGD of one weight; remembers its modes, and skips steps."""

    def __init__(self, weight, accumulation):
        module = torch.nn.ParameterList([weight])
        super().__init__(module, torch.optim.SGD([weight], lr=0.0), accumulation=accumulation)
        self.modes, self.skips = [], ()

    def train(self):
        self.modes.append("train")

    def eval(self):
        self.modes.append("eval")

    def was_step_applied(self):
        return self.count // self.accumulation not in self.skips


class Squares:
    """Two terms: the squares of all real tokens' values, and those of labeled positions only."""

    weights = MappingProxyType({"all": 1.0, "labeled": 3.0})
    positions = MappingProxyType({"all": "tokens", "labeled": "labels"})
    shift, needs_teacher, teacher_positions = True, False, ()

    def bind_terms(self, teacher, batch, divisors):
        divisors = {name: number.double() for name, number in divisors.items()}
        factors = {name: weight / divisors[self.positions[name]] for name, weight in self.weights.items()}
        return self.terms, factors

    def terms(self, values, batch):
        squares = values**2
        real, labeled = batch.attention_mask.bool(), batch.labels[:, 1:] != -100
        return {
            "all": LossSum(squares[real].sum(), real.sum()),
            "labeled": LossSum(squares[:, :-1][labeled].sum(), labeled.sum()),
        }


class Student:
    """A model that gives a value for each token, and the terms from them."""

    def __init__(self, values):
        self.values, self.model = values, torch.nn.Module()

    def compute_losses(self, batch, bound):
        terms, factors = bound
        losses = terms(self.values(batch), batch)
        return Losses(
            sum(factors[name] * loss.sum for name, loss in losses.items()),
            {name: LossSum(loss.sum.detach(), loss.count) for name, loss in losses.items()},
        )


def make_trainer(micro_batch_size, steps=4):
    weight = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    items = [Encoded(list(range(1, 2 + n % 5)), list(range(3, 5 + n % 3))) for n in range(12)]
    loader = train_loader(items, seed=3, global_batch_size=8, micro_batch_size=micro_batch_size)
    engine, student = Engine(weight, 8 // micro_batch_size), Student(lambda batch: weight * batch.input_ids.double())
    settings = TrainConfig(steps=steps, global_batch_size=8, learning_rate=1e-3, schedule="constant", log_every=1)
    given = {"teacher": None, "method": Squares(), "loader": loader, "settings": settings, "seed": 3}
    return weight, Trainer(engine=engine, student=student, **given)


def train(trainer, folder, *validation):
    """Train to the end with the callbacks of a run, but those that need a real model, and a log in the folder."""
    log = RunLog(folder, start=0, steps=trainer.settings.steps)
    watches = [Stopping(), FiniteSteps(trainer, folder), LossWatch(trainer.method.weights), *validation]
    trainer.run(0, [*watches, LogRows(log, trainer), Checkpoints(trainer, folder, {})])


def naive():
    """The same training over whole global batches: each term a mean over its own positions."""
    weight = torch.tensor(0.7, dtype=torch.float64)
    _, trainer = make_trainer(8)
    for step in range(4):
        (batch,) = trainer.loader.micro_batches(step)
        squares = batch.input_ids.double() ** 2
        before_labels = squares[:, :-1][batch.labels[:, 1:] != -100]
        mean = squares[batch.attention_mask != 0].mean() + 3 * before_labels.mean()
        weight = weight - 1e-3 * 2 * weight * mean
    return weight


@pytest.mark.parametrize(("micro_batch_size", "ranks"), [(8, 1), (2, 1), (4, 2)])
def test_loss_is_divided_once_by_the_global_counts(micro_batch_size, ranks):
    """AdamW hardly sees the scale of a gradient, so that equal students on one rank and on two do not show it."""
    weight, trainer = make_trainer(micro_batch_size)
    # The engine's average over the ranks is undone.
    backward = trainer.engine.backward
    trainer.engine.backward = lambda loss: backward(loss / ranks)
    with replace(WORLD, size=ranks).entered():
        trainer.run(0, [])
    torch.testing.assert_close(weight.detach(), naive(), rtol=1e-12, atol=0)


def test_every_step_and_rank_draws_its_own_random_numbers():
    def drawn(rank, start):
        _, trainer = make_trainer(8)
        values, numbers = trainer.student.values, []
        trainer.student = Student(lambda batch: numbers.append(torch.rand(()).item()) or values(batch))
        with replace(WORLD, rank=rank).entered():
            trainer.run(start, [])
        return numbers

    whole = drawn(0, 0)
    assert len({*whole, *drawn(1, 0)}) == 8
    assert drawn(0, 2) == whole[2:]  # a resumed run goes on as it would have


def test_validation_loss_is_the_mean_over_all_answer_tokens(tmp_path):
    _, trainer = make_trainer(4)
    model = tiny_model("llama").double()
    trainer.student = tap_student(make_sft(), model)
    items = [Encoded([1, 2], [3, 4]), Encoded([5], [6, 1, 2]), Encoded([2, 3, 4], [5])]
    make = partial(collate, pad_token_id=0)
    of_ranks = ((0, 1), (0, 3), (1, 3), (2, 3))
    dealt = [scoring_batches(items, make, batch_size=2, rank=rank, world_size=size) for rank, size in of_ranks]
    shares = [[batch for _, batch in each] for each in dealt]
    assert [len(share) for share in shares] == [2, 1, 1, 1]
    expected = []
    for item in items:
        ids = item.prompt_ids + item.response_ids
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1).detach()
        expected += [-float(log_probs[place - 1, ids[place]]) for place in range(len(item.prompt_ids), len(ids))]
    mean = pytest.approx(sum(expected) / len(expected), rel=1e-10)
    assert Validation(trainer, shares[0], make_sft(), tmp_path).loss() == mean
    assert trainer.engine.modes == ["eval", "train"]
    # A rank that has nothing left goes through the motions, and counts nothing.
    batches = [batch for share in shares[1:] for batch in share]
    assert Validation(trainer, batches, make_sft(), tmp_path).loss() == mean


def test_validation_checkpoints_and_rows_of_the_log_come_where_they_are_due(tmp_path, monkeypatch):
    _, trainer = make_trainer(8, steps=5)
    trainer.settings = replace(trainer.settings, validate_every=2, log_every=3, save_every=3)
    saved, save = [], "llmdistill.training.callbacks.saving.save_checkpoint"
    monkeypatch.setattr(save, lambda _, folder, step, *__, **___: saved.append(step))
    validation = Validation(trainer, [object()], trainer.method, tmp_path)
    monkeypatch.setattr(Validation, "loss", lambda self: 0.5)
    train(trainer, tmp_path, validation)
    rows = log_rows(tmp_path)
    assert [(row["step"], row.get("valid_loss")) for row in rows] == [(2, 0.5), (3, None), (4, 0.5), (5, 0.5)]
    assert saved == [3, 5]
    assert sum(row["tokens"] for row in rows) == sum(
        int(batch.attention_mask.sum()) for step in range(5) for batch in trainer.loader.micro_batches(step)
    )
    assert all(row["peak_memory_bytes"] > 10**6 for row in rows)


def test_a_run_whose_validation_overflows_goes_on_with_a_lower_learning_rate(tmp_path, monkeypatch):
    _, trainer = make_trainer(8)
    validation = Validation(trainer, [object()], trainer.method, tmp_path)
    monkeypatch.setattr(Validation, "loss", lambda _: math.inf)
    with pytest.raises(UserError, match=r"the validation loss is inf at step 4, .*a lower train\.learning_rate"):
        train(trainer, tmp_path, validation)
    assert json.loads((tmp_path / "not_finite/ended.json").read_text()) == {"step": 4, "learning_rate": 1e-3}


def test_a_row_has_the_means_of_the_applied_steps_without_another_sum_over_the_ranks(tmp_path, monkeypatch):
    _, trainer = make_trainer(4, steps=6)
    trainer.engine.backward = lambda loss: None
    trainer.settings = replace(trainer.settings, log_every=4, save_every=None)
    terms = []
    for step in range(6):
        losses, _ = trainer.train_step(trainer.loader.micro_batches(step))
        terms.append(losses.sum(0).tolist())
    trainer.engine.count, trainer.engine.skips = 0, (2, 5)
    sums = []
    for module in ("trainer", "callbacks.finite", "callbacks.log_rows"):
        monkeypatch.setattr(f"llmdistill.training.{module}.all_reduce_sum", lambda each: sums.append(each) or each)
    train(trainer, tmp_path)
    rows = log_rows(tmp_path)
    assert [row["step"] for row in rows] == [4, 6]
    for row, steps in zip(rows, ((1, 3, 4), (6,)), strict=True):
        for number, name in enumerate(("all", "labeled")):
            assert row[name] == pytest.approx(sum(terms[step - 1][number] for step in steps) / len(steps), rel=1e-12)
        assert row["loss"] == row["all"] + 3 * row["labeled"]
    # The counts of each step, the terms of each applied one, and the positions of each row.
    assert len(sums) == 6 + 4 + len(rows)
    assert not (tmp_path / "checkpoints").exists()
