"""Students made from loaded weights and from folders, of the same shape as their teacher or another."""

import copy
from collections import defaultdict

import pytest
import torch
from tiny import random_student, shaken, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForPreTraining, LlamaForCausalLM

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.config.student import StudentConfig
from llmdistill.errors import UserError
from llmdistill.students.convert import compress_model, factorize, make_student, replace_pivots
from llmdistill.students.counting import layer_linears
from llmdistill.students.importance import measure_importance
from llmdistill.students.install import matrix
from llmdistill.students.kronecker import KroneckerShape, nearest_kronecker
from llmdistill.students.merge import merge
from llmdistill.students.modules import LowRankLinear
from llmdistill.students.reconstruction import by_kind
from llmdistill.students.sizes import plan_factors

KRONECKER = {"shapes": {"*": "4x4"}, "sums": 2}


def tiny(kind):
    more = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
    more |= {"attention_bias": True, "tie_word_embeddings": True} if kind == "llama" else {}
    return shaken(tiny_model(kind, **({"n_embd": 32, "vocab_size": 96} if kind == "gpt2" else more)))


@pytest.mark.parametrize("method", ["left", "balanced", "kronecker"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_each_module_is_the_best_approximation_and_keeps_its_bias(kind, method):
    teacher = tiny(kind)
    student = copy.deepcopy(teacher)
    if method == "kronecker":
        settings = FactorizeConfig(shapes={"*": "8x4"}, sums=2, embedding_columns=4)
        factorize(student, planned := plan_factors(student, settings, "kronecker"))
        a, b = nearest_kronecker(teacher.get_input_embeddings().weight.double(), KroneckerShape(96, 8))
        table = student.get_input_embeddings()(torch.arange(96))
        torch.testing.assert_close(table.double(), torch.kron(a[0], b[0]), rtol=0, atol=1e-5)
    else:
        factorize(student, planned := plan_factors(student, FactorizeConfig(rank=5)), sigma=method)
    for name, size in planned.sizes.items():
        dense, factorized = teacher.get_submodule(name), student.get_submodule(name)
        weight = matrix(dense).detach()
        if method == "kronecker":
            best = sum(torch.kron(one, other) for one, other in zip(*nearest_kronecker(weight, size), strict=True))
        else:
            u, s, vh = (factor.float() for factor in torch.linalg.svd(weight.double(), full_matrices=False))
            best = (u[:, :5] * s[:5]) @ vh[:5]
            # Where Σ sits in A, B's columns have length 1 (MaKD eq. 11, which writes the transposes).
            lengths = torch.ones(5) if method == "left" else s[:5].sqrt()
            torch.testing.assert_close(torch.linalg.norm(factorized.B.weight, dim=0), lengths)
        torch.testing.assert_close(factorized.weight, best, rtol=0, atol=1e-5)
        x = torch.randn(3, best.shape[1])
        expected = x @ best.T + (0 if dense.bias is None else dense.bias)
        torch.testing.assert_close(factorized(x), expected, rtol=0, atol=1e-5)


def test_dtype_is_kept_and_computed_finer():
    teacher = tiny("llama").to(torch.bfloat16)
    student = copy.deepcopy(teacher)
    factorize(student, plan_factors(student, FactorizeConfig(rank=8, embedding_rank=16)))
    assert {parameter.dtype for parameter in student.parameters()} == {torch.bfloat16}
    name = "model.layers.0.mlp.up_proj"
    weight = matrix(teacher.get_submodule(name)).float().T
    u, s, _ = torch.linalg.svd(weight, full_matrices=False)
    low_rank = student.get_submodule(name)
    # One rounding to bf16 (half of 2⁻⁷) and no more; an SVD in bf16 would be off by far more.
    torch.testing.assert_close(low_rank.A.weight.T.abs().float(), (u * s)[:, :8].abs(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("embedding_rank", [None, 20])
def test_pivots_give_way_to_plain_factors_of_the_same_products(kind, embedding_rank):
    others = {"llama": {"*.[kv]_proj": 15}, "gpt2": {"*.c_attn": 30}, "bert": {}}[kind]
    ranks = {"*.0.*": 5, **others, "*": 23}  # plain factors of these others would be larger than the matrices
    given = FactorizeConfig(ranks=ranks, form="pivoted", embedding_rank=embedding_rank)
    model = compress_model(tiny(kind), given).eval()
    before, ids = copy.deepcopy(model), torch.arange(24).view(2, 12)
    assert replace_pivots(model)
    factors = {name for name, module in model.named_modules() if isinstance(module, LowRankLinear)}
    heads = {"lm_head", "cls.predictions.decoder"}
    assert len(factors - heads) == sum(".0." in name for name in layer_linears(tiny(kind)))
    assert hasattr(model.get_input_embeddings(), "A") == (embedding_rank is not None)
    torch.testing.assert_close(model(input_ids=ids)[0], before(input_ids=ids)[0], rtol=0, atol=1e-4)
    assert not replace_pivots(model), "it has none"


def test_a_config_shared_with_the_teacher_is_left_alone():
    teacher = tiny("llama")
    student = LlamaForCausalLM(teacher.config)
    assert student.config is teacher.config
    factorize(student, plan_factors(student, FactorizeConfig(rank=4)))
    assert not hasattr(teacher.config, "quantization_config")
    configs = {id(module.config) for module in student.modules() if hasattr(module, "config")}
    assert configs == {id(student.config)}


def test_weights_that_are_not_finite_are_refused_and_nothing_changes():
    model = tiny("llama")
    ranks = plan_factors(model, FactorizeConfig(rank=4))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.down_proj"):
        factorize(model, ranks)
    assert not any(isinstance(module, LowRankLinear) for module in model.modules())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", [{"ranks": {"*": 3}}, {"ranks": {"*": 3}, "form": "pivoted"}, KRONECKER], ids=str)
def test_the_loss_is_that_of_the_matrices_which_the_student_has(kind, settings):
    # In a dtype that rounds the factors, which the loss must not overlook.
    model, lost = tiny_model(kind).bfloat16(), {}
    method = "kronecker" if settings is KRONECKER else "svd"
    student = compress_model(model, FactorizeConfig(**settings), method, lost=lost)
    assert lost.keys() == student.config.quantization_config.modules.keys()
    merge(student.float())
    kinds = defaultdict(list)
    for name, (left_out, whole) in lost.items():
        ours, theirs = (matrix(each.base_model.get_submodule(name)).detach().float() for each in (student, model))
        assert left_out == pytest.approx(float((ours - theirs).square().sum()), rel=1e-3)
        assert whole == pytest.approx(float(theirs.square().sum()), rel=1e-3)
        kinds[name.rsplit(".", 1)[-1]].append((left_out, whole))
    shares = {kind: (sum(a for a, _ in each) / sum(b for _, b in each)) ** 0.5 for kind, each in kinds.items()}
    expected = {kind: {"matrices": len(each), "lost": pytest.approx(shares[kind])} for kind, each in kinds.items()}
    assert by_kind(lost) == expected


# Students of another shape than their teacher's.

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 40}


@pytest.fixture
def bert(tmp_path):
    """A teacher's folder with both pretraining heads, in bf16."""
    AutoModelForPreTraining.from_config(tiny_config("bert", **SIZES)).bfloat16().save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher/tokenizer.json").write_text("{}")
    return tmp_path / "teacher"


def make(teacher, output, shape="2x16x2", seed=0, head="lm_head", importance=None, **settings):
    make_student(teacher, output, StudentConfig(shape=shape, **settings), seed=seed, head=head, importance=importance)
    return AutoModelForPreTraining.from_pretrained(output) if head == "pretraining" else output


def weights(folder):
    return AutoModelForMaskedLM.from_pretrained(folder).state_dict()


def test_random_students_follow_the_seed_and_nothing_else(bert, tmp_path):
    (bert / "model.safetensors").unlink()  # not needed for random weights
    state = torch.get_rng_state()
    make(bert, tmp_path / "a", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    make(bert, tmp_path / "b", seed=3)
    make(bert, tmp_path / "c", seed=4)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    matrix = a[name := "bert.encoder.layer.1.output.dense.weight"]
    assert (matrix.shape, matrix.dtype) == ((16, 32), torch.float32)
    assert matrix.std() == pytest.approx(0.02, rel=0.2)
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(matrix, c[name])
    assert (tmp_path / "a/tokenizer.json").read_text() == "{}"


def test_weights_of_the_teacher_and_its_heads_and_a_factorized_embedding(bert, tmp_path):
    teacher = AutoModelForPreTraining.from_pretrained(bert, dtype=torch.float32)
    first = make(bert, tmp_path / "first", "2x32x4", init="layers", layers="first", head="pretraining")
    columns = {"method": "kronecker", "factorize": FactorizeConfig(embedding_columns=4)}
    spread = make(bert, tmp_path / "spread", "2x16x2", init="slice", head="pretraining", **columns)
    source = teacher.bert.encoder.layer
    assert torch.equal(first.bert.encoder.layer[1].output.dense.weight, source[1].output.dense.weight)
    assert torch.equal(spread.bert.encoder.layer[1].output.dense.weight, source[2].output.dense.weight[:16, :32])
    assert torch.equal(first.cls.seq_relationship.weight, teacher.cls.seq_relationship.weight)
    assert first.cls.predictions.decoder.weight is first.bert.embeddings.word_embeddings.weight
    assert first.dtype == torch.float32
    embedding = spread.get_input_embeddings()
    assert embedding.A.weight.shape == (40, 4)
    assert spread.cls.predictions.decoder.B.weight is embedding.A.weight


def test_calibration_data_choose_layers_and_parts(bert, tmp_path):
    teacher = AutoModelForPreTraining.from_pretrained(bert, dtype=torch.float32)
    with torch.no_grad():
        for name in ("attention.output.dense", "output.dense"):
            teacher.bert.encoder.layer[1].get_submodule(name).weight.zero_()  # a layer that changes little
    teacher.save_pretrained(bert)
    ids = torch.arange(1, 25).view(2, 12)
    importance = measure_importance(teacher, [Batch(input_ids=ids, attention_mask=ids.clamp(max=1), labels=ids)])
    make(bert, tmp_path / "student", "3x32x4x40", init="important", layers="important", importance=importance)
    student = weights(tmp_path / "student")
    for own, layer in enumerate((0, 2, 3)):
        best = importance.neurons_LF[layer].topk(40).indices.sort().values
        kept = student[f"bert.encoder.layer.{own}.output.dense.weight"]
        assert torch.equal(kept, teacher.bert.encoder.layer[layer].output.dense.weight[:, best])


def test_a_factorized_teacher_is_multiplied_out(tmp_path):
    teacher = random_student(AutoModelForCausalLM, tiny_config("llama", **SIZES), {"rank": 8})
    teacher.save_pretrained(tmp_path / "teacher")
    make(tmp_path / "teacher", tmp_path / "student", "2x32x4", init="layers")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    low_rank = teacher.model.layers[2].mlp.up_proj
    torch.testing.assert_close(student.model.layers[1].mlp.up_proj.weight, low_rank.weight)
    assert not hasattr(student.config, "quantization_config")
    with pytest.raises(UserError, match=r"student\.init layers .* width is 16 and the teacher's 32"):
        make(tmp_path / "teacher", tmp_path / "refused", init="layers")
