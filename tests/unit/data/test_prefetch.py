import gc
import threading
import time
from dataclasses import replace

import torch
from hostile import refuses

from llmdistill.data.collate import Encoded, collate
from llmdistill.data.sampler import PrefetchingLoader
from llmdistill.errors import UserError

CPU = torch.device("cpu")
STEPS = [[collate([Encoded([step], [number, 99])], 0) for number in range(2)] for step in range(6)]
"""The micro batches of each step."""


def samples(batches):
    """What batches are told apart by: Python 3.13 compares them tensor by tensor, which have no truth value."""
    return [batch.sample_ids for batch in batches]


class Watched:
    """A loader that remembers what it was asked for."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.asked: list[int] = []
        self.alone = threading.Lock()
        self.waits = threading.Event()
        self.waits.set()

    def micro_batches(self, step):
        self.asked.append(step)
        if step == self.fails_at:
            raise UserError("row 7 is bad")
        assert self.alone.acquire(blocking=False), "a loader with a place in a stream was asked by two at a time"
        try:
            assert self.waits.wait(120)
            time.sleep(0.02)
            return list(STEPS[step])
        finally:
            self.alone.release()


def wait_for(condition):
    until = time.monotonic() + 120
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    assert condition()


def test_batches_are_prepared_in_a_thread_and_no_random_number_is_drawn():
    state, threads = torch.random.get_rng_state(), set()

    def transform(batch):
        threads.add(threading.current_thread())
        return replace(batch, labels_are="samples")

    prefetched = PrefetchingLoader(Watched(), steps=len(STEPS), device=CPU, transform=transform)
    for step, expected in enumerate(STEPS):
        batches = prefetched.micro_batches(step)
        assert samples(batches) == samples(expected)
        assert all(batch.labels_are == "samples" for batch in batches)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert threading.current_thread() not in threads


def test_the_next_step_is_made_while_the_caller_works():
    loader = Watched()
    prefetched = PrefetchingLoader(loader, steps=len(STEPS), device=CPU)
    prefetched.micro_batches(0)
    wait_for(lambda: loader.asked == [0, 1])
    loader.waits.clear()
    prefetched.micro_batches(1)  # it comes although the loader now hangs at the one after it
    wait_for(lambda: loader.asked == [0, 1, 2])
    loader.waits.set()


def test_another_step_than_the_next_is_made_anew():
    prefetched = PrefetchingLoader(Watched(), steps=len(STEPS), device=CPU)
    for step in (0, 4, 2, 2, 1):
        assert samples(prefetched.micro_batches(step)) == samples(STEPS[step])


def test_an_error_is_raised_at_its_step_and_again():
    prefetched = PrefetchingLoader(Watched(fails_at=1), steps=len(STEPS), device=CPU)
    prefetched.micro_batches(0)
    for _ in range(2):
        refuses("row 7 is bad", prefetched.micro_batches, 1)
    assert samples(prefetched.micro_batches(2)) == samples(STEPS[2])


def test_the_thread_ends_with_the_loader():
    def running() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]

    gc.collect()
    wait_for(lambda: not running())
    prefetched = PrefetchingLoader(Watched(), steps=len(STEPS), device=CPU)
    prefetched.micro_batches(0)
    assert len(running()) == 1
    del prefetched
    gc.collect()
    wait_for(lambda: not running())
