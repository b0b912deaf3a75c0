"""What all tests share."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before the worker reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say what one worker of pytest-xdist takes: a file, whose fixtures are then made once, or all of tests/dist.

    Those start several processes each; two of them at a time would only wait for one another.
    """
    for item in items:
        group = "dist" if "dist" in item.path.parts else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True, scope="session")
def one_process_group():
    """Commands that run in the tests' own process end with its process group in place.

    DeepSpeed keeps what it was first given: after a real end no second command could run in the same process.
    """
    import torch.distributed as dist

    end = dist.destroy_process_group
    dist.destroy_process_group = lambda *_: None
    yield
    dist.destroy_process_group = end
    if dist.is_initialized():
        end()
