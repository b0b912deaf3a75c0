"""Students that learn from a teacher with another tokenizer, under DeepSpeed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from byte_tokenizers import byte_level
from tiny import save_decoder

from llmdistill.embedded import locate

from support import interrupted_copy, largest_difference, logged

SAME = 1e-5
"""Adam divides a gradient by its size, so where it is nearly 0 five steps of 1e-3 make more of what was rounded. In
fp64 the gradients are the same to 1e-12 (tests/unit/teacher/test_translated.py)."""
LIMITS = ("--data.max_prompt_length", "200", "--data.max_length", "300", "--data.long_prompts", "drop")


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> tuple[str, ...]:
    """The settings of a student whose tokenizer is half as large as the teacher's."""
    folder = tmp_path_factory.mktemp("student")
    tokenizer = byte_level(512, texts=Path(locate("embedded:train")).read_text().splitlines())
    save_decoder(folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    return ("--method", "kd", "--student.model", str(folder), "--student.factorize.rank", "null", *LIMITS)


@pytest.mark.parametrize("spans", ["alm", pytest.param("uld", marks=pytest.mark.slow)])
def test_two_sharded_ranks_learn_what_one_does(trained, other, spans):
    chosen = (*other, "--kd.spans", spans)
    alone = trained(*chosen)
    assert logged(alone, "forward_kl")[-1] < logged(alone, "forward_kl")[0]
    both = trained(*chosen, "--teacher.sharding", "zero3", ranks=2, ds_config="zero3")
    assert largest_difference(alone, both) < SAME


def test_packed_rows_are_learned_as_single_ones(trained, other):
    assert largest_difference(trained(*other, "--kd.spans", "alm"), trained(*other, "--data.packing", "true")) < SAME


@pytest.mark.slow
def test_two_sharded_ranks_judge_answers_of_different_lengths(trained, other):
    own = (*other, "--kd.ratio", "1.0", "--data.on_policy", "1.0", "--data.max_length", "212")
    assert largest_difference(trained(*own), trained(*own, ranks=2, ds_config="zero3")) < SAME


def test_a_resumed_run_is_bit_equal(trained, launch, settings, other, tmp_path):
    whole = trained(*other, "--kd.spans", "alm")
    copy = interrupted_copy(whole, tmp_path / "run")
    launch(*settings, "--ds_config", "ds_configs/zero2.json", "--output_dir", str(copy), *other, "--kd.spans", "alm")
    assert largest_difference(whole, copy) == 0


def test_a_cache_in_the_teachers_tokens_teaches_what_the_teacher_does(trained, launch, settings, other, tmp_path):
    own = (*other, "--kd.spans", "alm", "--data.train", "embedded:valid", "--scoring.models", "[]")
    launch("cache", *settings, *own, "--output", str(tmp_path / "cache"), program="llmdistill.cli", ranks=2)
    read = ("--teacher.cache", str(tmp_path / "cache"))
    assert largest_difference(trained(*own), trained(*own, *read)) < SAME
    packed = trained(*own, *read, "--data.packing", "true")
    assert largest_difference(trained(*own), packed) < SAME


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--data.streaming", "true"], "needs all prompts before the training"),
        (["--method", "makd"], "have different tokenizers, first at id 0.*take --method kd"),
    ],
)
def test_what_needs_the_same_tokens_is_refused(launch, settings, other, tmp_path, more, said):
    done = launch(*settings, "--ds_config", "zero2", "--output_dir", str(tmp_path / "run"), *other, *more, code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(said, line), line
