"""What all tests share."""

import atexit
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import RankServer

gc.disable()  # until the first test: what is imported and collected for the tests is no garbage
atexit.register(gc.unfreeze)  # nanobind would report as leaks what Python does not free at its end


@pytest.fixture(autouse=True, scope="module")
def quick_collection() -> None:
    """The collection after each run in the tests' own process would otherwise look through all of torch."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def cpu_world():
    """The test runs on the CPU, as a single process, also where there is a GPU."""
    import torch

    from llmdistill.runtime.distributed import World

    with World(rank=0, size=1, device=torch.device("cpu")).entered() as world:
        yield world


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


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens that a test makes stay out of the user's cache; what the tests start inherits the variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMDISTILL_CACHE", str(tmp_path_factory.mktemp("tokens")))
        patch.setenv("TQDM_DISABLE", "1")  # what is slow on busy cores would say so among the lines that tests read
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of the real data."""
    folder = os.environ.get("LLMDISTILL_DATA")
    return Path(folder) if folder else pytest.skip("LLMDISTILL_DATA is unset: it names the folder of the real data")


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Runs the main job and other scripts on one or more ranks without the seconds that a fresh process imports."""
    server = RankServer(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()
