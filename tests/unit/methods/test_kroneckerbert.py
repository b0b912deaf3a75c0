from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from references import terms_of
from transformers import LlamaConfig

from llmdistill.batch import IGNORE_INDEX, Batch, Outputs, Taps
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.methods.kroneckerbert import KroneckerbertConfig, build_kroneckerbert
from llmdistill.objective import Objective

LAYERS = 3
INNER = ("embedding", "attention", "ffn")
OTHER = KroneckerbertConfig(
    embedding=0.5, attention=2.0, ffn=0.25, ffn_output="projection", logits=3.0, label=0.75, temperature=2.0
)


@pytest.fixture(scope="module", params=["llama", "mistral", "gpt2", "bert", "roberta"])
def pair(request: pytest.FixtureRequest, models):
    """Two models of one shape, in Llama and Mistral with half the key heads."""
    config = models.families[request.param](LAYERS, 16, 4, 2)
    return models.Pair(config, config)


def only(*names: str) -> KroneckerbertConfig:
    """Settings with these terms alone."""
    weights = {name: float(name in names) for name in (*INNER, "logits", "label")}
    return KroneckerbertConfig(**weights, scale="plain")


def naive(pair, temperature: float, output: str, layers: list[tuple[int, int]], scale: str) -> dict[str, float]:
    """KroneckerBERT eq. 14, token by token, in fp64; `output` is the hook at the feed-forward output."""
    student, teacher = pair.seen()

    def squared(mine: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((mine - theirs).square().mean() / (theirs.square().mean() if scale == "token" else 1))

    def score(seen, layer: int, h: int, b: int, i: int, j: int) -> float:
        """Eq. 9."""
        query, key = seen.per_head("query", layer, 4)[b, i, h], seen.per_head("key", layer, 4)[b, j, h]
        return float(query @ key) / seen.width**0.5

    def attention(b: int, i: int) -> float:
        keys = student.keys_of(pair.batch, b, i)
        return sum(
            (score(student, mine, h, b, i, j) - score(teacher, theirs, h, b, i, j)) ** 2 / (4 * len(keys))
            for mine, theirs in layers
            for h in range(4)
            for j in keys
        )

    def ffn(b: int, i: int) -> float:
        return sum(
            squared(student.flat[output, mine][b, i], teacher.flat[output, other][b, i]) for mine, other in layers
        )

    def embedding(b: int, i: int) -> float:
        return squared(student.embedding[b, i], teacher.embedding[b, i])

    inner = {f.__name__: pair.mean_over_tokens(f) for f in (embedding, attention, ffn)}
    return {**inner, **pair.output_terms(student, teacher, temperature)}


@pytest.mark.parametrize("settings", [KroneckerbertConfig(scale="plain"), OTHER], ids=["the paper's", "others"])
def test_terms_equal_the_naive_loop(pair, settings: KroneckerbertConfig) -> None:
    method = build_kroneckerbert(settings, pair.teacher_config, pair.student_config)
    same = [(layer, layer) for layer in range(LAYERS)]
    expected = naive(pair, settings.temperature, "ffn_down" if settings is OTHER else "hidden", same, settings.scale)
    weights = asdict(settings)
    assert method.weights == {name: weights[name] for name in expected}
    assert list(method.weights) == [*INNER, "logits", "label"]
    assert method.positions == {name: "tokens" if name in INNER else "labels" for name in expected}
    assert not method.projections
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("spec", "layers"), [("uniform", [(0, 2), (1, 4)]), ("4,1", [(0, 3), (1, 0)]), ("0,3", [(1, 2)])]
)
def test_a_student_of_fewer_layers_learns_from_those_of_the_map(models, spec: str, layers: list) -> None:
    pair = models.Pair(models.bert(5, 16, 4, 4), models.bert(2, 16, 4, 4))
    settings = KroneckerbertConfig(teacher_layers=spec)
    method = build_kroneckerbert(settings, pair.teacher_config, pair.student_config)
    assert pair.means(method) == pytest.approx(naive(pair, 1.0, "hidden", layers, "token"), rel=1e-4)


def random_taps(seed: int, padding: torch.Tensor, groups: int) -> Taps:
    """Inner tensors in fp64 that are not a number wherever there is padding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        where = padding[:, None, :, None] if len(shape) == 4 else padding[..., None]
        return drawn.masked_fill(where, torch.nan).requires_grad_()

    return Taps(
        query={layer: draw(2, 4, 6, 3) for layer in range(LAYERS)},
        key={layer: draw(2, groups, 6, 3) for layer in range(LAYERS)},
        hidden={layer: draw(2, 6, 8) for layer in range(LAYERS)},
        embedding={0: draw(2, 6, 8)},
        scaling=dict.fromkeys(range(LAYERS), 0.5),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_padding_may_hold_anything(models, causal: bool) -> None:
    config, groups = (models.llama(LAYERS, 8, 4, 2), 2) if causal else (models.bert(LAYERS, 8, 4, 4), 4)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    batch = Batch(torch.zeros_like(mask), mask, torch.full_like(mask, IGNORE_INDEX))
    student, teacher = (random_taps(seed, mask == 0, groups) for seed in (0, 1))
    method = build_kroneckerbert(only(*INNER), config, config)
    terms = terms_of(method, Outputs(None, student), Outputs(None, teacher), batch)

    expected = dict.fromkeys(INNER, 0.0)
    with torch.no_grad():
        for b, i in mask.nonzero().tolist():
            keys = [j for j in range(6) if mask[b, j] and (j <= i or not causal)]
            expected["embedding"] += float((student.embedding[0][b, i] - teacher.embedding[0][b, i]).square().mean())
            for layer in range(LAYERS):
                error = student.hidden[layer][b, i] - teacher.hidden[layer][b, i]
                expected["ffn"] += float(error.square().mean())
                for h in range(4):
                    mine, theirs = (
                        [
                            0.5 * float(taps.query[layer][b, h, i] @ taps.key[layer][b, h // (4 // groups), j])
                            for j in keys
                        ]
                        for taps in (student, teacher)
                    )
                    errors = [(x - y) ** 2 for x, y in zip(mine, theirs, strict=True)]
                    expected["attention"] += sum(errors) / (4 * len(keys))
    assert {name: term.sum.item() for name, term in terms.items()} == pytest.approx(expected, rel=1e-6)
    assert {int(term.count) for term in terms.values()} == {9}

    torch.stack([term.sum for term in terms.values()]).sum().backward()
    for tap in (*student.query.values(), *student.key.values(), *student.hidden.values(), student.embedding[0]):
        assert tap.grad is not None
        where = (mask == 0)[:, None, :, None] if tap.dim() == 4 else (mask == 0)[..., None]
        assert (tap.grad.masked_select(where) == 0).all()
        assert (tap.grad.masked_select(~where) != 0).any()
    assert all(tap.grad is None for tap in (*teacher.query.values(), *teacher.hidden.values()))


EVERY = frozenset(range(LAYERS))


@pytest.mark.parametrize(
    ("settings", "taps"),
    [
        (KroneckerbertConfig(), {"embedding": {0}, "query": EVERY, "key": EVERY, "hidden": EVERY}),
        (only("embedding", "label"), {"embedding": {0}}),
        (only("attention"), {"query": EVERY, "key": EVERY}),
        (only("ffn", "logits"), {"hidden": EVERY}),
        (replace(only("ffn"), ffn_output="projection"), {"ffn_down": EVERY}),
        (only("logits"), {}),
        (only("label"), {}),
    ],
)
def test_it_asks_only_for_what_it_needs(models, settings: KroneckerbertConfig, taps: dict[str, set[int]]) -> None:
    config = models.bert(LAYERS, 16, 4, 4)
    method = build_kroneckerbert(settings, config, config)
    assert method.student_taps == method.teacher_taps == taps
    assert method.needs_teacher is (settings != only("label"))


def test_the_labels_are_those_of_the_objective(models) -> None:
    config = models.bert(LAYERS, 16, 4, 4)
    both = Objective(tokens=True, sequences="classes")
    stage_one = METHODS["kroneckerbert"].build(KroneckerbertConfig(), config, config, both)
    assert list(stage_one.weights) == [*INNER, "logits", "sequence_logits", "label", "sequence_label"]
    task = METHODS["kroneckerbert"].build(
        KroneckerbertConfig(), config, config, Objective(tokens=False, sequences="scores")
    )
    assert list(task.weights) == [*INNER, "sequence_logits", "sequence_label"]


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 4), ("num_attention_heads", 8), ("hidden_size", 32), ("head_dim", 8)]
)
def test_models_of_other_shapes_are_refused(models, key: str, value: int) -> None:
    teacher = models.llama(LAYERS, 16, 4, 2)
    student = LlamaConfig.from_dict({**teacher.to_dict(), key: value})
    with pytest.raises(UserError, match=r"kroneckerbert compares layer with layer .* factorize the teacher"):
        build_kroneckerbert(KroneckerbertConfig(), teacher, student)
    with pytest.raises(UserError, match="kroneckerbert compares like with like"):
        build_kroneckerbert(KroneckerbertConfig(), teacher, models.gpt2(LAYERS, 16, 4, 4))


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"kroneckerbert\.ffn is -1"):
        KroneckerbertConfig(ffn=-1.0)
    with pytest.raises(ValueError, match="kroneckerbert: no term is left to train with"):
        only()
    with pytest.raises(ValueError, match=r"kroneckerbert\.temperature is 0"):
        replace(OTHER, temperature=0.0)
