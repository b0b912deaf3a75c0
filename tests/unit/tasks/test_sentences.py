"""Sentences and STS files: what is read, what is refused, and Spearman's correlation of a model's cosines."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from hostile import refuses
from scipy import stats
from scipy.linalg import orthogonal_procrustes
from sentence_encoders import WORDS, encoder
from transformers import BertConfig, BertModel, LlamaConfig

from llmdistill.config import RunConfig
from llmdistill.config.command_line import with_values
from llmdistill.data.pairs import (
    PairExample,
    SentencePair,
    collate_pairs,
    encode_pairs,
    read_pairs,
    read_sentences,
    read_triples,
)
from llmdistill.data.sampler import Share
from llmdistill.methods import METHODS, build_method
from llmdistill.models.heads import EMBEDDINGS
from llmdistill.models.pooling import dense_of, save_dense
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Objective, Pooling
from llmdistill.step.tap_models import tap_teacher
from llmdistill.tasks.base import Models, ScoredModel
from llmdistill.tasks.sentences import Sentences
from llmdistill.training import calibration

from support import write_rows

PAIRS = [("a b", "a c", 4.0), ("d", "e f a", 0.5), ("b b b", "b", 5.0), ("c d e", "f", 1.0), ("a", "d e", 2.0)]


def run_of(folder, **data: object) -> RunConfig:
    (folder / "train.txt").write_text("a b\n\nc\na b\nd e f a b c\n")
    sts = folder / "sts.tsv"
    sts.write_text("".join(f"{score:g}\t{one}\t{other}\n" for one, other, score in PAIRS))
    settings = {"kind": "sentences", "train": str(folder / "train.txt"), "tests": {"sts": str(sts)}, **data}
    settings["cache_dir"] = str(folder / "cache")
    return with_values(
        RunConfig(method="embedding"), {"teacher.model": str(folder / "teacher"), "data": settings}, key=""
    )


def read(task: Sentences, model: BertModel, folder) -> Sentences:
    objective = task.objective(model.config, uses_output=False)
    assert objective.pooling == Pooling(("cls",))
    paths = {"teacher_path": folder / "teacher", "tokenizer_path": folder / "teacher"}
    return task.read(Models(teacher=model.config, student=model.config, causal=False, objective=objective, **paths))


def test_the_score_is_spearmans_correlation_of_the_cosines(tmp_path):
    model = encoder(tmp_path / "teacher")
    data = read(Sentences(run_of(tmp_path)), model, tmp_path)
    cosines = []
    with torch.no_grad():
        for one, other, _ in PAIRS:
            ids = [[1, *map(WORDS.index, text.split()[:2]), 2] for text in (one, other)]  # cut to 4 tokens
            first, second = (model(torch.tensor([each])).last_hidden_state[0, 0] for each in ids)
            cosines.append(float(first @ second / first.norm() / second.norm()))
    scored = ScoredModel(model=model, tokenizer=data.tokenizer, predictions=tmp_path, sharded=False)
    found = data.score_set("sts", scored)
    expected = 100 * stats.spearmanr(cosines, [score for *_, score in PAIRS]).statistic
    assert found == {"spearman": pytest.approx(expected, abs=1e-9), "pairs": len(PAIRS)}
    lines = (tmp_path / "sts.tsv").read_text().splitlines()
    assert [float(line.split("\t")[0]) for line in lines[1:]] == pytest.approx(cosines, abs=1e-5)
    assert data.summary({"sts": found}) == {"spearman": {"sts": found["spearman"]}}
    # Sentences are learned once, and cut as the teacher's files say.
    assert [item.input_ids for item in data.encoded["train"]] == [[1, 4, 5, 2], [1, 6, 2], [1, 7, 8, 2]]
    batch = data.collate(list(data.encoded["train"]))
    assert int(batch.counts()["sequences"]) == 3
    assert int(batch.counts()["labels"]) == 0


@pytest.mark.parametrize(("student", "said"), [
    ({"a": 20.0, "b": 60.0}, ["training has lowered the student's Spearman from 80.0 to 40.0: lower"]),
    ({"a": 69.0, "b": 90.2}, []),
])  # fmt: skip
def test_a_student_that_its_training_has_spoiled_is_warned_of(tmp_path, student, said):
    data = read(Sentences(run_of(tmp_path)), encoder(tmp_path / "teacher"), tmp_path)
    summaries = {"untrained": {"spearman": {"a": 70.0, "b": 90.0}}, "student": {"spearman": student}}
    warnings = data.end_warnings(summaries)
    assert [text[: len(said[0])] for text in warnings] == said if said else not warnings
    assert not data.end_warnings({"student": summaries["student"]})
    assert not data.end_warnings({"untrained": {"spearman": {}}, "student": {"spearman": {}}})


def test_triples_stay_together_in_every_batch(tmp_path):
    model = encoder(tmp_path / "teacher")
    rows = [("a", "b c", "d"), ("e f", "a", "b"), ("c", "c d", "a b"), ("f", "f e", "b")]
    keys = ("anchor", "positive", "negative")
    file = write_rows(tmp_path / "rows.jsonl", [dict(zip(keys, row, strict=True)) for row in rows])
    assert read_triples(file) == [text for row in rows for text in row]
    task = Sentences(run_of(tmp_path, train=str(file), sentences={"triples": True}, bucket_steps=2))
    data = read(task, model, tmp_path)
    assert (data.num_steps(1, 2), task.rows_per_example) == (2, 3)
    loader = data.loader(Share(seed=0, global_batch_size=2, micro_batch_size=1))
    seen = []
    for step in range(2):
        for batch in loader.micro_batches(step):
            assert batch.targets.tolist() == [0, 1, 2]
            texts = [[WORDS[word] for word in row if word > 3] for row in batch.input_ids.tolist()]
            seen.append(tuple(" ".join(words) for words in texts))
    assert sorted(seen) == sorted(rows)
    assert [item.target for item in data.teacher_examples()[0]] == [0, 1, 2] * 4  # there is no validation set
    settings = METHODS["embedding"].settings(margin=1.0)
    with pytest.raises(ValueError, match=r"set data\.sentences\.triples"):
        METHODS["embedding"].check(settings, run_of(tmp_path))


@pytest.mark.parametrize(("projection", "expected"), [("drop", {"sentence": (16, 32)}), ("keep", {"dense": (16, 32)})])
def test_embeddings_of_another_width_need_a_matrix_as_wide_as_all_modes_together(tmp_path, projection, expected):
    model = encoder(tmp_path / "teacher")
    objective = replace(
        Sentences(run_of(tmp_path)).objective(model.config, uses_output=False), pooling=Pooling(("cls", "mean"))
    )
    narrow = BertConfig(**{**model.config.to_dict(), "hidden_size": 8})
    for weights in ({}, {"cosine": 0.0}, {"mse": 0.0}):
        settings = METHODS["embedding"].settings(projection=projection, **weights)
        assert METHODS["embedding"].build(settings, model.config, narrow, objective).projections == expected
        assert METHODS["embedding"].build(settings, model.config, model.config, objective).projections == {}
    margins = METHODS["embedding"].settings(cosine=0.0, mse=0.0, margin=2.0)
    alone = METHODS["embedding"].build(margins, model.config, narrow, objective)
    assert (dict(alone.weights), alone.projections) == ({"margin": 2.0}, {}), "margins alone need no matrix"


def test_models_methods_and_settings_that_are_refused(tmp_path):
    config = encoder(tmp_path / "teacher").config
    encoder(tmp_path / "student")
    dense = dense_of(torch.nn.Linear(16, 16), torch.nn.Identity())
    save_dense(tmp_path / "student", dense, dense.state_dict(), Pooling(("cls",)))
    run, where = run_of(tmp_path), str(tmp_path / "student")
    refuses("embedding.projection to keep", Sentences(run).check_model, "student.model", where, config)
    keeps = replace(run, method_settings={"embedding": METHODS["embedding"].settings(projection="keep")})
    Sentences(keeps).check_model("student.model", where, config)
    learns = replace(keeps, student=replace(run.student, model=where))
    assert Sentences(learns).objective(config, uses_output=False).targets == EMBEDDINGS
    wider = BertConfig(**{**config.to_dict(), "hidden_size": 24})
    refuses(
        "ends in a Dense of 16, and the embeddings of the teacher have 24",
        Sentences(learns).objective,
        wider,
        uses_output=False,
    )
    teaches = replace(run, teacher=replace(run.teacher, model=where))
    refuses("ends in a Dense", Sentences(teaches).objective, config, uses_output=False)
    task = Sentences(run_of(tmp_path, sentences={"pooling": "max", "normalize": True}))
    objective = task.objective(config, uses_output=False)
    assert objective.pooling == Pooling(("max",), normalize=True)
    refuses("is a decoder", task.check_model, "teacher.model", "x", LlamaConfig())
    refuses("data.tests.valid", Sentences, run_of(tmp_path, tests={"valid": "sts.tsv"}))
    refuses("have only embeddings: take method embedding", build_method, ["kd"], {}, config, config, objective)
    assert build_method(["none"], {}, config, config, objective).pooling == objective.pooling  # it is only scored
    refuses("set data.kind to sentences", build_method, ["embedding"], {}, config, config)
    assert METHODS["embedding"].build(METHODS["embedding"].defaults(), config, config, objective).pooling


def test_the_files_that_are_read(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"query": "a", "positive": "b", "n": 3}\n{"sentence1": "c", "sentence2": "a", "score": 2}\n')
    assert read_sentences(rows) == ["a", "b", "c"]
    named = tmp_path / "named.tsv"
    named.write_text("Score\tSentence1\tsentence2\n1\ta\tb\n4.5\tc\td\n")
    assert read_pairs(named) == [SentencePair("a", "b", 1.0), SentencePair("c", "d", 4.5)]
    plain = tmp_path / "plain.tsv"
    plain.write_text("1\ta\tb\n4.5\tc\ta\n")
    assert read_pairs(plain) == [SentencePair("a", "b", 1.0), SentencePair("c", "a", 4.5)]
    assert read_sentences(plain) == ["a", "b", "c"]


def test_every_sentence_of_a_row_is_learned_and_other_columns_are_named(tmp_path, caplog):
    flag = write_rows(tmp_path / "flag.jsonl", [{"query": "q", "pos": ["p", "r"], "neg": ["n", "o"], "type": "sts"}])
    assert read_sentences(flag) == ["q", "p", "r", "n", "o"]
    expected = [["q", pos, neg] for pos in ("p", "r") for neg in ("n", "o")]  # FlagEmbedding draws one of each
    assert read_triples(flag) == [text for triple in expected for text in triple]
    mined = write_rows(
        tmp_path / "mined.jsonl", [{"anchor": "q", "Positive": "p", "negative_1": "n", "negative_2": "o"}]
    )
    assert read_sentences(mined) == ["q", "p", "n", "o"]
    assert read_triples(mined) == ["q", "p", "n", "q", "p", "o"]
    assert not caplog.records
    corpus = write_rows(tmp_path / "corpus.jsonl", [{"_id": "d1", "title": "A title", "text": "a"}] * 2)
    assert read_sentences(corpus) == ["a"]
    assert "not read as sentences: title of 2 rows" in caplog.text
    nli = write_rows(tmp_path / "nli.jsonl", [{"premise": "a", "hypothesis": "b", "label": 1}])
    assert read_sentences(nli) == ["a", "b"]


def test_scores_have_decimal_commas_where_spreadsheets_write_them(tmp_path):
    file = tmp_path / "sts.csv"
    file.write_text("sentence_A;sentence_B;score;relatedness_score\na, b;b;;3,5\nc;d;;-1,25\ne;f;;4\n")
    table = pd.read_csv(file, sep=";", decimal=",")
    scores = table["relatedness_score"].tolist()
    assert read_pairs(file) == [
        SentencePair(one, other, score)
        for one, other, score in zip(*map(table.get, table.columns[:2]), scores, strict=True)
    ]
    (tmp_path / "sts.tsv").write_text("3,5\ta\tb\n1,0\tc\td\n")
    assert [pair.score for pair in read_pairs(tmp_path / "sts.tsv")] == [3.5, 1.0]
    file.write_text('sentence1,sentence2,score\na,b,"1,234,5"\n')
    refuses("sts.csv:2: give sentence1, sentence2 and a number as score", read_pairs, file)


def test_files_that_are_refused(tmp_path):
    for read, name, text, said in (
        (read_pairs, "plain.tsv", "1\ta\tb\n2\tc\n", "plain.tsv:2: not a score and two sentences"),
        (read_pairs, "plain.tsv", "1\ta\tb\nnan\tc\td\n", "plain.tsv:2: not a score"),
        (read_pairs, "plain.tsv", "1\ta\tb\n1\tc\td\n", "2 pairs with no two different scores"),
        (read_pairs, "a.jsonl", '{"sentence1": "a", "sentence2": "b"}\n', "a.jsonl:1: give sentence1, sentence2"),
        (read_sentences, "a.txt", "\n \n", "no sentence"),
        (read_sentences, "b.jsonl", '{"words": "a"}\n', "b.jsonl:1: no sent"),
        (read_triples, "a.jsonl", '{"query": "a", "positive": "b"}\n', "a.jsonl:1: give query"),
        (read_triples, "a.txt", "a b\n", "no rows of query, positive, negative"),
    ):
        (tmp_path / name).write_text(text)
        refuses(said, read, tmp_path / name)


TEXTS = [f"{one} {other} {third}" for one in "abc" for other in "cdef" for third in "afb"]


@pytest.mark.parametrize("most", [100, 12])
def test_the_first_matrix_is_that_of_the_procrustes_problem(tmp_path, monkeypatch, most):
    monkeypatch.setattr(calibration, "_SENTENCES", most)
    monkeypatch.setattr(calibration, "_SENTENCES_A_BATCH", 5)
    teacher = encoder(tmp_path)
    torch.manual_seed(1)
    student = BertModel(BertConfig(**{**teacher.config.to_dict(), "hidden_size": 8})).eval()
    for model in (teacher, student):  # or else all embeddings are of one length
        torch.nn.init.normal_(model.encoder.layer[-1].output.LayerNorm.weight)
    tokenizer = load_tokenizer(tmp_path)
    items = encode_pairs([PairExample(text, None, 0, place) for place, text in enumerate(TEXTS)], tokenizer, 5)
    pooling = Pooling(("cls",))
    objective = Objective(tokens=False, targets=EMBEDDINGS, pooling=pooling)
    method = METHODS["embedding"].build(METHODS["embedding"].defaults(), teacher.config, student.config, objective)
    found = calibration.nearest_rotation(
        method,
        lambda: student,
        tap_teacher(method, teacher),
        (items, partial(collate_pairs, pad_token_id=0)),
    )
    chosen, rows = TEXTS if most == 100 else TEXTS[::3], []
    for model in (student, teacher):
        with torch.no_grad():
            ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in chosen]
            first = np.stack([model(each).last_hidden_state[0, 0].double().numpy() for each in ids])
        rows.append(first / np.linalg.norm(first, axis=1, keepdims=True))
    ours, theirs = np.pad(rows[0], ((0, 0), (0, 8))), rows[1]
    expected = orthogonal_procrustes(ours, theirs)[0][:8].T
    assert found.shape == (16, 8)
    # A LayerNorm without bias keeps its outputs in a hyperplane: of the direction across it the problem says nothing.
    across = np.divide(1, student.encoder.layer[-1].output.LayerNorm.weight.detach().double().numpy())
    inside = np.eye(8) - np.outer(across, across) / (across @ across)
    np.testing.assert_allclose(found.numpy() @ inside, expected @ inside, atol=1e-4)
    np.testing.assert_allclose(found.numpy().T @ found.numpy(), np.eye(8), atol=1e-6)


@pytest.mark.parametrize("shape", [(16, 8), (8, 16), (8, 8)])
@pytest.mark.parametrize("values", [[26.0, 3, 2, 1, 1, 1, 0.5], [3.0, 1], [0.0]])
def test_what_rounding_leaves_of_an_undetermined_direction_chooses_nothing(shape, values):
    left, right = (torch.linalg.qr(torch.randn(side, len(values), dtype=torch.float64)).Q for side in shape)
    product = (left * torch.tensor(values, dtype=torch.float64)) @ right.T
    found = calibration.nearest_isometry(product)
    rounded = calibration.nearest_isometry(product + 1e-8 * values[0] * torch.randn(shape, dtype=torch.float64))
    torch.testing.assert_close(found, rounded, rtol=0, atol=1e-4)
    assert float((found * product).sum()) == pytest.approx(sum(values), abs=1e-9)  # the most that is possible
    torch.testing.assert_close(torch.linalg.svdvals(found), torch.ones(8, dtype=torch.float64))
