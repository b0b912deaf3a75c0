"""The checks of a run on one batch: a teacher that knows nothing, a term that is wrong, a term that teaches nothing."""

import json

import pytest
from byte_tokenizers import byte_level
from tiny import save_decoder

from llmdistill import cli, losses
from llmdistill.config.command_line import parse_run
from llmdistill.methods import METHODS
from llmdistill.methods import layers as method_layers
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.planning.checkup import TermSize, check_run, report_terms

SHORT = ("--ds_config", "zero2", "--train.global_batch_size", "4", "--student.factorize.rank", "6")


def findings(*arguments: str) -> dict[str, tuple[str, str]]:
    config, _ = parse_run([*SHORT, *arguments], METHODS)
    return {each.what: (each.state, each.said) for each in check_run(config)}


def test_an_embedded_run_is_sound_and_what_one_process_cannot_do_is_left_out():
    found = findings("--method", "kd", "--teacher.sharding", "zero3")
    assert {state for state, _ in found.values()} == {"ok"}
    assert found.keys() >= {"teacher above chance", "teacher as its own student", "term forward_kl", "term label"}
    shares = [float(said.split(", ")[1].split("%")[0]) for what, (_, said) in found.items() if what.startswith("term ")]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert {state for state, _ in findings("--method", "none").values()} == {"ok"}
    several = ("--student.assistants", "[2x64x4]", "--student.shape", "1x32x4", "--student.factorize.rank", "null")
    assert "failure" not in {state for state, _ in findings("--method", "kd", *several).values()}


def test_a_student_of_few_bits_is_measured_as_it_rounds():
    same = ("--method", "kd", "--student.model", "embedded:teacher", "--student.factorize.rank", "null")
    loss, _, share = findings(*same)["term forward_kl"][1].partition(", ")
    assert float(loss) == pytest.approx(0.0, abs=1e-7)  # of fp32's rounding, whatever the processor's order of sums
    assert share.startswith("0.0% ")
    few_bits = findings(*same, "--student.quantize.weights", "int4")["term forward_kl"]
    assert few_bits[0] == "ok"
    assert float(few_bits[1].split(", ")[0]) > 1e-5


def test_teacher_that_knows_nothing_and_term_that_does_not_vanish_for_the_same_models(tmp_path, monkeypatch):
    # Random weights are certain of wrong answers.
    teacher = ("--teacher.model", str(save_decoder(tmp_path, num_hidden_layers=2, initializer_range=1.0)))
    found = findings(*teacher)
    state, said = found["teacher above chance"]
    assert (state, "at random 6." in said) == ("failure", True)
    assert found["teacher as its own student"][0] == "ok"
    right = losses.matrix_mse
    wrong = lambda student, teacher, *mask, **more: right(student, teacher + 1, *mask, **more)  # noqa: E731
    monkeypatch.setattr(method_layers.losses, "matrix_mse", wrong)
    assert findings(*teacher)["teacher as its own student"][0] == "failure"


def test_what_is_said_of_terms():
    dry = {"good": TermSize(2.0, 3.0), "dead": TermSize(1.0, 0.0), "broken": TermSize(float("nan"), 1.0)}
    found = {each.what: each for each in report_terms(dry)}
    assert found["term good"].said == "2, 75.0% of the gradient"
    assert (found["term dead"].state, found["term broken"].state) == ("warning", "failure")
    assert "weight 0" in str(found["term dead"].remedy)


def test_command_ends_with_code_one_where_a_check_fails(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--teacher.model", "/nowhere", "--json"])
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert found[-1]["state"] == "failure"
    assert found[-1]["remedy"].startswith("/nowhere: no such folder")


def test_a_teacher_with_another_tokenizer_is_compared_in_the_text(tmp_path, capsys):
    tokenizer = byte_level(300)
    save_decoder(tmp_path, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(tmp_path)
    limits = ("--data.max_prompt_length", "400", "--data.max_length", "500", "--data.long_prompts", "drop")
    found = findings("--method", "kd", "--student.model", str(tmp_path), "--student.factorize.rank", "null", *limits)
    assert {state for state, _ in found.values()} == {"ok"}
    assert found.keys() >= {"term forward_kl", "term label"}
    assert "% are compared token by token" in capsys.readouterr().out


def test_a_base_student_under_a_teacher_that_ends_otherwise_is_warned_of(tmp_path, capsys):
    save_decoder(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.eos_token = min(token for token in tokenizer.get_vocab() if token.isalpha())
    tokenizer.save_pretrained(tmp_path)
    words = ["--method", "kd", "--student.model", str(tmp_path), "--student.factorize.rank", "null"]
    state, said = findings(*words)["tokenizers"]
    assert state == "warning"
    assert "does not learn to stop" in said
    assert cli.main(["train", *SHORT[:2], *words, "--dry_run"]) == 0
    assert "Note        the answers that are learned end with" in capsys.readouterr().out
