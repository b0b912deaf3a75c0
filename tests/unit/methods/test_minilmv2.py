from __future__ import annotations

from dataclasses import replace

import pytest

from llmdistill.errors import UserError
from llmdistill.methods import METHODS
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


def test_directions_of_a_mixed_relation_differ(models) -> None:
    pair = models.Pair(models.bert(3, 32, 4, 4), models.bert(2, 16, 4, 4))
    method = build_minilmv2(
        Minilmv2Config(relations=["qk", "kq"], relation_heads=4), pair.teacher_config, pair.student_config
    )
    means = pair.means(method)
    assert means["relation_qk"] != pytest.approx(means["relation_kq"], rel=1e-3)


@pytest.mark.parametrize(
    ("relations", "aspects"),
    [(["qq", "kk", "vv"], {"query", "key", "value"}), (["vv"], {"value"}), (["qk", "kq"], {"query", "key"})],
)
def test_it_asks_only_for_what_it_needs(models, relations: list, aspects: set[str]) -> None:
    settings = Minilmv2Config(relations=relations, relation_heads=2, teacher_layer=4)
    method = build_minilmv2(settings, models.bert(5, 32, 4, 4), models.bert(2, 16, 4, 4))
    assert method.needs_teacher
    assert method.student_taps == {aspect: {1} for aspect in aspects}
    assert method.teacher_taps == {aspect: {3} for aspect in aspects}


def test_relation_heads_must_divide_the_widths(models) -> None:
    settings, teacher = Minilmv2Config(relation_heads=7), models.bert(2, 96, 4, 4)
    with pytest.raises(
        UserError,
        match=r"relation_heads is 7.* 96 in the teacher and 36 in the student; give one of 1, 2, 3, 4, 6, 12$",
    ):
        METHODS["minilmv2"].build(settings, teacher, models.bert(2, 36, 4, 4))
    grouped, student = models.llama(2, 32, 4, 2), models.llama(2, 16, 4, 4)
    with pytest.raises(UserError, match=r"16, 32 in the teacher and 16 in the student; give one of 1, 2, 4, 8, 16$"):
        METHODS["minilmv2"].build(replace(settings, relation_heads=32), grouped, student)
    # Keys alone are narrower than queries; a relation of both is as wide as the queries.
    METHODS["minilmv2"].build(
        replace(settings, relation_heads=32, relations=["qk"]), grouped, models.llama(2, 32, 2, 1)
    )


@pytest.mark.parametrize("layer", [0, 6])
def test_layers_that_are_not_there(models, layer: int) -> None:
    settings = Minilmv2Config(relation_heads=2, teacher_layer=layer)
    with pytest.raises(UserError, match=rf"minilmv2\.teacher_layer is {layer}: the teacher has 5 layers.* from 1 to 5"):
        build_minilmv2(settings, models.bert(5, 32, 4, 4), models.bert(2, 16, 4, 4))


def test_other_kinds_and_windows_cannot_be_compared(models) -> None:
    settings = Minilmv2Config(relation_heads=2)
    with pytest.raises(UserError, match="is a decoder and the student"):
        build_minilmv2(settings, models.llama(2, 16, 4, 2), models.bert(2, 16, 4, 4))
    with pytest.raises(UserError, match="the attention window is 3 in the student's layer 2 and None"):
        build_minilmv2(settings, models.llama(2, 16, 4, 2), models.mistral(2, 16, 4, 2))


def test_the_search_comes_first(models) -> None:
    config = models.bert(2, 16, 4, 4)
    with pytest.raises(UserError, match="search"):
        build_minilmv2(Minilmv2Config(teacher_layer="auto"), config, config)


def test_a_target_sees_the_source_and_itself_so_far(models) -> None:
    pair = models.Pair(models.roberta(3, 32, 4, 4), models.roberta(2, 16, 2, 2), batch=models.targets())
    method = build_minilmv2(Minilmv2Config(relation_heads=4), pair.teacher_config, pair.student_config)
    assert pair.means(method) == pytest.approx(naive(pair, models, ["qq", "kk", "vv"], 4, 1, 2), rel=1e-4)
