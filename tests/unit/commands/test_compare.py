import json

import pytest
from transformers import BertConfig, GPT2Config

from llmdistill.cli import main

TEXT = ["--data.kind", "text", "--data.train", "a.txt", "--data.valid", "v.txt", "--data.tests", "{a: a.txt}"]


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["compare", *arguments, "--dry_run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_dry_run_lists_the_grid_of_each_method(capsys) -> None:
    plan = dry_run(capsys, "--recipe", "quickstart", "--methods", "none,sft,makd", "--seeds", "2", "--sizes", "20,40%")
    titles = [run["title"] for run in plan["runs"]]
    assert titles[0].startswith("teacher and untrained student")
    assert titles[1:4] == [f"SFT learning_rate={rate} seed=0" for rate in ("0.00075", "0.0015", "0.003")]
    assert len(titles) == 1 + 3 + 3 * 2
    assert len({run["folder"] for run in plan["runs"]}) == len(titles)
    assert plan["final_runs"] == 4
    assert plan["sizes"] == ["20", "40%"]
    assert list(plan["counts"].values()) == [1, 9, 2, 2, 2, 4]


def test_a_comparison_on_text_has_the_methods_that_need_no_answers(capsys) -> None:
    plan = dry_run(capsys, "--recipe", "quickstart", *TEXT, "--learning_rates", "1e-3", "--seeds", "1")
    assert {run["title"].split()[0] for run in plan["runs"]} == {"teacher", "SFT", "KD", "MaKD"}


def test_a_suite_runs_on_any_teacher(capsys, tmp_path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    plan = dry_run(capsys, "--recipe", "gpt2_dolly", "--suite", "makd-table5", "--teacher.model", str(tmp_path))
    assert len(plan["runs"]) == 1 + 3 + 6 + 3 + 3 + 6 + 3
    assert all(run["folder"].startswith("runs/compare-gpt2_dolly-makd-table5/trials/") for run in plan["runs"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "sft,makdd"], "there is no method 'makdd'; did you mean makd? (there are"),
        (["--suite", "makd-tabel5"], "no such suite; did you mean makd-table5? (there are makd-table3-decoder"),
        (["--starts", "plain,magic"], "there is no start 'magic' (there are plain, activations, gradients, loss)"),
        (["--learning_rates", "1e-3,-1"], "all over 0"),
        (["--data.tests", "{}"], "data.tests is empty"),
        (["--data.valid", "null"], "data.valid is missing"),
        (["--data.train", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--methods", "kd", "--data.on_policy", "1"], "data.on_policy 1 leaves no labels to learn, but kd.ratio"),
        ([*TEXT, "--teacher.model", "{encoder}"], "is an encoder (bert), which has no perplexity: take a decoder, a"),
        (["--sizes", "9999"], "9999"),
        (["--sizes", "20,40%,20"], "--sizes: 20 is there twice; name it once"),
        ([*TEXT, "--methods", "kd,seqkd"], "seqkd learns from answers that a model writes to instructions"),
        ([*TEXT, "--data.tests.valid", "a.txt"], "data.tests.valid: that name is the validation text's"),
        ([*TEXT, "--data.valid", "v.jsonl"], "data.valid v.jsonl is no plain text (.txt), whose perplexity chooses"),
        (["--recipe", "finetune"], "--recipe finetune has data.kind task, and a comparison scores answers"),
    ],
)
def test_mistakes_are_one_sentence_before_any_run(capsys, tmp_path, arguments, said) -> None:
    BertConfig().save_pretrained(tmp_path)
    words = [each.replace("{encoder}", str(tmp_path)) for each in arguments]
    assert main(["compare", "--recipe", "quickstart", "--output_dir", "runs/never", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    notes = sum(line.startswith("Note        --") for line in error.splitlines())  # on a flag that is given twice
    assert error.count("\n") == 1 + notes
