"""The quick form of scripts/torture.sh: some of its cases, and that it sees what it is there to see."""

import shutil

import pytest
from torture import page
from torture_child import Fault, phase_of
from torture_faults import slots, tried
from torture_results import Tally, differences, left_behind
from torture_runs import SCENARIOS, Shop, verdict

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shop(rank_server, tmp_path_factory):
    return Shop(tmp_path_factory.mktemp("torture"), seed=1, servers=[rank_server])


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


@pytest.mark.parametrize(
    "case", [("train", 1, "rank 0", "change"), ("generate", 2, "rank 1", "mark"), ("export", 0, "rank 0", "change")]
)
def test_killed_runs_end_as_undisturbed_ones(shop, case):
    tally = tried(shop, "kills", [number_of(*case)])
    assert tally.failures == []
    assert not dict(tally.figures)["kills"].startswith("0")


@pytest.mark.parametrize("number", [1, 2])  # a rollout on one rank, a remote teacher on two
def test_runs_whose_server_was_lost_end_as_undisturbed_ones(shop, number):
    tally = tried(shop, "servers", [number])
    assert tally.failures == []
    assert dict(tally.figures)["servers"].startswith("1 ")


def test_a_full_disk_leaves_the_former_checkpoint_and_the_run_goes_on(shop, tmp_path):
    train, folder = SCENARIOS["train"], tmp_path / "full"
    folder.mkdir()
    changes = shop.changes(train, 1, 0)
    # The second checkpoint's file of weights.
    place = next(n for n, change in enumerate(changes, 1) if change.startswith("write ") and "/step-4/" in change)
    assert phase_of(changes[place - 1]) == "saving"
    done = shop.run(train, folder, ranks=1, fault=Fault("full", change=place))
    assert (done.code, "Traceback" in done.said) == (2, False)
    assert "rank-00000.safetensors: no space left on device for its " in done.errors
    assert (folder / "run/checkpoints/step-2/manifest.json").is_file()
    assert shop.run(train, folder, ranks=1).code == 0
    assert verdict(shop, train, 1, folder) == []


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
    wrong = verdict(shop, SCENARIOS["train"], 1, folder)
    for part in ("metrics.jsonl has the steps", "model.safetensors differs", "student.json is missing"):
        assert any(part in each for each in wrong), part
    assert left_behind(whole, folder) == ["run/.student.abc"]


def test_the_page_repeats_failures():
    tally = Tally("kills", [("SIGKILLs", "3, of which 2 survived")], ["kills --case 7 (train): exit code 2"])
    assert "scripts/torture.sh --seed 5 --only kills --case 7" in page([tally], seconds=60, seed=5)
