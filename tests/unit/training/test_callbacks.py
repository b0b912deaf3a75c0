"""Callbacks declare what they read and give of a step, and the order of a list follows from that."""

import ast
import dataclasses
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch

from llmdistill.config import TrainConfig
from llmdistill.training.callbacks.base import TrainState, check_order
from llmdistill.training.callbacks.best import BestStudent
from llmdistill.training.callbacks.finite import FiniteSteps
from llmdistill.training.callbacks.health import Health
from llmdistill.training.callbacks.log_rows import LogRows
from llmdistill.training.callbacks.loss_watch import LossWatch
from llmdistill.training.callbacks.saving import Checkpoints
from llmdistill.training.callbacks.server import ServerAnswers
from llmdistill.training.callbacks.stopping import Stopping
from llmdistill.training.callbacks.uneven_terms import UnevenTerms
from llmdistill.training.callbacks.validation import Validation
from llmdistill.training.own_answers import OwnAnswers

IN_ORDER = (
    *(Stopping, ServerAnswers, FiniteSteps, LossWatch, UnevenTerms, OwnAnswers, Validation, BestStudent, LogRows),
    Checkpoints,
)
FIELDS = {field.name for field in dataclasses.fields(TrainState)}


def fields_behind(name):
    """The fields that a property or method of TrainState reads, where nothing is due and nothing ends the training."""
    read = set()

    class Recording(TrainState):
        def __getattribute__(self, attribute):
            read.update({attribute} & FIELDS)
            return super().__getattribute__(attribute)

    settings = TrainConfig(steps=10, save_every=7, validate_every=7, log_every=7)
    nothing = torch.zeros(0)
    state = Recording(settings=settings, step=1, micro_batches=[], losses=nothing, counts=nothing, was_applied=True)
    read.clear()
    value = getattr(state, name)
    if callable(value):
        value(7)
    return read


@pytest.mark.parametrize("callback", IN_ORDER)
def test_a_callback_touches_what_it_declares(callback):
    tree = ast.parse(textwrap.dedent(inspect.getsource(callback)))
    touched = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "state"
    ]
    added_to = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    given = {node.attr for node in touched if isinstance(node.ctx, ast.Store) or node in added_to}
    changed = {
        node.target.attr for node in ast.walk(tree) if isinstance(node, ast.AugAssign) and node.target in touched
    }
    loaded = [node for node in touched if isinstance(node.ctx, ast.Load) and node not in added_to]
    read = set().union(*(fields_behind(node.attr) for node in loaded))
    assert {*callback.gives} == given
    assert {*callback.reads} == read | changed
    assert given | read <= FIELDS


def made(*classes):
    """The callbacks without their objects: an order is a matter of classes."""
    return [object.__new__(callback) for callback in classes]


def test_the_order_of_a_run_is_right():
    check_order(made(*IN_ORDER))
    check_order(made(Stopping, ServerAnswers, Health, OwnAnswers, Validation, BestStudent, LogRows, Checkpoints))


def test_health_is_what_its_watches_read_and_give():
    watches = (FiniteSteps, LossWatch, UnevenTerms)
    given = {field for watch in watches for field in watch.gives}
    assert {*Health.gives} == given
    assert {*Health.reads} == {field for watch in watches for field in watch.reads} - given
    order = []
    watch = lambda name: SimpleNamespace(after_step=lambda state: order.append((name, state)))  # noqa: E731
    Health([watch("first"), watch("second")], {}).after_step("a step")
    assert order == [("first", "a step"), ("second", "a step")]


@pytest.mark.parametrize(
    ("first", "then", "field"),
    [
        (FiniteSteps, Stopping, "signal"),
        (FiniteSteps, ServerAnswers, "failure"),
        (LossWatch, FiniteSteps, "known_terms"),
        (Validation, FiniteSteps, "is_finite"),
        (Validation, Health, "is_finite"),
        (Health, ServerAnswers, "failure"),
        (BestStudent, Validation, "validation"),
        (LogRows, LossWatch, "lowest_loss"),
        (LogRows, OwnAnswers, "measures"),
        (Checkpoints, LogRows, "is_logged"),
    ],
)
def test_a_callback_before_one_that_it_reads_is_refused(first, then, field):
    named = f"{first.__name__} reads .*{field}.*, which {then.__name__} gives"
    with pytest.raises(AssertionError, match=named):
        check_order(made(first, then))


def test_two_callbacks_add_figures_but_set_no_field_both():
    adds = [SimpleNamespace(reads=(), gives=("measures",)) for _ in range(2)]
    check_order(adds)
    with pytest.raises(AssertionError, match="both give is_logged: the second would overwrite the first"):
        check_order([SimpleNamespace(reads=(), gives=("is_logged",)) for _ in range(2)])
