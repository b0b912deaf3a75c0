"""An evaluation that is stopped goes on from the answers that had ended."""

import json

import pytest
import torch

from llmdistill import errors
from llmdistill.commands import evaluate
from llmdistill.generation import decode
from llmdistill.generation.kept_answers import KeptAnswers
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer

TEMPLATE = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
REQUEST = {"model": "sha256:1", "settings": {"decoding": "sample"}}


@pytest.fixture
def run(teacher, data, tmp_path):
    """Scores the teacher on six prompts with two seeds; returns the exit code."""
    sets = ["--data", str(data), "--limit", "6", "--batch_size", "2", "--decoding", "sample", "--seeds", "[3,5]"]
    lengths = ["--max_prompt_length", "60", "--max_length", "70"]
    return lambda name, *more: evaluate.main(
        ["--model", str(teacher), *sets, *lengths, "--output", str(tmp_path / name), *more]
    )


@pytest.fixture
def score(run, tmp_path):
    """Scores to the end; returns the score and the text of the predictions."""

    def scored(name, *more):
        assert run(name, *more) == 0
        files = {path.name: path.read_text() for path in (tmp_path / name).iterdir() if path.is_file()}
        assert files.keys() == {"metrics.json", "prompts.jsonl"}
        assert not (tmp_path / name / "prompts.parts").exists()
        return json.loads(files["metrics.json"])["sets"]["prompts"], files["prompts.jsonl"]

    return scored


@pytest.fixture
def stop_after(monkeypatch):
    """Let the scoring end after so many answers, as Ctrl-C ends it; returns the list of those generated."""
    add = KeptAnswers.add

    def stop(count):
        made = []

        def kept(self, seed, index, *rest):
            made.append((seed, index))
            add(self, seed, index, *rest)
            if len(made) == count:
                raise errors.Stopped(2)

        monkeypatch.setattr(KeptAnswers, "add", kept)
        return made

    return stop


def test_a_stopped_scoring_goes_on_with_the_same_answers(run, score, stop_after, capsys):
    whole, predictions = score("whole")
    before = stop_after(8)
    assert run("parts") == 130
    assert "the same command goes on from what is finished" in capsys.readouterr().err
    after = stop_after(None)
    again, predictions_again = score("parts")
    assert len(before) == 8
    assert sorted(before + after) == [(seed, index) for seed in (3, 5) for index in range(6)]
    assert predictions_again == predictions
    ratio = ["tokens_per_second"]
    assert {**again, **dict.fromkeys(ratio)} == {**whole, **dict.fromkeys(ratio)}
    said = capsys.readouterr().err
    assert "6 of 6 answers are there already" in said
    assert "2 of 6 answers are there already" in said


@pytest.mark.parametrize("changed", [["--limit", "5"], ["--decoding", "greedy"], ["--no_repeat_ngram_size", "3"]])
def test_answers_to_another_request_are_made_again(run, score, stop_after, changed):
    stop_after(4)
    assert run("new") == 130
    stop_after(None)
    assert score("new", *changed)[1] == score("else", *changed)[1]


@pytest.mark.parametrize(("file", "before", "after"), [
    ("generation_config.json", {"eos_token_id": 0}, {"eos_token_id": list(range(3, 9))}),
    ("chat_template.jinja", TEMPLATE, TEMPLATE.replace("{{", "red {{")),
])  # fmt: skip
def test_answers_of_a_model_whose_prompt_or_end_has_changed_are_made_again(
    teacher, run, score, stop_after, file, before, after
):
    write = lambda value: (teacher / file).write_text(value if isinstance(value, str) else json.dumps(value))  # noqa: E731
    write(before)
    first = score("before")[1]
    stop_after(4)
    assert run("new") == 130
    stop_after(None)
    write(after)
    again = score("new")[1]
    assert again == score("else")[1]
    assert again != first


def test_half_a_line_is_answered_again_and_the_seconds_go_on(tmp_path):
    kept = KeptAnswers(tmp_path / "parts", REQUEST)
    assert kept.read([0, 1]) == ({}, 0.0)
    kept.add(0, 2, [5, 6], 1.5)
    kept.add(1, 2, [7], 2.5)
    file = tmp_path / "parts" / "rank-0.jsonl"
    with file.open("a") as opened:
        opened.write('{"seed": 1, "ind')
    assert kept.read([0, 1]) == ({(0, 2): [5, 6], (1, 2): [7]}, 2.5)
    assert kept.read([0]) == ({(0, 2): [5, 6]}, 1.5)
    kept.add(1, 0, [8], 3.5)
    (tmp_path / "parts" / "rank-3.jsonl").write_text(file.read_text().splitlines()[0].replace("2", "9") + "\nnone\n")
    assert kept.read([0, 1]) == ({(0, 2): [5, 6], (0, 9): [5, 6], (1, 2): [7], (1, 0): [8]}, 3.5)
    assert KeptAnswers(tmp_path / "parts", {**REQUEST, "model": "sha256:2"}).read([0, 1]) == ({}, 0.0)


def test_the_time_of_a_pass_is_that_of_all_its_parts(teacher, tmp_path):
    kept = KeptAnswers(tmp_path / "parts", REQUEST)
    kept.read([0])
    kept.add(0, 0, [1], 1_000.0)
    kept.add(1, 0, [1], 5_000.0)
    model, tokenizer = load_model(teacher, dtype=torch.float32), load_tokenizer(teacher)
    settings = decode.Decoding(sample=False, max_prompt_length=8, max_length=12)
    [result] = decode.generate_passes(model, tokenizer, [[1, 2], [3]], settings, seeds=[0], kept=kept)
    assert 1_000 < result.seconds < 2_000
