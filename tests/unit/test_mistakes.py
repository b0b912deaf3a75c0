"""What newcomers get wrong (scripts/torture/mistakes.yaml): one sentence that names the remedy, exit code 2."""

import importlib.util

import pytest
from pages import ROOT

SPEC = importlib.util.spec_from_file_location("mistakes", ROOT / "scripts" / "torture" / "mistakes.py")
assert SPEC is not None
assert SPEC.loader is not None
mistakes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mistakes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mistakes")
    mistakes.prepare(made)
    return made


@pytest.mark.parametrize("part", mistakes.parts(), ids=lambda part: part["what"])
def test_each_mistake_is_answered_by_one_sentence(folder, part):
    wrong = {}
    for case in part["cases"]:
        code, said = mistakes.answer(case, folder)
        fault = mistakes.fault(case, code, said)
        if fault is not None:
            wrong[case.get("run") or case["python"]] = (fault, said)
    assert not wrong
