import pytest

from llmdistill.methods.minilmv2 import SIDES, Minilmv2Config, build_minilmv2

EVERY = ["qq", "qk", "qv", "kq", "kk", "kv", "vq", "vk", "vv"]


def naive(pair, relations: list[str], count: int, layers: list[tuple[int, int]]) -> dict[str, float]:
    """MiniLMv2 eq. 6-8, token by token and relation head by relation head."""
    return {f"relation_{r}": pair.relation_kl((SIDES[r[0]], SIDES[r[1]]), layers, count) for r in relations}


@pytest.mark.parametrize(("settings", "layers"), [
    (Minilmv2Config(relation_heads=4, relations=["qk", "vv"], teacher_layers="uniform"), [(0, 2), (1, 4)]),
    (Minilmv2Config(relation_heads=2, teacher_layer=3, weight=0.5), [(1, 2)]),
    (Minilmv2Config(relation_heads=8, relations=["hh"]), [(1, 4)]),
])  # fmt: skip
def test_terms_equal_the_naive_loop(pair, settings: Minilmv2Config, layers: list[tuple[int, int]]) -> None:
    method = build_minilmv2(settings, pair.teacher_config, pair.student_config)
    names = [f"relation_{relation}" for relation in settings.relations]
    assert method.weights == dict.fromkeys(names, settings.weight)
    assert method.positions == dict.fromkeys(names, "tokens")
    assert not method.projections
    expected = naive(pair, settings.relations, settings.relation_heads, layers)
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)


def test_all_nine_relations_of_models_with_other_heads(models) -> None:
    """4 heads of 6 (2 key heads) against 2 heads of 6 (1 key head): 3 relation heads cut across heads."""
    pair = models.Pair(models.llama(3, 24, 4, 2), models.llama(2, 12, 2, 1))
    method = build_minilmv2(Minilmv2Config(relations=EVERY, relation_heads=3), pair.teacher_config, pair.student_config)
    assert pair.means(method) == pytest.approx(naive(pair, EVERY, 3, [(1, 2)]), rel=1e-4)
