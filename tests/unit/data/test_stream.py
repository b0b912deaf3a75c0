import gc
from collections import Counter
from dataclasses import fields
from functools import partial
from itertools import chain

import numpy as np
import pytest

from llmdistill.data import stream
from llmdistill.data.collate import Encoded, collate
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits
from llmdistill.data.sampler import Share
from llmdistill.data.stream import ExampleStream, StreamLoader, shuffle
from llmdistill.errors import UserError

from support import ThreadRanks, check_steps, write_rows

SIZE = 10


def write(path, prompts, answer="yes"):
    return write_rows(path, ({"prompt": prompt, "completion": answer} for prompt in prompts))


@pytest.fixture
def numbers(tmp_path):
    return write(tmp_path / "numbers.jsonl", [f"n{number}" for number in range(SIZE)])


@pytest.fixture
def make(word_tokenizer):
    def loader(reference, **changes):
        settings = {"shuffle_buffer": 4, "seed": 3, "global_batch_size": 4, "micro_batch_size": 4}
        given = {**settings, **changes}
        limits = Limits(max_prompt_length=8, max_length=12, long_prompts=given.pop("long_prompts", "error"))
        share = Share(**{each.name: given.pop(each.name) for each in fields(Share) if each.name in given})
        examples = ExampleStream(reference, share.seed, given.pop("shuffle_buffer"))
        return StreamLoader(examples, word_tokenizer(), limits, share, partial(collate, pad_token_id=0), **given)

    return loader


def walked(loader: StreamLoader, steps: int) -> list[str]:
    """The prompts of the first steps, as text."""
    items = chain.from_iterable(chain.from_iterable(loader.micro_batch_items(step) for step in range(steps)))
    return ["".join(loader.tokenizer.convert_ids_to_tokens(item.prompt_ids)) for item in items]


def test_the_buffer_is_what_mixes():
    def order(size: int, seed: int = 0) -> list[int]:
        return list(shuffle(range(1000), size, np.random.default_rng(seed)))

    assert order(1) == list(range(1000)), "one that is held can change places with none"
    assert order(100) != order(100, seed=1)
    moved, moved_if_whole = ([item - place for place, item in enumerate(order(size))] for size in (100, 2000))
    assert max(moved) <= 100, "none comes before it was read"
    assert 50 < np.abs(moved).mean() < 150
    assert np.abs(moved_if_whole).mean() > 250, "one that fits is mixed as a whole"


def test_each_epoch_is_a_permutation_and_batches_straddle_epochs(make, numbers):
    prompts = walked(make(numbers), 15)
    epochs = [prompts[start : start + SIZE] for start in range(0, 60, SIZE)]
    assert all(sorted(epoch) == [f"n{number}" for number in range(SIZE)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6, "each epoch has its own order"
    assert walked(make(numbers, seed=0), 3) != prompts[:12]


@pytest.mark.parametrize("bucket_steps", [1, 3])
def test_seed_and_step_alone_decide(make, numbers, bucket_steps):
    expected = check_steps(make(numbers, bucket_steps=bucket_steps).micro_batch_items)
    assert len(set(map(str, expected))) == 8
    for step in (5, 0, 7):
        resumed = make(numbers, bucket_steps=bucket_steps)
        assert resumed.micro_batch_items(step) == expected[step], "a resumed run goes on as the first"


def test_steps_are_sorted_by_length(make, tmp_path):
    path = write(tmp_path / "a.jsonl", [chr(97 + n) * (1 + n % 8) for n in range(24)])
    loaders = (make(path), make(path, bucket_steps=3))
    for window in (range(3), range(3, 6)):
        walk, steps = ([each.micro_batch_items(step)[0] for step in window] for each in loaders)
        assert Counter(map(str, chain(*steps))) == Counter(map(str, chain(*walk)))
        lengths = [len(item) for items in sorted(steps, key=lambda items: -len(items[0])) for item in items]
        assert lengths == sorted(lengths, reverse=True)


def test_the_set_is_never_held(make, monkeypatch):
    read = 0

    def endless(_, *, streaming):
        nonlocal read
        while True:
            read += 1
            yield {"prompt": f"n{read}", "completion": "yes"}, f"endless:{read}"

    monkeypatch.setattr(stream, "open_rows", endless)
    loader = make("endless", shuffle_buffer=50)
    gc.collect()
    before = _alive()
    for step in (0, 200, 200):  # nor is it walked anew to a step that is asked for again
        loader.micro_batches(step)
        assert read == 50 + 4 * (step + 1)
        gc.collect()
        assert _alive() - before <= 50 + 4 + 2, "the buffer, one global batch, and what is on its way"


def _alive() -> int:
    return sum(isinstance(each, (Example, Encoded)) for each in gc.get_objects())


def on_ranks(make, size, reference, job, **settings):
    """What a job finds with the loader of each rank."""
    settings |= {"world_size": size, "exchange": ThreadRanks(size)}
    return settings["exchange"].run(lambda rank: job(make(reference, rank=rank, **settings)))


class TestSharedAmongRanks:
    @pytest.mark.parametrize(("long_prompts", "bucket_steps"), [("error", 1), ("truncate", 3), ("drop", 3)])
    def test_the_batches_are_those_of_one_rank(self, make, monkeypatch, tmp_path, long_prompts, bucket_steps):
        rows, encode = stream.open_rows, stream.encode
        read, tokenized = Counter[int](), Counter[int]()

        def counted_rows(reference, *, streaming):
            read[ThreadRanks.own.rank] += 1
            return rows(reference, streaming=streaming)

        def counted_encode(examples, *args, **more):
            tokenized[ThreadRanks.own.rank] += len(examples)
            return encode(examples, *args, **more)

        most = 8 if long_prompts == "error" else 11
        path = write(tmp_path / "a.jsonl", [chr(97 + n) * (1 + n % most) for n in range(23)])
        settings = {"long_prompts": long_prompts, "bucket_steps": bucket_steps, "global_batch_size": 12}
        steps = (0, 1, 2, 7, 3)  # forwards, over some, and back

        def walk(loader):
            return [loader.micro_batch_items(step) for step in steps], loader.report()

        alone = make(path, micro_batch_size=12, **settings)
        expected = [alone.micro_batch_items(step)[0] for step in steps]
        monkeypatch.setattr(stream, "open_rows", counted_rows)
        monkeypatch.setattr(stream, "encode", counted_encode)
        for size in (2, 12):
            tokenized.clear()
            found = on_ranks(make, size, path, walk, micro_batch_size=12 // size, **settings)
            assert [list(chain(*(each[0][n][0] for each in found))) for n in range(len(steps))] == expected
            assert {report for _, report in found} == {alone.report()}
            assert set(read) == {0}, "rank 0 alone reads the set"
            if long_prompts == "error":  # otherwise some blocks are of a few examples
                assert len(tokenized) == size
                assert len(set(tokenized.values())) == 1

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            ([f'{{"prompt": "{"b" * n}", "completion": "b"}}' for n in (10, 11, 12)], "prompt has 1[012] tokens"),
            (['{"prompt": "a"}'], r"a\.jsonl:21: the key "),
        ],
    )
    def test_a_mistake_is_that_of_one_rank(self, make, tmp_path, rows, said):
        path = write(tmp_path / "a.jsonl", ["a"] * 20)
        with path.open("a") as file:
            file.write("\n".join(rows))

        def fail(loader: StreamLoader) -> UserError:
            for _ in range(2):  # it fails again, and does not go on after the row
                with pytest.raises(UserError, match=said) as error:
                    loader.micro_batches(3)
            return error.value

        # The last rows are in one batch, in their order.
        settings = {"global_batch_size": 6, "shuffle_buffer": 1}
        alone = fail(make(path, micro_batch_size=6, **settings))
        errors = on_ranks(make, 3, path, fail, micro_batch_size=2, **settings)
        assert {str(error) for error in errors} == {str(alone)}
        assert all(error.everywhere for error in errors)


def test_long_prompts_are_dropped_and_counted(make, tmp_path):
    path = write(tmp_path / "a.jsonl", ["a", "b" * 9, "c" * 8, "d" * 20])
    loader = make(path, long_prompts="drop", global_batch_size=2, micro_batch_size=2)
    for steps in (3, 1):  # and counted anew from the start
        assert Counter(walked(loader, steps)) == {"a": steps, "c" * 8: steps}
    assert loader.report().startswith(f"streamed from {path}, shuffled among 4 examples; so far ")
    loader.micro_batches(3)
    assert 6 <= loader.counts.dropped <= 8
    assert f"so far {loader.counts.dropped} dropped for a long prompt, 0 prompts and 0 responses" in loader.report()


def test_a_set_without_answers_ends_early(make, tmp_path):
    path = write(tmp_path / "a.jsonl", [f"n{number}" for number in range(120)], answer=" ")

    def fail(loader: StreamLoader) -> str:
        loader.micro_batches(8)
        with pytest.raises(UserError) as error:
            loader.micro_batches(9)
        return str(error.value)

    (said,) = set(on_ranks(make, 2, path, fail, global_batch_size=10, micro_batch_size=5))
    assert said.startswith(f"{path}: the answers of the first 100 examples are empty")
