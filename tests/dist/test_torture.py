"""The quick form of scripts/torture.sh: some of its cases, and that it sees what it is there to see."""

import shutil
import subprocess
from pathlib import Path

import fuzz
import pytest
import torture_child
from torture import page
from torture_faults import kill, slots
from torture_results import Case, counted, differences, left_behind
from torture_runs import SCENARIOS, Shop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shop(rank_server, tmp_path_factory):
    return Shop(tmp_path_factory.mktemp("torture"), [rank_server], seed=1)


def number_of(scenario, ranks, victim, moment):
    wanted = (SCENARIOS[scenario], ranks, victim, moment)
    return next(n for n, each in enumerate(slots()) if (each.scenario, each.ranks, each.victim, each.moment) == wanted)


def test_every_phase_and_victim_has_its_turn():
    every = slots()
    phases = "start factorizing calibrating caching training saving student scoring generating comparing exporting"
    assert {each.phase for each in every} == set(phases.split())
    for phase in ("training", "saving"):
        found = {(each.ranks, each.victim) for each in every if each.phase == phase}
        assert found == {(1, "rank 0"), (2, "rank 0"), (2, "rank 1"), (2, "launcher")}


def test_functions_whose_calls_begin_a_phase_exist():
    for phase in torture_child.MARKS:
        owner, name = torture_child.find_mark(phase)
        assert callable(getattr(owner, name, None)), phase


@pytest.mark.parametrize(
    "case", [("train", 1, "rank 0", "change"), ("generate", 2, "rank 1", "mark"), ("export", 0, "rank 0", "change")]
)
def test_killed_runs_end_as_undisturbed_ones(shop, case):
    killed = kill(shop, number_of(*case))
    assert killed.wrong == []
    assert killed.struck > 0


def test_what_differs_is_seen(shop, tmp_path):
    whole = shop.reference(SCENARIOS["train"], 1)
    folder = tmp_path / "changed"
    shutil.copytree(whole, folder)
    for record in folder.rglob("*.json"):
        record.write_text(record.read_text().replace(str(whole), str(folder)))
    assert differences(whole, folder) == left_behind(whole, folder) == []
    rows = (folder / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "run/metrics.jsonl").write_text("".join([*rows, rows[-1]]))
    weights = folder / "run/student/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (folder / "run/scores/student.json").unlink()
    (folder / "run/.student.abc").write_text("")
    assert shop.verdict(SCENARIOS["train"], 1, folder) == [
        "run/scores/student.json is missing",
        "run/metrics.jsonl differs",
        "run/student/model.safetensors differs",
    ]
    assert left_behind(whole, folder) == ["run/.student.abc"]


def test_the_page_repeats_failures():
    cases = [Case(6, "train", struck=2), Case(7, "train", struck=1, wrong=["exit code 2"])]
    written = page([counted("kills", cases)], seconds=60, seed=5)
    assert "3 in 2 runs, of which 2 survived" in written
    assert "scripts/torture.sh --seed 5 --only kills --case 7 (train): exit code 2" in written


def test_what_a_reader_did_is_told_apart(tmp_path):
    """scripts/torture/fuzz.py finds what a reader may not do."""
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    watch = fuzz.Watch(own)
    (tmp_path / "before").write_text("not watched yet")
    watch.begin()
    (own / "a").write_text("in its folder")
    (own / "a").read_text()
    Path(__file__).read_text()
    watch.end()
    for act in (other.mkdir, lambda: (tmp_path / "b").write_text("x"), lambda: subprocess.run(["true"], check=True)):
        watch.begin()
        act()
        with pytest.raises(AssertionError, match="the reader did"):
            watch.end()
