"""The parts of gpu_check that train, in their small form on gloo ranks."""

import json

import pytest
from benching import Line
from gpu_check import holds

pytestmark = pytest.mark.slow


@pytest.fixture
def look(rank_server, tmp_path):
    """The lines of a part, by the names of their measures."""

    def run(part: str, *, ranks: int = 1) -> dict[str, Line]:
        told = tmp_path / f"{part}.jsonl"
        words = ["--part", part, "--device", "cpu", "--told", str(told)]
        done = rank_server.run(words, ranks=ranks, program="scripts/gpu_check/gpu_check.py")
        assert done.returncode == 0, done.stderr
        lines = [Line(**json.loads(line)) for line in told.read_text().splitlines()]
        assert len(lines) == len({line.measure for line in lines}), "only one rank tells"
        assert not [line for line in lines if not holds(line)]
        return {line.measure: line for line in lines}

    return run


def test_each_part_finds_what_it_looks_for(look):
    lines = look("zero", ranks=2)
    assert all(line.value < 1e-6 for name, line in lines.items() if "in fp32" in name)
    # bf16 is rounded, so that a difference of nothing would be that of two runs in fp32.
    assert all(line.value > 1e-4 for name, line in lines.items() if "in bf16" in name)
    assert len(lines) == 7
    lines = look("waits")
    assert len(lines) == 3
    assert all("look at the norm 0" not in line.detail for line in lines.values())
    assert all("elsewhere in DeepSpeed 0" in line.detail for line in lines.values()), "only DeepSpeed waits"
    assert len(look("memory")) == 2
