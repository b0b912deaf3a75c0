import pytest
from torch import Tensor
from torch.nn.functional import cosine_similarity

from llmdistill.methods.distilbert import DistilbertConfig, build_distilbert


@pytest.mark.parametrize(("family", "settings", "everywhere"), [
    ("llama", DistilbertConfig(), False),
    ("bert", DistilbertConfig(), True),  # its authors' distiller restricts the term to masked tokens only if asked to
    ("bert", DistilbertConfig(positions="masked"), False),
])  # fmt: skip
def test_terms_equal_the_naive_loop(models, family: str, settings: DistilbertConfig, everywhere: bool) -> None:
    make = models.families[family]
    pair = models.Pair(make(4, 16, 4, 2), make(2, 16, 2, 1))
    method = build_distilbert(settings, pair.teacher_config, pair.student_config)
    assert method.weights == {"soft": 5.0, "label": 2.0, "cosine": 1.0}
    assert method.positions == {"soft": "tokens" if everywhere else "labels", "label": "labels", "cosine": "tokens"}
    student, teacher = pair.seen

    def soft(*logits: Tensor) -> Tensor:
        q, p = ((each / 2).softmax(-1) for each in logits)
        return 4 * models.kl(p, q)

    cosine = 1 - cosine_similarity(student.flat["hidden", 1], teacher.flat["hidden", 3], dim=-1)
    of_tokens = pair.mean_over_tokens(soft(student.logits, teacher.logits))
    of_labels = float(soft(*map(pair.of_labels, pair.seen)).mean())
    expected = {
        "soft": of_tokens if everywhere else of_labels,
        "label": pair.output_terms(1.0)["label"],
        "cosine": pair.mean_over_tokens(cosine),
    }
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)
