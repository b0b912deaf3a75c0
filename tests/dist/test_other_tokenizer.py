"""Students that learn from a teacher with another tokenizer, under DeepSpeed."""

from pathlib import Path

import pytest
from byte_tokenizers import byte_level
from tiny import save_decoder

from llmdistill.embedded import locate
from llmdistill.train import main

from support import largest_difference, logged

SAME = 1e-5
"""Adam divides a gradient by its size, so where it is nearly 0 five steps of 1e-3 make more of what was rounded. In
fp64 the gradients are the same to 1e-12 (tests/unit/teachers/test_translated.py)."""
DATA = ("--data.train", "embedded:valid", "--data.max_prompt_length", "200", "--data.max_length", "300")
DATA += ("--data.long_prompts", "drop")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> tuple[str, ...]:
    """The settings of a student whose tokenizer is half as large as the teacher's."""
    folder = tmp_path_factory.mktemp("student")
    tokenizer = byte_level(512, texts=Path(locate("embedded:train")).read_text().splitlines())
    save_decoder(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, num_hidden_layers=2)
    tokenizer.save_pretrained(folder)
    student = ("--student.model", str(folder), "--student.factorize.rank", "null")
    return ("--method", "kd", "--scoring.models", "[]", *student, *DATA)


@pytest.mark.parametrize("spans", ["alm", pytest.param("uld", marks=pytest.mark.slow)])
def test_two_sharded_ranks_learn_what_one_does(trained, other, spans):
    chosen = (*other, "--kd.spans", spans)
    alone = trained(*chosen)
    assert logged(alone, "forward_kl")[-1] < logged(alone, "forward_kl")[0]
    both = trained(*chosen, "--teacher.sharding", "zero3", ranks=2, ds_config="zero3")
    assert largest_difference(alone, both) < SAME


def test_packed_rows_are_learned_as_single_ones(trained, other):
    packed = trained(*other, "--kd.spans", "alm", "--data.packing", "true")
    assert largest_difference(trained(*other, "--kd.spans", "alm"), packed) < SAME


@pytest.mark.slow
def test_two_sharded_ranks_judge_answers_of_different_lengths(trained, other):
    own = (*other, "--kd.ratio", "1.0", "--data.on_policy", "1.0", "--data.max_length", "212")
    assert largest_difference(trained(*own), trained(*own, ranks=2, ds_config="zero3")) < SAME


def test_a_cache_in_the_teachers_tokens_teaches_what_the_teacher_does(trained, launch, settings, other, tmp_path):
    own = (*other, "--kd.spans", "alm")
    launch("cache", *settings, *own, "--output", str(tmp_path / "cache"), program="llmdistill.cli", ranks=2)
    packed = trained(*own, "--teacher.cache", str(tmp_path / "cache"), "--data.packing", "true")
    assert largest_difference(trained(*own), packed) < SAME


def test_a_stream_is_refused(settings, other, tmp_path, capsys):
    assert main([*settings, *other, "--data.streaming", "true", "--output_dir", str(tmp_path / "run")]) == 2
    assert "needs all prompts before the training" in capsys.readouterr().err
