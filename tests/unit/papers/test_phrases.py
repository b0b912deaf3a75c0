"""Clusters of spans by layer, against transformers' own hidden states and the formula of mutual information."""

import json
import shutil

import numpy as np
import pytest
import torch
from sklearn.metrics import v_measure_score
from tiny import tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, BertModel, DistilBertForMaskedLM, PreTrainedTokenizerFast

import llmdistill
from llmdistill.artifacts import read_record
from llmdistill.cli import main
from llmdistill.papers.conll import Sentence, draw_spans, locate_spans, read_sentences
from llmdistill.papers.span_clusters import NOT_READ, cluster_score, encode_sentences
from llmdistill.studies.launcher import Launcher
from llmdistill.studies.trials import Result

NOUNS, VERBS = ["cat", "doghouse", "birds"], ["see", "sees", "barking"]
PIECES = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "the", "in", ".", "cat", "dog", "##house", "bird", "##s", "see"]
PIECES += ["bark", "##ing"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "teacher"
    torch.manual_seed(0)
    sizes = {"vocab_size": len(PIECES), "num_hidden_layers": 3, "max_position_embeddings": 24}
    BertModel(tiny_config("bert", initializer_range=0.3, **sizes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(PIECES), encoding="utf-8")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """120 sentences in the format of CoNLL-2000."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(120):
        lines += ["the DT B-NP", f"{rng.choice(NOUNS)} NN I-NP", f"{rng.choice(VERBS)} VB B-VP"]
        lines += ["in IN B-PP", "the DT B-NP", f"{rng.choice(NOUNS)} NN I-NP"] if number % 2 else []
        lines += [". . O", ""]
    file = tmp_path_factory.mktemp("data") / "train.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def naive(path, sentences, drawn):
    """The representations (layers, spans, 4·width), one span after the other, by transformers' own words and states."""
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    rows = []
    for index, span in drawn:
        settings = {"is_split_into_words": True, "return_tensors": "pt", "return_token_type_ids": False}
        encoded = tokenizer(list(sentences[index].words), **settings)
        first, last = encoded.word_to_tokens(span.first).start, encoded.word_to_tokens(span.last).end - 1
        with torch.no_grad():
            states = model(**encoded, output_hidden_states=True).hidden_states[1:]
        pairs = [(state[0, first].numpy(), state[0, last].numpy()) for state in states]
        rows.append([np.concatenate([one, other, one * other, one - other]) for one, other in pairs])
    return np.array(rows).swapaxes(0, 1)


def test_words_that_are_cut_or_without_a_token_are_not_read(teacher):
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    sentence = Sentence(("doghouse", "\u200e", "sees\u200e", "birds", "cat"), (), 1)
    _, (words,) = encode_sentences([sentence], tokenizer, 24)
    assert words.tolist() == [[1, 2], [NOT_READ] * 2, [3, 4], [5, 6], [7, 7]]
    # [CLS] dog ##house see ##s bird [SEP]: only a part of birds is read.
    _, (words,) = encode_sentences([sentence], tokenizer, 7)
    assert words.tolist() == [[1, 2], [NOT_READ] * 2, [3, 4], [NOT_READ] * 2, [NOT_READ] * 2]


def test_words_in_bytes() -> None:
    """Tokens that have the space before their word, and characters of several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({each: n for n, each in enumerate([*alphabet, "Ġt"])}, [("Ġ", "t")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for trim in (True, False):
        backend.post_processor = processors.ByteLevel(trim_offsets=trim)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        _, (words,) = encode_sentences([Sentence(("é", "to", "at"), (), 1)], tokenizer, 99)
        # é is two bytes, " t" is one token, and the space before "at" is a token of its own.
        assert words.tolist() == [[0, 1], [2, 3], [5, 6]]


def test_scores_are_the_mutual_information_of_rows_that_k_means_did_not_see() -> None:
    rng = np.random.default_rng(0)
    labels = [f"type {int(n)}" for n in rng.integers(3, size=300)]
    # Three groups far apart; a fifth of the labels is that of another group.
    groups = [int(label[-1]) if rng.random() < 0.8 else int(rng.integers(3)) for label in labels]
    features = 100.0 * np.eye(3)[groups] + rng.normal(size=(300, 3))
    for held_out in (60, 0):
        expected = v_measure_score(labels[-held_out:], groups[-held_out:])  # 2·I(L; C) / (H(L) + H(C))
        assert cluster_score(features, labels, held_out=held_out, seed=1) == pytest.approx(expected)
    assert 0.1 < expected < 0.9
    # A far point that is held out takes no center from the others.
    rows, far = np.array([0.0, 10.0] * 20), np.array([1000.0])
    features = np.concatenate([rows, far])[:, None]
    assert cluster_score(features, [*("a", "b") * 20, "b"], held_out=7, seed=1) == pytest.approx(1)


def words_of(data, *models, **settings):
    given = {"model": ",".join(map(str, models)), "data": data, "chunks": 40, "unlabeled": 10, "held_out": 20}
    return [str(word) for key, value in (given | {"seeds": "3,5"} | settings).items() for word in (f"--{key}", value)]


def test_models_stand_side_by_side(teacher, data, tmp_path, capsys, monkeypatch):
    student = tmp_path / "student"
    llmdistill.compress(str(teacher), rank=4, output=str(student))
    small = tmp_path / "small"
    DistilBertForMaskedLM(tiny_config("distilbert", vocab_size=len(PIECES), dim=8)).save_pretrained(small)
    for file in teacher.glob("tokenizer*"):
        shutil.copy(file, small)
    out = tmp_path / "out"
    words = words_of(data, f"teacher={teacher}", f"student={student}", f"small={small}", output_dir=out)
    assert main(["evaluate", "--suite", "conll2000", *words, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results.items() >= read_record(out / "results.json", remedy="").items()
    assert [len(model["nmi"]) for model in results["models"].values()] == [3, 3, 2]
    sentences = read_sentences(data)
    spans = locate_spans(sentences)
    for name, path in (("teacher", teacher), ("student", student), ("small", small)):
        for number, seed in enumerate((3, 5)):
            drawn = draw_spans(spans, chunks=40, unlabeled=10, seed=seed)
            labels = [each.span.label for each in drawn]
            for layer, features in enumerate(naive(path, sentences, drawn)):
                expected = cluster_score(features, labels, held_out=20, seed=seed)
                assert results["models"][name]["nmi"][layer]["seeds"][number] == pytest.approx(expected, abs=1e-6)
    assert results["labels"]["O"] == 20
    assert "| layer | teacher | student | small |" in (out / "report.md").read_text(encoding="utf-8")
    assert (out / "layers.png").is_file()
    # What is finished is kept.
    monkeypatch.setattr("llmdistill.studies.side_by_side.load_model", None)
    assert main(["evaluate", "--suite", "conll2000", *words]) == 0
    assert "spans ..." not in capsys.readouterr().out


def test_what_was_not_read_and_what_was_missing_is_told(teacher, data, tmp_path):
    long = tmp_path / "long.txt"
    cut = "\n".join(["the DT B-NP", *["cat NN I-NP"] * 30])  # 24 positions: 22 of its words are read
    long.write_text(f"{data.read_text(encoding='utf-8')}\n{cut}\n", encoding="utf-8")
    words = words_of(long, f"a={teacher}", f"b={teacher}", chunks=9000, seeds=1, output_dir=tmp_path / "out")
    assert main(["evaluate", "--suite", "conll2000", *words]) == 0
    warnings = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["warnings"]
    line = len(data.read_text(encoding="utf-8").split("\n")) + 1 + 22
    first = f"the first is 'cat' ({long}:{line})"
    assert warnings[0].startswith(f"9 words without a token, or beyond the model's positions (a, b), {first}")
    chunks = sum(span.label != "O" for sentence in read_sentences(data) for span in sentence.spans)
    assert warnings[1] == f"{long} has {chunks + 10} of the 9010 spans that were asked for"


def test_mistakes_are_told_before_a_model_is_loaded(teacher, data, tmp_path, refused):
    same = tmp_path / "same.txt"
    same.write_text("the DT B-NP\n", encoding="utf-8")
    for words, said in (
        (words_of(data, "embedded:teacher"), "is a decoder, and the first word of a span must see the words after it"),
        (words_of(tmp_path / "none.txt", teacher), "none.txt: no such file"),
        (words_of(same, teacher), "its spans are of 1 labels"),
        (words_of(data, teacher, held_out=47), "--held_out 47: "),
        (words_of(data, teacher, num_gpus=2), "--num_gpus: --suite conll2000 runs in one process"),
    ):
        assert said in refused("conll2000", *words)


def test_a_table_shows_them_beside_the_paper_s(teacher, data, tmp_path, capsys, monkeypatch):
    """MiniLM Table 10, with a student that has been trained already."""
    words = ["compare", "--suite", "minilm-table10", "--output_dir", str(tmp_path / "table"), "--tasks.seeds", "3,4"]
    words += ["--teacher.model", str(teacher), "--data.train", str(data), "--tasks.data_dir", str(tmp_path)]
    words += ["--student.shape", "2x16x4", "--train.dtype", "fp32", "--data.max_length", "24"]
    assert main([*words, "--dry_run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    file = tmp_path / "conll2000" / "train.txt"
    assert any(sentence.startswith(f"{file}: no such file") for sentence in plan["missing"])
    file.parent.mkdir()
    file.write_text("\n".join([data.read_text(encoding="utf-8")] * 3), encoding="utf-8")
    done = lambda self, trials, progress: [Result(trial, {"student": {}}, seconds=61.0) for trial in trials]  # noqa: E731
    monkeypatch.setattr(Launcher, "run", done)
    llmdistill.compress(str(teacher), rank=4, output=plan["rows"]["minilm"]["model"])
    assert main(words) == 0
    results, side_by_side = (
        json.loads((tmp_path / "table" / name).read_text()) for name in ("results.json", "conll2000/results.json")
    )
    assert side_by_side["seeds"] == [3, 4]
    assert list(side_by_side["models"]) == ["teacher", "minilm"]
    for row in results["rows"]:
        found = side_by_side["models"][row["key"]]
        figures = row["measured"]["figures"]
        assert [each["mean"] for each in figures[:3]] == pytest.approx([100 * each["mean"] for each in found["nmi"]])
        assert figures[3:] == [None] * 6
        assert row["measured"]["params"] == found["params"]
    assert results["rows"][1]["measured"]["seconds"] == 61.0
    assert "(45.0)" in " ".join(capsys.readouterr().out.split())
