from hostile import refuses

from llmdistill.commands.evaluate import build_parser, chosen_sets
from llmdistill.tasks.instruction_sets import suite_sets


def test_sets_by_name_come_from_the_hub_or_the_package():
    found = suite_sets("dolly, vicuna,seen", None)
    assert list(found) == ["dolly", "vicuna", "seen"]
    assert found["dolly"].startswith("hf://datasets/MiniLLM/")
    assert found["seen"] == "embedded:seen"
    refuses("no set 'squad' (there are dolly, self_inst", suite_sets, "dolly,squad", None)


def test_a_folder_holds_them_by_name(tmp_path):
    for name in ("dolly_sample.jsonl", "vicuna.jsonl", "vicuna_old.jsonl"):
        (tmp_path / name).touch()
    assert suite_sets("dolly,vicuna,seen", tmp_path) == {
        "dolly": str(tmp_path / "dolly_sample.jsonl"),
        "vicuna": str(tmp_path / "vicuna.jsonl"),
        "seen": "embedded:seen",
    }
    refuses("no self_inst.jsonl (there is dolly_sample.jsonl, vicuna.jsonl", suite_sets, "self_inst", tmp_path)


def test_suite_and_files_together():
    def chosen(*words):
        return chosen_sets(build_parser("evaluate").parse_args(["--model", "m", *words]))

    assert chosen("--suite", "seen", "--data", "a/mine.jsonl") == {"seen": "embedded:seen", "mine": "a/mine.jsonl"}
    refuses("both have a set called seen", chosen, "--suite", "seen", "--data", "a/seen.jsonl")
    refuses("--data is missing", chosen)
