"""Functions whose results are kept under a key of their arguments."""

import gc
import weakref

import pytest

from llmdistill.memo import cached_by


class Config(dict):
    """A dict can be neither a key of a cache nor the target of a weak reference."""


def test_a_result_is_kept_for_each_key_and_its_arguments_are_not() -> None:
    calls = []

    @cached_by(lambda config, scale=1: (config["size"], scale), most=2)
    def area(config: Config, scale: int = 1) -> int:
        calls.append(config["size"])
        if config["size"] < 0:
            raise ValueError("no size")
        return scale * config["size"] ** 2

    first = Config(size=3, name="a")
    assert (area(first), area(Config(size=3, name="b")), area(Config(size=3), scale=2)) == (9, 9, 18)
    assert calls == [3, 3]
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    # The third key replaces the one that was not asked for longest; an exception is raised each time.
    assert [area(Config(size=size)) for size in (4, 3)] == [16, 9]
    assert calls == [3, 3, 4, 3]
    for _ in range(2):
        with pytest.raises(ValueError, match="no size"):
            area(Config(size=-1))
    assert calls[-2:] == [-1, -1]
    assert area.__name__ == "area"
