from __future__ import annotations

from typing import Any

import pytest
import torch
from references import terms_of
from torch.nn import functional

from llmdistill.methods.distilbert import DistilbertConfig, build_distilbert


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "roberta"])
def test_terms_equal_the_naive_loop(models, family: str) -> None:
    make = models.families[family]
    pair = models.Pair(make(4, 16, 4, 2), make(2, 16, 2, 1))
    method = build_distilbert(DistilbertConfig(), pair.teacher_config, pair.student_config)
    assert method.weights == {"soft": 5.0, "label": 2.0, "cosine": 1.0}
    assert method.positions == {"soft": "labels" if pair.causal else "tokens", "label": "labels", "cosine": "tokens"}
    student, teacher = pair.seen()

    def divergence(b: int, at: int) -> float:
        return 4 * models.kl(*((seen.logits[b, at] / 2).softmax(-1) for seen in (teacher, student)))

    places = (pair.batch.labels >= 0).nonzero().tolist()
    soft = sum(divergence(b, i - 1 if pair.causal else i) for b, i in places) / len(places)
    label = pair.output_terms(student, teacher, 1.0)["label"]

    def cosine(b: int, i: int) -> float:
        mine, theirs = student.flat["hidden", 1][b, i], teacher.flat["hidden", 3][b, i]
        return 1 - float(mine @ theirs) / float(mine.norm() * theirs.norm())

    softened = soft if pair.causal else pair.mean_over_tokens(divergence)
    expected = {"soft": softened, "label": label, "cosine": pair.mean_over_tokens(cosine)}
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "names", "needs_teacher"),
    [
        (DistilbertConfig(), ["soft", "label", "cosine"], True),
        (DistilbertConfig(cosine=0.0), ["soft", "label"], True),
        (DistilbertConfig(soft=0.0, label=0.0), ["cosine"], True),
        (DistilbertConfig(soft=0.0, cosine=0.0), ["label"], False),
    ],
)
def test_terms_without_weight_do_not_exist(
    models, settings: DistilbertConfig, names: list, needs_teacher: bool
) -> None:
    pair = models.Pair(models.bert(4, 16, 4, 4), models.bert(2, 16, 4, 4))
    method = build_distilbert(settings, pair.teacher_config, pair.student_config)
    assert list(pair.means(method)) == names
    assert method.needs_teacher is needs_teacher
    assert method.student_taps == ({"hidden": {1}} if "cosine" in names else {})
    assert method.teacher_taps == ({"hidden": {3}} if "cosine" in names else {})
    assert not method.projections


@pytest.mark.parametrize("positions", ["masked", "all"])
def test_the_softened_output_is_compared_at_the_masked_words_or_at_all(models, positions: Any) -> None:
    pair = models.Pair(models.bert(4, 16, 4, 4), models.bert(2, 16, 4, 4))
    method = build_distilbert(
        DistilbertConfig(cosine=0.0, positions=positions), pair.teacher_config, pair.student_config
    )
    run = pair.run(method)
    terms = terms_of(method, run.student, run.teacher, pair.batch)
    chosen = pair.batch.labels >= 0 if positions == "masked" else pair.batch.attention_mask == 1
    student, teacher = (outputs.logits[chosen] / 2 for outputs in (run.student, run.teacher))
    expected = 4 * functional.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum")
    torch.testing.assert_close(terms["soft"].sum, expected)
    assert int(terms["soft"].count) == int(chosen.sum())
