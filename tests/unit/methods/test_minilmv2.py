from __future__ import annotations

import pytest

from llmdistill.methods.minilmv2 import SIDES, Minilmv2Config, build_minilmv2

EVERY = ["qq", "qk", "qv", "kq", "kk", "kv", "vq", "vk", "vv"]


def naive(pair, models, relations: list[str], count: int, student_layer: int, teacher_layer: int) -> dict[str, float]:
    """MiniLMv2 eq. 6-8, token by token and relation head by relation head."""
    student, teacher = pair.seen()

    def loss_of(sides: tuple[str, str]):
        def loss(b: int, i: int) -> float:
            keys = student.keys_of(pair.batch, b, i)
            p = models.relation(teacher, sides, teacher_layer, b, i, keys, count)
            q = models.relation(student, sides, student_layer, b, i, keys, count)
            return sum(models.kl(p[a], q[a]) / count for a in range(count))

        return loss

    return {f"relation_{r}": pair.mean_over_tokens(loss_of((SIDES[r[0]], SIDES[r[1]]))) for r in relations}


@pytest.mark.parametrize(
    ("settings", "teacher_layer"),
    [
        (Minilmv2Config(relation_heads=4, relations=["qk", "vv"]), 4),
        (Minilmv2Config(relation_heads=2, teacher_layer=3, weight=0.5), 2),
        (Minilmv2Config(relation_heads=8, relations=["hh"]), 4),
    ],
)
def test_terms_equal_the_naive_loop(pair, models, settings: Minilmv2Config, teacher_layer: int) -> None:
    method = build_minilmv2(settings, pair.teacher_config, pair.student_config)
    names = [f"relation_{relation}" for relation in settings.relations]
    assert method.weights == dict.fromkeys(names, settings.weight)
    assert method.positions == dict.fromkeys(names, "tokens")
    assert not method.projections
    expected = naive(pair, models, settings.relations, settings.relation_heads, 1, teacher_layer)
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_all_nine_relations_of_models_with_other_heads(models, family: str) -> None:
    """4 heads of 6 (2 key heads) against 2 heads of 6 (1 key head): 3 relation heads cut across heads."""
    make = models.families[family]
    pair = models.Pair(make(3, 24, 4, 2), make(2, 12, 2, 1))
    settings = Minilmv2Config(relations=EVERY, relation_heads=3)
    method = build_minilmv2(settings, pair.teacher_config, pair.student_config)
    assert list(method.weights) == [f"relation_{relation}" for relation in EVERY]
    assert pair.means(method) == pytest.approx(naive(pair, models, EVERY, 3, 1, 2), rel=1e-4)


def test_layer_to_layer_is_the_sum_over_the_layers(pair, models) -> None:
    settings = Minilmv2Config(relation_heads=4, teacher_layers="uniform")
    method = build_minilmv2(settings, pair.teacher_config, pair.student_config)
    first, last = (naive(pair, models, settings.relations, 4, *layers) for layers in ((0, 2), (1, 4)))
    assert pair.means(method) == pytest.approx({name: first[name] + last[name] for name in last}, rel=1e-4)


def test_a_target_sees_the_source_and_itself_so_far(models) -> None:
    pair = models.Pair(models.roberta(3, 32, 4, 4), models.roberta(2, 16, 2, 2), batch=models.targets())
    method = build_minilmv2(Minilmv2Config(relation_heads=4), pair.teacher_config, pair.student_config)
    assert pair.means(method) == pytest.approx(naive(pair, models, ["qq", "kk", "vv"], 4, 1, 2), rel=1e-4)
