"""On a GPU that is simulated, work gives what it gives on a CPU, and the host asks it for no value of a batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "simulated_gpu.py"


@pytest.fixture(scope="module")
def found():
    """What the script found, in a process of its own, which its backend needs."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_results_are_those_of_a_cpu(found):
    assert found["answer"]["gpu"] == found["answer"]["cpu"]
    for name in ("start", "kd", "makd", "rows of two teachers", "compare", "score"):
        assert found[name]["gpu"] == pytest.approx(found[name]["cpu"], rel=1e-2), name
    assert found["compress"]["gpu"] == pytest.approx(found["compress"]["cpu"], rel=0.05), "rounding may change a rank"


@pytest.mark.parametrize("name", ["kd", "makd", "rows of two teachers", "score"])
def test_a_batch_asks_for_no_value(found, name):
    # Without a line of the package: what the script itself reads of the losses.
    assert set(found[name]["waits of 4"]) == {""}


def test_the_start_asks_as_often_for_four_batches_as_for_two(found):
    assert found["start"]["waits of 4"] == found["start"]["waits of 2"]


def test_sampling_asks_once_a_token(found):
    """As transformers' generate does, to see whether all rows have ended."""
    assert not [place for place in found["answer"]["waits of 4"] if "row_draws" in place]
