"""What `llmdistill push` gives to the hub, for which a stand-in with the documented interface of HfApi speaks."""

from types import SimpleNamespace

import huggingface_hub
import pytest

from llmdistill.artifacts import write_manifest
from llmdistill.cli import main

FILES = ("config.json", "model.safetensors", "tokenizer.json", "modules.json", "README.md")
NOT_PUSHED = ("teacher_cache.safetensors.tmp", "optimizer.pt", "notes.txt", ".env", "manifest.json")


@pytest.fixture
def run(tmp_path):
    """The folder of a run as it is after its end, with what must stay here."""
    folder = tmp_path / "run"
    student = folder / "student"
    student.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    for name in ("inputs", "checkpoints", "predictions"):
        (folder / name).mkdir()
        (folder / name / "data.json").write_text("secret")
    for name in (*FILES, *NOT_PUSHED):
        (student / name).write_text("{}")
    for name in ("1_Pooling", "cache"):
        (student / name).mkdir()
        (student / name / "config.json").write_text("{}")
    (student / "README.md").write_text('---\n---\nmodel = load("USER/NAME")\n')
    write_manifest(student)
    return folder


@pytest.fixture
def hub(monkeypatch):
    """What the stand-in was asked for: the repositories, and the content of each file by its name."""
    seen = SimpleNamespace(repositories=[], files={}, error=None)

    class Api:
        def __init__(self, **_):
            pass

        def create_repo(self, repo_id, *, private=None, exist_ok=False):
            if seen.error is not None:
                raise seen.error
            seen.repositories.append((repo_id, private, exist_ok))
            return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

        def create_commit(self, repo_id, operations, *, commit_message):
            for each in operations:
                with each.as_file() as file:
                    seen.files[each.path_in_repo] = file.read()
            return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    return seen


def test_a_runs_student_is_pushed_and_nothing_else(run, hub, capsys):
    assert main(["push", str(run), "us/small", "--private"]) == 0
    assert hub.repositories == [("us/small", True, True)]
    assert hub.files.keys() == {*FILES, "1_Pooling/config.json"}
    assert b'load("us/small")' in hub.files["README.md"]
    assert 'load("USER/NAME")' in (run / "student" / "README.md").read_text(), "the card here stays as it is"
    assert "https://hub/us/small/commit/1" in capsys.readouterr().out
    # A name without owner is the user's own.
    assert main(["push", str(run / "student"), "small"]) == 0
    assert hub.repositories[1:] == [("small", None, True)]
    assert b'load("me/small")' in hub.files["README.md"]
    hub.error = OSError("403 Forbidden:\n you may not create us/small")
    assert main(["push", str(run), "us/small"]) == 2
    error = capsys.readouterr().err
    assert "403 Forbidden: you may not create us/small" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("name", "token", "said"), [("a b", "hf_x", "no repository's name"), ("a/b", None, "hf auth")])
def test_with_a_bad_name_or_no_token_nothing_is_asked(run, hub, capsys, monkeypatch, name, token, said):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    assert main(["push", str(run), name]) == 2
    assert said in capsys.readouterr().err
    assert hub.repositories == []


def test_a_folder_without_a_whole_model_stays_here(run, hub, capsys):
    weights = run / "student" / "model.safetensors"
    weights.write_text("{]")
    for change, said in (
        (weights.unlink, "model.safetensors changed"),
        (lambda: (run / "student").rename(run / "gone"), "it has no weights"),
        (lambda: None, "no student yet"),
    ):
        assert main(["push", str(run), "us/small"]) == 2
        assert said in capsys.readouterr().err
        change()
    assert hub.repositories == []
