"""Weighted factorization of whole models: the loss that it keeps, budgets, passes over the data, work of the ranks."""

import pytest
import torch
from shrunk import shrunk_model
from tiny import tiny_model

from llmdistill.batch import Batch
from llmdistill.config import CalibrationConfig, FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.students.convert import compress_model
from llmdistill.students.counting import count_parameters, layer_linears
from llmdistill.students.sizes import summarize
from llmdistill.students.start import measure, sampled
from llmdistill.students.start import weigh as module
from llmdistill.students.start.cuts import predict_losses
from llmdistill.students.start.measure import GIB, deal, plan_passes
from llmdistill.students.start.sampled import Sampling
from llmdistill.students.start.weigh import choose_ranks, measure_factors, weigh

from support import in_memory

VOCABULARY = 40


@pytest.fixture(autouse=True)
def _whole_batches(monkeypatch):
    """Models as small as these would be given row by row."""
    for each in (module, sampled):
        monkeypatch.setattr(each, "graph_tokens", lambda _: 1000)


@pytest.fixture(scope="module")
def llama():
    """A Llama whose layers differ in how much they matter, and whose inputs are far from white."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48}
    model = tiny_model("llama", **sizes, initializer_range=0.3, tie_word_embeddings=True, pad_token_id=None)
    with torch.no_grad():
        for layer, scale in zip(model.model.layers, (2.0, 0.7, 0.1), strict=True):
            layer.mlp.down_proj.weight.mul_(scale)
            layer.input_layernorm.weight.copy_(torch.logspace(-1, 0.5, 32)[torch.randperm(32)])
        model.model.norm.weight.copy_(torch.logspace(-1, 0.3, 32)[torch.randperm(32)])
    return model


def batches(count, seed, size=8):
    """Short sequences in which some tokens are frequent and most are rare."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = (VOCABULARY * torch.rand(size, 12, generator=draw) ** 3).long()
        names = tuple((1000 * seed + number * size + row,) for row in range(size))
        made.append(Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, sample_ids=names))
    return made


def naive_divergence(student, teacher, first=12):
    """KL(teacher‖student) per token, of the first ones of each row, on data that the calibration did not see."""
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in batches(4, 9):
            log_t, log_s = (m(batch.input_ids[:, :first]).logits.log_softmax(-1) for m in (teacher, student))
            total += float((log_t.exp() * (log_t - log_s)).sum())
            tokens += batch.input_ids[:, :first].numel()
    return total / tokens


WEIGHED = {}
"""By model and settings: several tests look at the same."""
BY_LOSS = {"target_params": "60%", "weighting": "gradients", "allocation": "loss"}


def weighed(model, chosen, method="svd"):
    key = model.config.vocab_size, repr(chosen)
    if key not in WEIGHED:
        WEIGHED[key] = weigh(in_memory(model, batches(8, 1), batches(4, 9)), chosen, method)
    return WEIGHED[key]


def student_of(model, method="svd", **given):
    chosen = FactorizeConfig(**given)
    weighted = None if chosen.weighting == "none" else weighed(model, chosen, method)
    return compress_model(model, chosen, method, weighted=weighted)


@pytest.mark.parametrize(("method", "size", "of_activations", "of_gradients"), [
    ("svd", {"rank": 8}, 0.9, 0.8),
    ("svd", {"embedding_rank": 16}, 0.9, 0.7),
    ("kronecker", {"shapes": {"*.mlp.*": "8x8", "*": "dense"}, "sums": 8}, 0.7, 0.7),
], ids=["layers", "embedding", "kronecker"])  # fmt: skip
def test_weighting_keeps_more_of_the_loss(llama, method, size, of_activations, of_gradients):
    plain, activations, gradients = (
        student_of(llama, method, **size, weighting=weighting) for weighting in ("none", "activations", "gradients")
    )
    assert count_parameters(plain) == count_parameters(gradients) < count_parameters(llama)
    loss = naive_divergence(plain, llama)
    assert naive_divergence(activations, llama) < of_activations * loss
    assert naive_divergence(gradients, llama) < of_gradients * loss


def test_ranks_follow_what_cuts_were_measured_to_cost(llama):
    chosen, data = FactorizeConfig(**BY_LOSS), batches(8, 1)
    first = choose_ranks(llama.config, chosen, measure_factors(in_memory(llama, data), chosen))
    costs = predict_losses(llama, first.factors, data, Sampling(seed=2**31))  # on 64 examples
    found = weighed(llama, chosen)
    assert found.ranks != first.ranks
    for name, rank in first.ranks.items():
        assert found.factors[name].costs()[rank] == pytest.approx(float(costs[name][rank]))


def test_the_better_ranks_on_held_out_data_are_taken(llama, monkeypatch):
    found = weighed(llama, FactorizeConfig(**BY_LOSS))
    assert len(set(found.ranks.values())) > 3
    one_rank = {"target_params": "60%", "weighting": "gradients"}
    for name, given in (("loss", BY_LOSS), ("uniform", one_rank)):
        assert found.held_out[name] == pytest.approx(naive_divergence(student_of(llama, **given), llama), rel=1e-3)
    assert found.held_out["loss"] < found.held_out["uniform"]
    monkeypatch.setattr(measure, "LOSS_TOKENS", 6)  # a decoder is judged by the first tokens of each row
    judged = weigh(in_memory(llama, batches(8, 1), batches(4, 9)), FactorizeConfig(**BY_LOSS))
    student = compress_model(llama, FactorizeConfig(**BY_LOSS), weighted=judged)
    assert judged.held_out["loss"] == pytest.approx(naive_divergence(student, llama, first=6), rel=1e-3)
    # Where the prediction misleads, the single rank is taken.
    monkeypatch.setattr(module, "divergences", lambda *_: {"loss": 2.0, "uniform": 1.0})
    found = weigh(in_memory(llama, batches(1, 1), batches(1, 9)), FactorizeConfig(**BY_LOSS))
    assert found.ranks == weighed(llama, FactorizeConfig(**one_rank)).ranks


def test_ranks_are_multiples_and_matrices_that_gain_nothing_stay_dense(llama):
    chosen = FactorizeConfig(**{**BY_LOSS, "target_params": "85%"}, rank_multiple=4)
    weighted = weigh(in_memory(llama, batches(1, 1)), chosen)
    assert all(rank % 4 == 0 for rank in weighted.ranks.values())
    most, before_any_data = int(0.85 * count_parameters(llama)), summarize(llama.config, chosen)
    assert count_parameters(compress_model(llama, chosen, weighted=weighted)) <= most
    assert (before_any_data["student_params"], before_any_data["rank"]) == (most, None)
    sizes = {name.removeprefix("model."): shape for name, shape in layer_linears(llama).items()}
    assert all(rank * sum(sizes[name]) < sizes[name][0] * sizes[name][1] for name, rank in weighted.ranks.items())


def test_layers_and_embedding_are_weighted_together(llama):
    size = {"target_params": "55%", "embedding_rank": 24}
    chosen = FactorizeConfig(**{**BY_LOSS, **size})
    found = weigh(in_memory(llama, batches(2, 1)), chosen)
    assert set(found.others) == {"embed_tokens"}
    (table,) = found.others.values()
    of_linears = sum(each.costs()[found.ranks[name]] for name, each in found.factors.items() if name in found.ranks)
    assert found.predicted_loss == pytest.approx(of_linears + table.cost)
    student = compress_model(llama, chosen, weighted=found)
    assert naive_divergence(student, llama) < 0.7 * naive_divergence(student_of(llama, **size), llama)


AUTO = {**BY_LOSS, "embedding_rank": "auto"}


@pytest.fixture(scope="module")
def wordy(llama):
    """The same with a larger vocabulary, whose rows are nearly in a space of 12 dimensions."""
    model = type(llama)(replaced(llama.config, vocab_size=160)).eval()
    with torch.no_grad():
        model.load_state_dict({k: v for k, v in llama.state_dict().items() if v.shape[0] != VOCABULARY}, strict=False)
        directions = torch.linspace(2.0, 0.05, 32) * torch.where(torch.arange(32) < 12, 1.0, 0.1)
        model.model.embed_tokens.weight.copy_(0.3 * torch.randn(160, 32) * directions @ random_rotation(32))
    return model


def replaced(config, **values):
    return type(config)(**{**config.to_dict(), **values})


def random_rotation(width):
    return torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)))[0]


def test_embedding_and_linears_share_a_budget(wordy):
    found = weighed(wordy, FactorizeConfig(**AUTO))
    ((name, table),) = found.others.items()
    assert name == "embed_tokens"
    student, dense = (student_of(wordy, **given) for given in (AUTO, BY_LOSS))
    assert student.model.embed_tokens.A.weight.shape == (160, table.rank)
    room = int(0.6 * count_parameters(wordy)) - count_parameters(student)
    assert 0 <= room < 80, "a rank of a linear costs more"
    assert list(found.held_out) == ["loss", "uniform", "embedding"]
    for name, each in (("embedding", student), ("loss", dense)):
        assert found.held_out[name] == pytest.approx(naive_divergence(each, wordy), rel=1e-3)
    # Among the nearest of all ranks of the embedding, each with the best ranks of the linears
    others = [weighed(wordy, FactorizeConfig(**BY_LOSS, embedding_rank=rank)) for rank in range(8, 26, 3)]
    assert found.held_out["embedding"] < 1.2 * min(other.held_out["loss"] for other in others)
    assert found.held_out["embedding"] < 0.8 * found.held_out["loss"]


def test_an_embedding_stays_dense_where_a_narrower_one_saves_little_or_nothing_is_held_out(wordy, monkeypatch):
    dense, chosen = weighed(wordy, FactorizeConfig(**BY_LOSS)), FactorizeConfig(**AUTO)
    assert weigh(in_memory(wordy, batches(8, 1)), chosen).others == {}
    given = {"loss": 1.0, "uniform": 2.0, "lower": 0.02, "higher": 0.01}
    for of_embedding, kinds in ((3.0, 0), (0.95, 0), (0.85, 1)):  # it must save a tenth
        found_by = {**given, "embedding": of_embedding}
        monkeypatch.setattr(module, "divergences", lambda _, cuts, *__, by=found_by: {name: by[name] for name in cuts})
        found = weigh(in_memory(wordy, batches(8, 1), batches(4, 9)), chosen)
        assert len(found.others) == kinds
        assert (found.ranks == dense.ranks) == (kinds == 0)


def test_a_target_that_linears_alone_do_not_reach_is_reached_with_the_embedding(wordy):
    given = {**AUTO, "target_params": "20%"}
    with pytest.raises(UserError, match="out of reach"):
        weigh(in_memory(wordy, []), FactorizeConfig(**{**given, "embedding_rank": None}))
    student = student_of(wordy, **given)
    assert count_parameters(student) <= 0.2 * count_parameters(wordy)
    assert list(weighed(wordy, FactorizeConfig(**given)).held_out) == ["embedding"]


def test_a_model_without_a_backward_pass_outside_of_training_is_refused():
    """Reformer's layers are reversible, and write down what their backward pass needs in training mode alone."""
    source = in_memory(shrunk_model("reformer as a decoder"), batches(1, 1))
    for embedding_rank in (None, 8):
        with pytest.raises(UserError, match=r"no gradient comes back .* set weighting to activations"):
            weigh(source, FactorizeConfig(rank=8, weighting="gradients", embedding_rank=embedding_rank))
    assert weigh(source, FactorizeConfig(rank=8, weighting="activations")).ranks is not None


def test_too_few_tokens_are_said(llama):
    chosen = FactorizeConfig(rank=8, weighting="gradients")
    assert weigh(in_memory(llama, batches(1, 1, size=4)), chosen).warning() is None
    few = weigh(in_memory(llama, batches(1, 1, size=3)), chosen).warning()
    assert "the calibration data have 36 tokens, fewer than the 48 columns" in few


def test_no_data_and_what_kronecker_cannot_use_are_refused_before_any_work(llama, tmp_path):
    with pytest.raises(UserError, match="weighting gradients needs calibration data"):
        compress_model(llama, FactorizeConfig(shapes={"*": "4x4"}, weighting="gradients"), "kronecker")
    source = in_memory(llama, [])
    object.__setattr__(source, "batches", lambda: pytest.fail("the data are read"))
    for given, said in (
        ({"target_params": "50%"}, "target_params 50% with the method kronecker needs the weights"),
        ({"shapes": {"*": "8x8"}, "rank_multiple": 8}, "rank_multiple is a setting of the method svd"),
        (
            {"shapes": {"*": "8x8"}, "calibration": CalibrationConfig(data="own", folder=str(tmp_path))},
            r"calibration\.folder keeps factors of the method svd",
        ),
    ):
        with pytest.raises(UserError, match=said):
            weigh(source, FactorizeConfig(weighting="gradients", **given), "kronecker")


def test_matrices_at_a_time_are_those_one_by_one(llama):
    data, chosen, threads = batches(2, 1), FactorizeConfig(rank=8, weighting="gradients"), torch.get_num_threads()
    found = {}
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found[count] = measure_factors(in_memory(llama, data), chosen)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert list(found[1]) == list(found[3])
    for name, alone in found[1].items():
        torch.testing.assert_close(found[3][name].values, alone.values, rtol=1e-4, atol=0)


def test_as_many_matrices_at_a_time_as_memory_and_threads_allow(llama, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    room = 2 * count_parameters(llama)
    for count in (1, 4):
        weights = {"a": torch.empty(1, 1), "b": torch.empty(8, 8)}
        monkeypatch.setattr(measure, "working_bytes", lambda m, n, count=count: room // count * m // 8)
        assert measure.workers(weights, llama) == count
    monkeypatch.setattr(measure, "working_bytes", lambda m, n: 1)
    assert measure.workers(weights, llama) == 5


SHAPES = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "gate": (12, 8), "up": (12, 8), "down": (8, 12)}
GROUPS = [["q", "k", "v"], ["o"], ["gate", "up"], ["down"]]


def test_passes_stay_below_the_memory_and_measure_shared_inputs_again_where_they_are_split():
    def size(group, *, of_inputs=True):
        return 4 * (of_inputs * SHAPES[group[0]][1] ** 2 + sum(SHAPES[name][0] ** 2 for name in group))

    # Room for queries and keys, but not for the values.
    most = size(["q", "k"])
    passes = plan_passes(GROUPS, SHAPES, gradients=True, memory=most / GIB)
    assert [each.groups for each in passes] == [[["q", "k"]], [["v"]], [["o"]], [["gate"]], [["up"]], [["down"]]]
    assert [each.bytes for each in passes] == [most, *(size([name]) for name in ("v", "o", "gate", "up", "down"))]
    # A whole layer but one matrix, and then what is left.
    most = sum(map(size, GROUPS)) - 1
    first, last = plan_passes(GROUPS, SHAPES, gradients=True, memory=most / GIB)
    assert (first.groups, last.groups) == (GROUPS[:3], GROUPS[3:])
    # Less memory than any matrix has: each is measured alone.
    alone = [each.groups for each in plan_passes(GROUPS, SHAPES, gradients=True, memory=1e-9)]
    assert alone == [[[name]] for name in SHAPES]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_matrix_has_a_rank_and_the_work_is_even(ranks):
    groups = [[f"{layer}.{name}" for name in group] for layer in range(4) for group in GROUPS]
    shapes = {name: SHAPES[name.split(".")[1]] for group in groups for name in group}
    owners = deal(groups, shapes, ranks)
    assert set(owners) == set(shapes)
    assert all(len({owners[name] for name in group}) == 1 for group in groups)
    loads = [0] * ranks
    for name, (m, n) in shapes.items():
        loads[owners[name]] += m * n * min(m, n)
    largest = max(sum(m * n * min(m, n) for m, n in (shapes[name] for name in group)) for group in groups)
    assert max(loads) - min(loads) <= largest
