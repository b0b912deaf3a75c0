import pytest
from torch.nn.functional import cosine_similarity

from llmdistill.methods.distilbert import DistilbertConfig, build_distilbert


@pytest.mark.parametrize(("family", "positions"), [("llama", "all"), ("bert", "all"), ("bert", "masked")])
def test_terms_equal_the_naive_loop(models, family: str, positions: str) -> None:
    make = models.families[family]
    pair = models.Pair(make(4, 16, 4, 2), make(2, 16, 2, 1))
    settings = DistilbertConfig(positions=positions)
    method = build_distilbert(settings, pair.teacher_config, pair.student_config)
    assert method.weights == {"soft": 5.0, "label": 2.0, "cosine": 1.0}
    everywhere = family == "bert" and positions == "all"
    assert method.positions == {"soft": "tokens" if everywhere else "labels", "label": "labels", "cosine": "tokens"}
    student, teacher = pair.seen

    def divergence(b: int, at: int) -> float:
        return 4 * models.kl(*((seen.logits[b, at] / 2).softmax(-1) for seen in (teacher, student)))

    def cosine(b: int, i: int) -> float:
        return 1 - float(cosine_similarity(student.flat["hidden", 1][b, i], teacher.flat["hidden", 3][b, i], dim=0))

    places = (pair.batch.labels >= 0).nonzero().tolist()
    soft = sum(divergence(b, i - 1 if pair.causal else i) for b, i in places) / len(places)
    expected = {
        "soft": pair.mean_over_tokens(divergence) if everywhere else soft,
        "label": pair.output_terms(1.0)["label"],
        "cosine": pair.mean_over_tokens(cosine),
    }
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)
