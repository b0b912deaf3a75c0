"""The quick form of scripts/torture.sh: some of its cases, and that it sees what it is there to see."""

import shutil

import pytest
from torture import page
from torture_bytes import TARGETS, Damaged, bytes_flipped
from torture_child import Fault, phase_of
from torture_faults import kills, slots
from torture_results import Tally, differences, left_behind, move_records
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
    tally = kills(shop, [number_of(*case)])
    assert tally.failures == []
    assert not dict(tally.figures)["kills"].startswith("0")


def test_a_full_disk_leaves_the_former_checkpoint_and_the_run_goes_on(shop, tmp_path):
    train, folder = SCENARIOS["train"], tmp_path / "full"
    folder.mkdir()
    changes = shop.changes(train, 1, 0)
    # The second checkpoint's file of weights.
    place = next(n for n, (event, path) in enumerate(changes, 1) if event == "write" and "/step-4/" in path)
    assert phase_of(changes[place - 1]) == "saving"
    done = shop.run(train, folder, ranks=1, fault=Fault("full", change=place))
    assert (done.code, "Traceback" in done.said) == (2, False)
    assert "rank-00000.safetensors: no space left on device for its " in done.errors
    assert (folder / "run/checkpoints/step-2/manifest.json").is_file()
    assert shop.run(train, folder, ranks=1).code == 0
    assert verdict(shop, train, 1, folder) == []


def test_flipped_bytes_are_named_and_one_that_nothing_looks_at_is_reported(shop, tmp_path):
    answers = next(target for target in TARGETS if target.name == "answers, same command")
    folder = tmp_path / "more"
    shutil.copytree(answers.make(shop), folder)
    (folder / "more.bin").write_text("{}")
    beside = Damaged("a file that no command knows", lambda _: folder, answers.scenario, within="more", finished=True)
    tally = bytes_flipped(shop, targets=(answers, beside))
    assert dict(tally.figures)["bytes"] == "4 in 4 runs, of which 2 survived"
    assert dict(tally.figures)["  answers, same command"] == "2 named"
    assert all("more.bin" in failure for failure in tally.failures)


def test_what_differs_is_seen(shop, tmp_path):
    whole = shop.reference(SCENARIOS["train"], 1)
    folder = tmp_path / "changed"
    shutil.copytree(whole, folder)
    move_records(folder, whole)
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
