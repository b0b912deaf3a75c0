"""Attention maps and their divergence, against transformers' own attention and scipy's relative entropy."""

import json
import shutil

import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from tiny import tiny_config, tiny_model
from transformers import AutoModel, AutoTokenizer, BertModel
from word_models import save_tokenizer

import llmdistill
from llmdistill.cli import main
from llmdistill.data.pairs import EncodedPair
from llmdistill.papers.attention_maps import attention_maps, map_divergence, mean_map


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "mistral"])
def test_maps_are_those_of_transformers(name: str) -> None:
    model = tiny_model(name, scale=20.0)
    eager = tiny_model(name, scale=20.0)
    eager.set_attn_implementation("eager")
    items = [EncodedPair(torch.randint(5, 30, (count,)).tolist(), None, None) for count in (7, 4)]
    for item, found in zip(items, attention_maps(model, items, layer=1), strict=True):
        with torch.no_grad():
            expected = eager(torch.tensor([item.input_ids]), output_attentions=True).attentions[1][0]
        assert expected.max() > 0.6, "far from uniform"
        assert found.dtype == torch.float64
        np.testing.assert_allclose(found.exp().numpy(), expected.numpy(), atol=2e-6)
        np.testing.assert_allclose(mean_map(found)[0].exp().numpy(), expected.mean(0).numpy(), atol=2e-6)
    assert model.config._attn_implementation == "sdpa"


def test_divergence_survives_shares_near_nothing() -> None:
    """The student's share of the first key is e^-900, which is 0 in any float."""
    far = torch.tensor([[[-900.0, 0.0]]], dtype=torch.float64).log_softmax(-1)
    half = torch.tensor([[[0.0, 0.0]]], dtype=torch.float64).log_softmax(-1)
    assert map_divergence(half, far).item() == pytest.approx(450 - np.log(2))
    assert map_divergence(far, half).item() == pytest.approx(np.log(2))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A random BERT of three layers, whose tokens are letters."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    torch.manual_seed(0)
    BertModel(tiny_config("bert", num_hidden_layers=3, initializer_range=0.5)).save_pretrained(folder)
    save_tokenizer(folder, ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *"abcdefghijklmnopqrstuvwxy"])
    return folder


@pytest.fixture(scope="module")
def student(teacher):
    llmdistill.compress(str(teacher), rank=4, output=str(teacher.parent / "student"))
    return teacher.parent / "student"


def eager_maps(path, text, layer):
    """(H, T, T), by transformers."""
    model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    inputs = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")
    with torch.no_grad():
        return model(**inputs, output_attentions=True).attentions[layer - 1][0].double().numpy()


def test_teacher_and_student_stand_side_by_side(teacher, student, tmp_path, capsys):
    two = tmp_path / "two"
    BertModel(tiny_config("bert", num_attention_heads=2, initializer_range=0.5)).save_pretrained(two)
    for file in teacher.glob("tokenizer*"):
        shutil.copy(file, two)
    texts = tmp_path / "texts.txt"
    texts.write_text("a b c d\n\n e a a\n not read\n", encoding="utf-8")
    words = ["evaluate", "--suite", "attention", "--model", f"teacher={teacher},student={student},two={two}"]
    words += ["--data", str(texts), "--examples", "2", "--output_dir", str(tmp_path / "out"), "--layers", "3,2,1"]
    assert main([*words, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    means = {"teacher": [], "student": [], "two": []}
    for entry, text in zip(results["texts"], ["a b c d", "e a a"], strict=True):
        assert entry["tokens"] == ["[CLS]", *text.split(), "[SEP]"]
        first = eager_maps(teacher, text, 3)
        for name, path, layer in (("teacher", teacher, 3), ("student", student, 2), ("two", two, 1)):
            maps = eager_maps(path, text, layer)
            mean = rel_entr(first.mean(0), maps.mean(0)).sum(-1).mean()
            means[name].append(mean)
            found = entry["models"][name]
            assert found["kl"] == {"mean": pytest.approx(mean, abs=1e-5)}
            shared = None if name == "two" else pytest.approx(rel_entr(first, maps).sum(-1).mean(), abs=1e-5)
            assert found["kl_of_all_heads"] == shared
    for name, values in means.items():
        assert results["models"][name]["kl"]["mean"] == pytest.approx(np.mean(values), abs=1e-5)
    assert means["student"][0] > 0.001
    assert "![e a a](attention-2.png)" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "attention-2.png").is_file()


def test_chosen_heads_have_a_row_each(teacher, student, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["evaluate", "--suite", "attention", "--model", f"{teacher},{student}", "--text", "a b, c"]
    assert main([*words, "--heads", "4,2", "--output_dir", str(out)]) == 0
    (entry,) = json.loads((out / "results.json").read_text(encoding="utf-8"))["texts"]
    first, other = (eager_maps(path, "a b, c", 3) for path in (teacher, student))
    expected = rel_entr(first, other).sum(-1).mean(-1)
    found = entry["models"][str(student)]["kl"]
    assert found == {"4": pytest.approx(expected[3], abs=1e-5), "2": pytest.approx(expected[1], abs=1e-5)}
    drawn = (out / "attention-1.svg").read_text(encoding="utf-8")
    assert f"layer 3, head 4, KL {found['4']:.3f}" in drawn
    assert "KL of head 4" in capsys.readouterr().out


def test_mistakes_are_told_before_a_model_is_loaded(teacher, tmp_path, refused):
    file = tmp_path / "texts.txt"
    file.write_text("one line\n", encoding="utf-8")
    model, text, two = ("--model", teacher), ("--text", "a b"), ("--model", f"a={teacher},b={teacher}")
    for words, said in (
        (model, "--text or --data: give one of them"),
        ((*model, "--data", file, "--examples", "2"), "--examples 2: "),
        ((*two, *text, "--layers", "0,1"), f"--layers 0: the a ({teacher}) has the layers 1 to 3"),
        ((*model, *text, "--layers", "1,2"), "--layers [1, 2]: there are 1 models; give one layer, or one for each"),
        ((*model, *text, "--heads", "5"), "has the heads 1 to 4"),
        (("--model", f"{teacher},embedded:teacher", *text), "cuts the text into other tokens than"),
    ):
        assert said in refused("attention", *words)
