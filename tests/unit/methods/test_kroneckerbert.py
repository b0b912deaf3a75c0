from dataclasses import asdict

import pytest

from llmdistill.methods.kroneckerbert import KroneckerbertConfig, build_kroneckerbert

LAYERS = 3
INNER = ("embedding", "attention", "ffn")
OTHER = KroneckerbertConfig(
    embedding=0.5, attention=2.0, ffn=0.25, ffn_output="projection", logits=3.0, label=0.75, temperature=2.0
)


@pytest.mark.parametrize(
    ("settings", "output"),
    [(KroneckerbertConfig(scale="plain"), "hidden"), (OTHER, "ffn_down")],
    ids=["the paper's", "others"],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "bert"])
def test_terms_equal_the_naive_loop(models, family: str, settings: KroneckerbertConfig, output: str) -> None:
    """KroneckerBERT eq. 14."""
    config = models.families[family](LAYERS, 16, 4, 2)
    pair = models.Pair(config, config)
    method = build_kroneckerbert(settings, config, config)
    layers = [(n, n) for n in range(LAYERS)]
    expected = {
        "embedding": pair.feature_error("embedding", [(0, 0)], settings.scale),
        "attention": pair.score_error(layers),
        "ffn": pair.feature_error(output, layers, settings.scale),
        **pair.output_terms(settings.temperature),
    }
    weights = asdict(settings)
    assert method.weights == {name: weights[name] for name in expected}
    assert method.positions == {name: "tokens" if name in INNER else "labels" for name in expected}
    assert not method.projections
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)
