"""What a run says of the distance between its students and their teacher."""

from types import SimpleNamespace

import pytest

from llmdistill.config import TrainConfig
from llmdistill.tasks.distance import HOPELESS
from llmdistill.training.nearness import Nearness, print_nearness


@pytest.mark.parametrize(("needs_teacher", "trained", "warns"), [
    (True, 0.539, True),
    (True, 0.37, False),  # as far as before, on so few rows
    (True, 0.2, False),
    (False, 0.539, False),  # labels lead elsewhere
])  # fmt: skip
def test_a_training_that_leads_away_from_the_teacher_is_warned_of(monkeypatch, needs_teacher, trained, warns):
    def seen(nats: float) -> dict[str, object]:
        return {"divergence": nats, "perplexity": 20.0, "teacher_perplexity": 10.0, "tokens": 500, "of": "data.valid"}

    monkeypatch.setattr(Nearness, "is_measured", True)
    nearness = object.__new__(Nearness)
    config = SimpleNamespace(train=TrainConfig(learning_rate=3e-4))
    nearness.plan = SimpleNamespace(method=SimpleNamespace(needs_teacher=needs_teacher), config=config)
    nearness.measured = {"untrained": seen(0.369), "student": seen(trained)}
    warning = nearness.measure("student", "trained", lambda: pytest.fail("measured again"))
    assert (warning is not None) == warns
    if warning is not None:
        assert "0.539 nats per token, 0.369 before): lower train.learning_rate (0.0003)" in warning


@pytest.mark.parametrize("with_table", [True, False])
def test_the_table_is_printed_where_no_other_has_it(tmp_path, capsys, with_table):
    far = {"divergence": 0.25, "perplexity": 12.0, "teacher_perplexity": 10.0, "tokens": 1495, "of": "data.valid"}
    print_nearness(tmp_path, {"untrained": far}, with_table=with_table)
    assert ("On 1,495 tokens of data.valid" in capsys.readouterr().out) == with_table


@pytest.mark.parametrize(("student", "remedy"), [
    ({"is_factorized": True, "method": "svd", "factorize": SimpleNamespace(is_weighted=True)}, "more parameters"),
    ({"is_factorized": True, "method": "svd", "factorize": SimpleNamespace(is_weighted=False)}, "weighting out"),
    ({"is_factorized": True, "method": "kronecker", "factorize": SimpleNamespace(is_weighted=False)}, "more param"),
    ({"is_factorized": False}, "another student"),
])  # fmt: skip
def test_a_start_that_keeps_nothing_is_a_warning_and_no_line(monkeypatch, capsys, student, remedy):
    seen = {"perplexity": 900.0, "teacher_perplexity": 10.0, "tokens": 500, "of": "held-out rows"}
    monkeypatch.setattr(Nearness, "is_measured", True)
    nearness = object.__new__(Nearness)
    nearness.plan = SimpleNamespace(config=SimpleNamespace(student=SimpleNamespace(**student)))
    nearness.measured = {"untrained": {**seen, "divergence": HOPELESS + 0.04}}
    warning = nearness.measure("untrained", "untrained", lambda: pytest.fail("measured again"))
    assert warning is not None
    assert "keeps nothing sensible of its teacher: 3.04 nats per token" in warning
    assert remedy in warning
    assert capsys.readouterr().out == "", "it would be said twice"
    nearness.measured = {"untrained": {**seen, "divergence": HOPELESS}}
    assert nearness.measure("untrained", "untrained", lambda: pytest.fail("measured again")) is None
    assert "Untrained   has lost most" in capsys.readouterr().out
