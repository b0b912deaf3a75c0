from __future__ import annotations

import pytest
import torch

from llmdistill.methods.tinybert import TinybertConfig, build_tinybert

LAYERS = [(0, 2), (1, 4)]
"""Of 2 against 5 layers: 2.5 is rounded to the third."""


def naive(
    pair, projectors: dict[str, torch.Tensor], layers=LAYERS, temperature: float = 1.0, scale: str = "token"
) -> dict[str, float]:
    """TinyBERT eq. 7-10, token by token."""
    student, teacher = pair.seen()
    maps = {name: projectors.get(name, torch.eye(8).double()) for name in ("hidden", "embedding")}

    def squared(mine: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((mine - theirs).square().mean() / (theirs.square().mean() if scale == "token" else 1))

    def attention(b: int, i: int) -> float:
        keys, result = student.keys_of(pair.batch, b, i), 0.0
        for s, t in layers:
            for h in range(4):
                mine, theirs = (
                    [
                        seen.per_head("query", layer, 4)[b, i, h]
                        @ seen.per_head("key", layer, 4)[b, j, h]
                        / seen.width**0.5
                        for j in keys
                    ]
                    for seen, layer in ((student, s), (teacher, t))
                )
                result += sum((x - y) ** 2 for x, y in zip(mine, theirs, strict=True)) / (4 * len(keys))
        return result

    def hidden(b: int, i: int) -> float:
        pairs = [(maps["hidden"] @ student.flat["hidden", s][b, i], teacher.flat["hidden", t][b, i]) for s, t in layers]
        return sum(squared(*each) for each in pairs)

    def embedding(b: int, i: int) -> float:
        return squared(maps["embedding"] @ student.embedding[b, i], teacher.embedding[b, i])

    inner = {f.__name__: pair.mean_over_tokens(f) for f in (attention, hidden, embedding)}
    return {**inner, "soft": pair.output_terms(student, teacher, temperature)["logits"]}


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        (TinybertConfig(), LAYERS),
        (TinybertConfig(scale="plain"), LAYERS),
        (TinybertConfig(hidden=0.5, soft=2.0, temperature=3.0), LAYERS),
        (TinybertConfig(teacher_layers="5,1"), [(0, 4), (1, 0)]),
        (TinybertConfig(teacher_layers="0,2"), [(1, 1)]),
    ],
)
def test_terms_equal_the_naive_loop(pair, settings: TinybertConfig, layers: list[tuple[int, int]]) -> None:
    method = build_tinybert(settings, pair.teacher_config, pair.student_config)
    run = pair.run(method)
    projectors = {name: module.weight.detach().double() for name, module in run.projectors.items()}
    assert method.projections == {"hidden": (16, 32), "embedding": (16, 32)}
    expected = naive(pair, projectors, layers, settings.temperature, settings.scale)
    weights = {name: getattr(settings, name) for name in expected if getattr(settings, name)}
    assert method.weights == weights
    assert method.positions == {name: "labels" if name == "soft" else "tokens" for name in weights}
    assert pair.means(method) == pytest.approx({name: expected[name] for name in weights}, rel=1e-4)


def test_models_of_the_same_width_need_no_matrix(models) -> None:
    pair = models.Pair(models.bert(4, 8, 4, 4), models.bert(2, 8, 4, 4))
    method = build_tinybert(TinybertConfig(), pair.teacher_config, pair.student_config)
    assert not method.projections
    expected = naive(pair, {}, layers=[(0, 1), (1, 3)])
    assert pair.means(method) == pytest.approx({name: expected[name] for name in method.weights}, rel=1e-4)
