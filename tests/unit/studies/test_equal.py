"""Students of all starts have equally many parameters, and methods see equally many tokens."""

import json
from itertools import count

import pytest
from tiny import save_decoder
from transformers import AutoTokenizer

from llmdistill.config import FactorizeConfig
from llmdistill.config.command_line import parse_run
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.students.sizes import summarize
from llmdistill.studies.equal import check_starts, equal_size, steps_for_equal_tokens
from llmdistill.training.assemble import share_of
from llmdistill.training.plan import make_plan


def recipe(*arguments):
    words = ["--recipe", "quickstart", "--ds_config", "ds_configs/zero2.json", *arguments]
    return parse_run(words, METHODS)[0]


def test_all_starts_have_the_parameters_of_the_plain_student():
    rank = recipe("--student.factorize.target_params", "null", "--student.factorize.rank", "30")
    target = recipe("--student.factorize.rank", "null", "--student.factorize.target_params", "40%")
    teacher = locate("embedded:teacher")
    for own, size, plain in (
        (rank, None, {"rank": 30}),
        (target, None, {"target_params": "40%"}),
        (target, "20", {"rank": 20}),
        (rank, "25%", {"target_params": "25%"}),
    ):
        settings = {key.rsplit(".", 1)[-1]: value for key, value in equal_size(own, size).items()}
        expected = summarize(teacher, FactorizeConfig(**plain))
        assert settings == {"rank": None, "ranks": None, "target_params": expected["student_params"]}
        # The largest single rank below this number is the plain student's rank again.
        assert summarize(teacher, FactorizeConfig(**settings))["rank"] == expected["rank"]


def test_starts_need_a_teacher_that_is_cut_to_one_size():
    for arguments, said in (
        (["--student.shape", "3x64x2"], r"student\.shape is 3x64x2: leave one"),
        (["--student.model", "somewhere"], r"student\.model is somewhere: leave one"),
        (["--student.factorize.ranks", '{"*": 20}'], r"instead of ranks"),
        (["--student.method", "kronecker"], r"student\.method is kronecker"),
    ):
        with pytest.raises(UserError, match=said):
            check_starts(recipe(*arguments).student)


def test_steps_count_the_tokens_that_the_runs_see(tmp_path):
    """Prompts of a chat template are a few tokens here, those of MiniLLM some hundred."""
    teacher, other = save_decoder(tmp_path / "teacher"), tmp_path / "answers.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    tokenizer.save_pretrained(teacher)
    rows = [{"instruction": f"Say {n}.", "input": "", "output": f"{n} and then some more words {n}"} for n in range(40)]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ("--teacher.model", str(teacher), "--train.steps", "9", "--train.global_batch_size", "4")
    own += ("--student.factorize.target_params", "null", "--student.factorize.rank", "4")

    def tokens(data):
        config = recipe(*own, "--data.train", str(data), "--method", "kd")
        plan = make_plan(config)
        loader = plan.task.read(plan.models).prepare().loader(share_of(plan))
        return config, (sum(int(each.attention_mask.sum()) for each in loader.micro_batches(step)) for step in count())

    config, seen = tokens("embedded:train")
    budget = sum(next(seen) for _ in range(9))
    _, answered = tokens(other)
    totals = [0]
    while totals[-1] < budget:
        totals.append(totals[-1] + next(answered))
    nearest = min(range(len(totals)), key=lambda steps: abs(totals[steps] - budget))
    assert steps_for_equal_tokens(config, other, seed=config.seed) == nearest
