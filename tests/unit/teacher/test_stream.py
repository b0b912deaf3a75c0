"""Whether the teacher runs ahead, decided from made-up measurements; and the order of the calls, on made-up streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmdistill.batch import Batch, HeadInputs, Outputs, Taps
from llmdistill.teacher.stream import AheadTrial, StreamedTeacher, tensors_of

GIB = 2**30
DEVICE = torch.device("cuda:0")


def run(
    trial: AheadTrial, *, without: float, beside: float, peak: int, teacher: int, beside_peak: int = 0
) -> list[bool]:
    """Feed a trial until it is decided; which steps ran ahead."""
    steps = []
    while not trial.is_decided:
        steps.append(trial.ahead)
        noise = 1 + 0.3 * (len(steps) % 5 == 0)  # a slow step now and then
        seconds = (beside if trial.ahead else without) * noise
        trial.step_done(seconds, beside_peak if trial.ahead else peak, teacher)
        assert len(steps) < 100
    return steps


def test_ahead_where_it_fits_and_is_faster() -> None:
    trial = AheadTrial(40 * GIB)
    steps = run(trial, without=1.0, beside=0.9, peak=20 * GIB, teacher=5 * GIB, beside_peak=24 * GIB)
    assert steps == [False] * 8 + [True] * 6
    assert trial.ahead
    assert trial.report == (
        "the teacher runs ahead on a stream of its own: steps of 900 ms with it ahead, 1000 ms without"
    )


def test_not_ahead_where_it_is_hardly_faster() -> None:
    trial = AheadTrial(40 * GIB)
    run(trial, without=1.0, beside=0.99, peak=20 * GIB, teacher=5 * GIB, beside_peak=24 * GIB)
    assert not trial.ahead
    assert "on the student's stream: steps of 990 ms" in str(trial.report)


def test_not_even_tried_where_it_may_not_fit() -> None:
    trial = AheadTrial(40 * GIB)
    steps = run(trial, without=1.0, beside=0.1, peak=35 * GIB, teacher=5 * GIB)
    assert not any(steps)
    assert not trial.ahead
    assert "up to 40.0 GiB of the 38.0 GiB" in str(trial.report)


def test_not_ahead_where_the_trial_took_more_than_foreseen() -> None:
    trial = AheadTrial(40 * GIB)
    run(trial, without=1.0, beside=0.5, peak=20 * GIB, teacher=5 * GIB, beside_peak=39 * GIB)
    assert not trial.ahead


def test_one_rank_that_does_not_want_it_decides_for_all() -> None:
    asked = []

    def agree(wanted: bool) -> bool:
        asked.append(wanted)
        return wanted and len(asked) < 2

    trial = AheadTrial(40 * GIB, agree=agree)
    run(trial, without=1.0, beside=0.5, peak=GIB, teacher=GIB, beside_peak=GIB)
    assert asked == [True, True]
    assert not trial.ahead


def test_what_is_decided_stays() -> None:
    trial = AheadTrial(40 * GIB)
    run(trial, without=1.0, beside=0.5, peak=GIB, teacher=GIB, beside_peak=GIB)
    report = trial.report
    for _ in range(20):
        trial.step_done(9.0, 40 * GIB, 40 * GIB)
    assert trial.ahead
    assert trial.report == report


class Streams:
    """torch.cuda as far as it is used, which only notes what happens, and where."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current = "main"
        self.peak = 0
        self.Stream = lambda device: self._stream("side")
        self.Event = lambda: SimpleNamespace(record=lambda stream: self.calls.append(("record", stream.name)))

    def _stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.calls.append((name, "waits for stream", other.name)),
            wait_event=lambda event: self.calls.append((name, "waits for event")),
        )

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self._stream(self.current)

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(("synchronize",))

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = 10

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def memory_allocated(self, device: torch.device) -> int:
        return 10


class Teacher:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def teach(self, batch: Batch, *, lm_head: bool) -> Outputs:
        assert self.streams.current == "main" or not torch.is_grad_enabled()
        self.streams.calls.append(("teach", self.streams.current))
        self.streams.peak += 7
        head = HeadInputs(torch.ones(2, 3), torch.ones(4, 3), None)
        return Outputs(None, Taps(hidden={0: torch.ones(1)}, projected={"value": {1: torch.ones(1)}}), lm_head=head)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    fake = Streams()
    for name in (
        "Stream",
        "Event",
        "current_stream",
        "stream",
        "synchronize",
        "reset_peak_memory_stats",
        "max_memory_allocated",
        "memory_allocated",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _self, stream: fake.calls.append(("used by", stream.name)), raising=False
    )
    return fake


def make_batch() -> Batch:
    ids = torch.ones(1, 3, dtype=torch.long)
    return Batch(ids, ids, ids)


def test_what_was_started_is_waited_for_on_the_device(streams: Streams) -> None:
    teacher = StreamedTeacher(Teacher(streams), DEVICE, AheadTrial(GIB, ahead=True, report="decided"))
    batch = make_batch()
    teacher.start(batch, lm_head=True)
    assert streams.calls == [
        ("side", "waits for stream", "main"),
        ("teach", "side"),
        ("record", "side"),
        *[("used by", "side")] * 3,  # the batch
    ]
    streams.calls.clear()
    outputs = teacher.teach(batch, lm_head=True)
    assert outputs.lm_head is not None
    assert streams.calls == [("main", "waits for event"), *[("used by", "main")] * 4]  # two taps, rows and weight


def test_another_batch_than_the_one_started_is_taught_at_once(streams: Streams) -> None:
    teacher = StreamedTeacher(Teacher(streams), DEVICE, AheadTrial(GIB, ahead=True, report="decided"))
    teacher.start(make_batch(), lm_head=True)
    streams.calls.clear()
    teacher.teach(make_batch(), lm_head=True)
    assert streams.calls == [("teach", "main")]


def test_nothing_is_started_without_the_decision_or_a_batch(streams: Streams) -> None:
    StreamedTeacher(Teacher(streams), DEVICE, AheadTrial(GIB)).start(make_batch(), lm_head=True)
    StreamedTeacher(Teacher(streams), DEVICE, AheadTrial(GIB, ahead=True)).start(None, lm_head=True)
    assert streams.calls == []


def test_steps_are_measured_until_it_is_decided(streams: Streams) -> None:
    trial = AheadTrial(GIB, warm_up=0, trials=1)
    measured = []
    decide = trial.step_done
    trial.step_done = lambda *each: (measured.append(each[1:]), decide(*each))[1]  # type: ignore[method-assign]
    teacher, batches = StreamedTeacher(Teacher(streams), DEVICE, trial), [make_batch(), make_batch()]

    def step() -> int:
        for batch, following in zip(batches, [*batches[1:], None], strict=True):
            teacher.teach(batch, lm_head=True)
            teacher.start(following, lm_head=True)
        return 5

    said = [teacher.step(step) for _ in range(4)]
    assert [result for result, _ in said] == [5] * 4
    # Of the teacher alone, 7, though two of its passes took 14; then one step that is not timed, and one ahead.
    assert measured[0] == (24, 7)
    assert [report is not None for _, report in said] == [False, False, True, False]
    streams.calls.clear()
    teacher.step(step)
    assert ("synchronize",) not in streams.calls


def test_all_tensors_are_found() -> None:
    one, two, three = (torch.ones(1) for _ in range(3))
    outputs = Outputs(one, Taps(query={4: two}, scaling={4: 0.5}), tensors=(three,))
    assert [id(each) for each in tensors_of(outputs)] == [id(one), id(two), id(three)]
