from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmdistill.methods.minilm import MinilmConfig, build_minilm

LAYERS = {
    "last": (MinilmConfig(), [(1, 4)]),
    "another": (MinilmConfig(teacher_layer=2, value_mse=0.5), [(1, 1)]),
    "uniform": (MinilmConfig(teacher_layers="uniform", attention=2.0, value_mse=0.5), [(0, 2), (1, 4)]),
    "free": (MinilmConfig(teacher_layers="5,2"), [(0, 4), (1, 1)]),
    "plain": (MinilmConfig(value_mse=0.5, hidden_mse=2.0, scale="plain"), [(1, 4)]),
    "first alone": (MinilmConfig(teacher_layers="3,0"), [(0, 2)]),
    "hidden states": (MinilmConfig(value_relation=0.0, hidden_relation=2.0, hidden_mse=0.5), [(1, 4)]),
    "hidden states by a map": (
        MinilmConfig(attention=0.0, hidden_relation=1.0, teacher_layers="4,1"),
        [(0, 3), (1, 0)],
    ),
}


def naive(pair, models, names, layers: list[tuple[int, int]], projectors=None, scale="token") -> dict[str, float]:
    """MiniLM §3.1 and §3.2, and the ablations' terms, token by token and head by head, in fp64."""
    student, teacher = pair.seen()
    heads = student.heads

    def attention(b: int, i: int) -> float:
        keys = student.keys_of(pair.batch, b, i)
        rows = [(teacher.attentions[t][b, :, i, keys], student.attentions[s][b, :, i, keys]) for s, t in layers]
        return sum(models.kl(p[h], q[h]) / heads for p, q in rows for h in range(heads))

    def value_relation(b: int, i: int) -> float:
        keys, result = student.keys_of(pair.batch, b, i), 0.0
        for s, t in layers:
            for h in range(heads):
                p, q = (
                    torch.stack([head[b, i, h] @ head[b, j, h] / seen.width**0.5 for j in keys]).softmax(0)
                    for seen, head in (
                        (teacher, teacher.per_head("value", t, heads)),
                        (student, student.per_head("value", s, heads)),
                    )
                )
                result += models.kl(p, q) / heads
        return result

    def squares(aspect: str):
        def loss(b: int, i: int) -> float:
            result = 0.0
            for s, t in layers:
                mine = student.flat[aspect, s][b, i]
                mine = mine if aspect not in (projectors or {}) else projectors[aspect] @ mine
                theirs = teacher.flat[aspect, t][b, i]
                result += ((mine - theirs) ** 2).mean() / (theirs.square().mean() if scale == "token" else 1)
            return result

        return loss

    def hidden_relation(b: int, i: int) -> float:
        keys, result = student.keys_of(pair.batch, b, i), 0.0
        for s, t in layers:
            for h in range(heads):  # as many parts as heads
                p, q = (
                    torch.stack([part[i, h] @ part[j, h] / part.shape[-1] ** 0.5 for j in keys]).softmax(0)
                    for part in (
                        teacher.flat["hidden", t][b].unflatten(-1, (heads, -1)),
                        student.flat["hidden", s][b].unflatten(-1, (heads, -1)),
                    )
                )
                result += models.kl(p, q) / heads
        return result

    losses = {"attention": attention, "value_relation": value_relation, "value_mse": squares("value")}
    losses |= {"hidden_relation": hidden_relation, "hidden_mse": squares("hidden")}
    return {name: pair.mean_over_tokens(losses[name]) for name in names}


@pytest.mark.parametrize(("settings", "layers"), LAYERS.values(), ids=LAYERS)
def test_terms_equal_the_naive_loop(pair, models, settings: MinilmConfig, layers: list[tuple[int, int]]) -> None:
    method = build_minilm(settings, pair.teacher_config, pair.student_config)
    made = pair.run(method).projectors
    projectors = {name: made[name].weight.detach().double() for name in method.projections}
    names = ("attention", "value_relation", "value_mse", "hidden_relation", "hidden_mse")
    assert method.weights == {name: getattr(settings, name) for name in names if getattr(settings, name)}
    assert set(method.positions.values()) == {"tokens"}
    expected = naive(pair, models, method.weights, layers, projectors, settings.scale)
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)


def test_value_heads_that_do_not_divide_each_other(models) -> None:
    pair = models.Pair(models.llama(3, 24, 6, 3), models.llama(2, 12, 6, 2))
    method = build_minilm(MinilmConfig(), pair.teacher_config, pair.student_config)
    assert pair.means(method) == pytest.approx(naive(pair, models, method.weights, [(1, 2)]), rel=1e-4)


def test_values_of_the_same_width_need_no_matrix(models) -> None:
    pair = models.Pair(models.llama(3, 32, 4, 2), models.llama(2, 16, 4, 4))  # 2 value heads of 8, 4 of 4
    method = build_minilm(MinilmConfig(value_mse=1.0), pair.teacher_config, pair.student_config)
    assert not method.projections
    assert pair.means(method) == pytest.approx(naive(pair, models, method.weights, [(1, 2)]), rel=1e-4)


def test_a_target_sees_the_source_and_itself_so_far(models) -> None:
    pair = models.Pair(models.bert(3, 32, 4, 4), models.bert(2, 16, 4, 4), batch=models.targets())
    method = build_minilm(MinilmConfig(), pair.teacher_config, pair.student_config)
    expected = naive(pair, models, method.weights, [(1, 2)])
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)
    everything = pair.means(method, replace(pair.batch, horizon=None))
    assert all(abs(everything[name] - value) > 1e-3 for name, value in expected.items())
