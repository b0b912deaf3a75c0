"""Numbers that go wrong: what is reported, kept and refused, and where a value that is not finite comes from."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizers import byte_level
from hostile import refuses
from safetensors.torch import load_file
from tiny import tiny_model

import llmdistill
from llmdistill.batch import Batch, Outputs
from llmdistill.errors import UserError
from llmdistill.methods import build_method
from llmdistill.methods.makd import MakdConfig
from llmdistill.objective import Objective
from llmdistill.step.forward import TappedModel
from llmdistill.step.not_finite import first_not_finite, first_not_finite_parameter
from llmdistill.step.taps import Recorder
from llmdistill.training.callbacks.finite import FiniteSteps
from llmdistill.training.callbacks.loss_watch import LossWatch, diverged, is_diverged
from llmdistill.training.callbacks.uneven_terms import term_gradients, uneven_terms

pytestmark = pytest.mark.usefixtures("cpu_world")


def make_steps(folder, policy: str = "skip") -> FiniteSteps:
    trainer = SimpleNamespace(
        engine=SimpleNamespace(get_global_grad_norm=lambda: 1.0),
        method=SimpleNamespace(weights={"label": 1.0, "logits": 1.0}),
        settings=SimpleNamespace(not_finite=policy, peak_learning_rate=0.5),
        describe_origin=lambda step, _batches: f"looked at step {step}",
    )
    return FiniteSteps(trainer, folder)


def batches() -> list[Batch]:
    ids = torch.arange(12).view(3, 4)
    return [Batch(ids + n, torch.ones_like(ids), ids, sample_ids=((n,), (10 + n,), (20 + n,))) for n in range(2)]


FINE = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def test_an_applied_step_is_read_one_step_later_and_ends_the_run(tmp_path) -> None:
    steps = make_steps(tmp_path)
    assert steps.record_applied(1, batches(), FINE) is None
    wrong = FINE.clone()
    wrong[1, 1] = math.inf
    before = steps.record_applied(2, batches(), wrong)
    assert (before.step, before.values) == (1, {"label": 4.0, "logits": 6.0})
    with pytest.raises(UserError) as error:
        steps.record_applied(3, batches(), FINE)
    said = str(error.value)
    assert "the term logits is inf at step 2: logits on rank 0, in the micro batches of the samples 1, 11, 21" in said
    assert "looked at step 2" in said
    kept = load_file(tmp_path / "not_finite" / "step-2" / "rank-00000.safetensors")
    assert torch.equal(kept["0/input_ids"], batches()[1].input_ids), "only the micro batch that is wrong is kept"
    assert not any(name.startswith("1/") for name in kept)
    ended = json.loads((tmp_path / "not_finite" / "ended.json").read_text())
    assert (ended["step"], ended["learning_rate"]) == (2, 0.5)


def test_a_gradient_that_is_not_finite_is_found_where_every_term_is(tmp_path) -> None:
    steps = make_steps(tmp_path)
    steps.trainer.engine.get_global_grad_norm = lambda: None  # which DeepSpeed does not compute
    steps.record_applied(1, batches(), FINE)
    assert steps.check_last() is not None
    assert steps.check_last() is None, "a step is read once"
    steps.trainer.engine.get_global_grad_norm = lambda: torch.tensor(math.inf)
    steps.record_applied(2, batches(), FINE)
    refuses("the norm of the gradient is inf at step 2: every term is finite", steps.check_last)


def test_skipped_steps_go_on_until_the_third_in_a_row(tmp_path, capsys) -> None:
    steps, wrong = make_steps(tmp_path), FINE * math.nan
    for number in (1, 2, 4, 5):
        if number == 4:
            steps.record_applied(3, batches(), FINE)
        steps.report_skipped(number, batches(), wrong)
    assert capsys.readouterr().err.count("was skipped") == 4
    assert not (tmp_path / "not_finite" / "ended.json").exists()
    with pytest.raises(UserError, match=r"step 6 was skipped.*label, logits on rank 0.*it is the 3rd in a row"):
        steps.report_skipped(6, batches(), wrong)
    assert (tmp_path / "not_finite" / "ended.json").exists()
    with pytest.raises(UserError, match=r"step 1 was skipped.*train\.not_finite is stop"):
        make_steps(tmp_path, "stop").report_skipped(1, batches(), wrong)


class TestOrigin:
    def say(self, break_teacher: str = "", break_student: str = "") -> str:
        teacher, student = tiny_model("llama"), tiny_model("llama", seed=1)
        ids = torch.arange(5)[None]

        def run() -> None:
            teacher(ids), student(ids)

        for model, name in ((teacher, break_teacher), (student, break_student)):
            if name:  # finite weights whose product overflows
                model.get_submodule(name).weight.data.fill_(1e38)
        return first_not_finite({"teacher": teacher, "student": student}, run)

    def test_the_first_model_and_its_first_module_are_named(self) -> None:
        assert self.say() == "the outputs of teacher and student are finite"
        first, second = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.v_proj"
        assert self.say(first, "model.layers.0.mlp.up_proj").endswith(f"is the teacher, in {first}")
        assert self.say("", second).endswith(f"is the student, in {second}")
        # A parameter is named before any output.
        student = tiny_model("llama")
        student.model.layers[1].mlp.up_proj.weight.data[3, 4] = math.nan
        ran: list[int] = []  # as on the ranks that find nothing wrong with their shards
        said = first_not_finite({"student": student}, lambda: ran.append(1))
        assert (said, ran) == ("the student's parameter model.layers.1.mlp.up_proj.weight is not finite", [1])


def test_a_model_whose_weights_are_not_finite_is_refused_before_it_teaches_or_is_scored() -> None:
    name = "model.layers.1.mlp.up_proj"
    for value in (math.nan, math.inf):
        broken, student = (tiny_model("llama", seed=seed, vocab_size=300) for seed in (0, 1))
        broken.get_submodule(name).weight.data[3, 4] = value
        loss = llmdistill.DistillationLoss(broken, student, "kd")
        ids = torch.arange(3, 9)[None]
        refuses(
            f"the teacher's parameter {name}.weight has values that are not finite",
            loss,
            {"input_ids": ids, "labels": ids},
        )
        said = f"the model's parameter {name}.weight has values that are not finite"
        refuses(said, llmdistill.evaluate, broken, ["a b c d e f" * 20], tokenizer=byte_level(300))
        refuses("holds values that are not finite", partial(llmdistill.compress, broken, rank=2))
    # Outputs that overflow are told where a step is not finite.
    fine = tiny_model("llama")
    fine.get_submodule(name).weight.data.fill_(1e38)
    assert first_not_finite_parameter(fine) is None
    # A text longer than the model's 40 positions has windows of 40 tokens, unless another number is asked for.
    text = {"data": ["a b c d e f" * 20], "tokenizer": byte_level(300)}
    whole = tiny_model("llama", vocab_size=300)
    assert llmdistill.evaluate(whole, **text)["window"] == 40
    refuses("window is 41, but llama has positions for 40", partial(llmdistill.evaluate, whole, **text, max_length=41))


class TestLossWatch:
    def warnings(self, losses: list[float], weight: float = 1.0) -> list[str]:
        watch = LossWatch({"label": weight, "rest": 1.0})
        return [each for step, loss in enumerate(losses, 1) for each in watch.add(step, {"label": 0.0, "rest": loss})]

    def test_a_first_loss_is_no_jump_and_neither_is_one_that_was_there_before(self) -> None:
        noisy = [2.0 + 0.3 * (-1) ** n for n in range(40)]
        (said,) = self.warnings([*noisy, 5.0, 2.0], weight=0.0)
        assert said.startswith("the loss jumped to 5 at step 41, 2.5 times the median of the 40 steps before it")
        assert self.warnings([1.0] * 10 + [9.0] + [1.0] * 30 + [8.0], weight=0.0) == []
        assert len(self.warnings([1.0] * 50 + [2.2 * 1.1**n for n in range(20)], weight=0.0)) == 5, "one cause"

    def test_a_loss_that_diverges_is_named_at_once_and_at_the_end(self) -> None:
        (said,) = self.warnings([5.0, 4.0, 90.0, 2e21, 1e21, 3e22], weight=0.0)
        assert said.startswith("the loss is 2e+21 at step 4, 5e+20 times the lowest one before it: the student diver")
        assert self.warnings([1e-4, 9.0], weight=0.0) == [], "a student that starts as its teacher has hardly a loss"
        watch = LossWatch({"rest": 1.0})
        for step, loss in enumerate((5.0, 2e21), 1):
            watch.add(step, {"rest": loss})
        rows = [{"step": 0, "valid_loss": 1.0}, {"step": 2, "loss": 1e21, "lowest_loss": watch.lowest}]
        (ended,) = diverged(rows)
        assert ended.startswith("the training diverged: the loss is 1e+21 at its last step, 2e+20 times the lowest")
        # A resumed run knows the lowest loss from its log.
        assert LossWatch({"rest": 1.0}, rows).lowest == 5.0
        assert is_diverged(600.0, 5.0)
        assert not is_diverged(6.0, 5.0)
        assert diverged([*rows, {"step": 3, "loss": 6.0}]) == diverged([]) == []

    def test_terms_with_none_or_hardly_any_of_the_gradient_or_nearly_all(self) -> None:
        (said,) = self.warnings([1.0] * 60)
        assert said.startswith("term label was 0 in each of the first 20 steps")
        found = uneven_terms({"a": 1.0, "b": 0.002, "c": 0.0005})
        shares = {name: share for name, (share, _) in found.items()}
        assert shares == pytest.approx({"a": 1 / 1.0025, "c": 0.0005 / 1.0025})
        assert "--makd.scale token" in found["a"][1]
        assert "weight 0" in found["c"][1]
        assert uneven_terms({"a": 0.79, "b": 0.21}) == uneven_terms({"a": 0.0, "b": 0.0}) == {}
        assert uneven_terms({"a": 1.0}) == {}, "a term alone has all of it"


def test_the_gradient_of_a_term_is_that_of_its_weighted_mean_alone() -> None:
    """Reference: autograd through the whole model, with each term's weight set to 0 in turn but one."""
    teacher, student = tiny_model("llama"), tiny_model("llama", seed=1)
    settings = {"makd": MakdConfig(matrix_layers="all", layer_layers="all", label=0.5)}
    method = build_method(["makd"], settings, teacher.config, student.config, Objective())
    ids = torch.randint(0, 30, (2, 6), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.ones_like(ids), ids).with_positions(shift=True)
    teaching = TappedModel(teacher, Recorder(teacher, method.teacher_taps))
    learner = TappedModel(student, Recorder(student, method.student_taps))

    def teach() -> Outputs:
        with torch.no_grad():
            return teaching.compute_targets(batch, lm_head=method.teacher_positions)

    found = term_gradients(method, learner, teach, batch)
    assert found.keys() == {name for name, weight in method.weights.items() if weight != 0}
    for name, norm in found.items():
        assert norm == pytest.approx(float(reference(method, student, learner, teach(), batch, name)), rel=1e-5), name
    assert max(found.values()) > 10 * min(found.values()), "the terms differ, so that mixing them up would be seen"


def reference(method, student, learner, targets, batch, name) -> torch.Tensor:
    """The norm of the gradient with respect to the embeddings."""
    rows: list[torch.Tensor] = []
    embed = student.model.embed_tokens.register_forward_hook(lambda *given: rows.append(given[-1]))
    weights = {each: weight if name == each else 0.0 for each, weight in method.weights.items()}
    running = replace(method, weights=weights).bind_terms(targets, batch, batch.divisors())
    (gradient,) = torch.autograd.grad(learner.compute_losses(batch, running).total, rows)
    embed.remove()
    return gradient.norm()
