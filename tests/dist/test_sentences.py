"""A small encoder for sentences: its student learns the teacher's embeddings, on one rank and two, live or cached.

Students of another width learn by a matrix, which is left out or kept as a Dense of sentence-transformers.
"""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from torch import Tensor
from transformers import AutoModel, BertModel
from word_models import save_bert, save_tokenizer

from llmdistill.models.pooling import read_sentence_settings
from llmdistill.objective import Pooling

from support import interrupted_copy, largest_difference, logged, weights, write_rows

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{number}" for number in range(60))]


def text(generator: torch.Generator) -> str:
    length = int(torch.randint(2, 9, (), generator=generator))
    return " ".join(f"w{word}" for word in torch.randint(60, (length,), generator=generator).tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random encoder whose files are those of sentence-transformers, and its data."""
    folder, generator = tmp_path_factory.mktemp("sentences"), torch.Generator().manual_seed(0)
    teacher = folder / "teacher"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    save_bert(teacher, WORDS, BertModel, initializer_range=0.3, max_position_embeddings=512, **sizes)
    save_tokenizer(teacher, WORDS)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(parts)
    ]
    (teacher / "modules.json").write_text(json.dumps(modules))
    (teacher / "1_Pooling").mkdir()
    (teacher / "1_Pooling/config.json").write_text('{"word_embedding_dimension": 32, "pooling_mode_mean_tokens": true}')
    (teacher / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    (folder / "train.txt").write_text("\n".join(text(generator) for _ in range(96)))
    names = ("query", "positive", "negative")
    write_rows(folder / "triples.jsonl", [{name: text(generator) for name in names} for _ in range(24)])
    pairs = [f"{number % 6}\t{text(generator)}\t{text(generator)}\n" for number in range(20)]
    (folder / "sts.tsv").write_text("".join(pairs))
    return folder


SETTINGS = shlex.split("""--method embedding --data.kind sentences --train.steps 8 --train.global_batch_size 8
--train.learning_rate 5e-3 --train.log_every 1 --train.dtype fp32""")
FACTORS = shlex.split("--student.method svd --student.factorize.target_params 70% --student.factorize.weighting none")
NARROW = shlex.split("""--student.shape 2x16x4 --student.init random --train.save_every 4
--data.sentences.triples true --embedding.margin 0.5 --train.global_batch_size 4""")


@pytest.fixture(scope="module")
def train(launch, folder):
    """Makes a run, or a cache, of a name in the folder."""

    def run(name: str, *arguments: str, ranks: int = 1, data: str = "train.txt", cache: bool = False) -> Path:
        output = folder / name
        sets = f"{{sts: {folder / 'sts.tsv'}}}"
        given = ("--teacher.model", str(folder / "teacher"), "--data.train", str(folder / data), "--data.tests", sets)
        given += ("--data.valid", str(folder / "sts.tsv"), "--data.cache_dir", str(folder / "cache"))
        words = (*given, *SETTINGS, *(() if "--student.shape" in arguments else FACTORS), *arguments)
        if cache:
            launch("cache", *words, "--output", str(output), ranks=ranks, program="llmdistill.cli")
        else:
            launch(*words, "--output_dir", str(output), ranks=ranks)
        return output

    return run


@pytest.fixture(scope="module")
def alone(train):
    """The run of one rank."""
    return train("alone")


def embeddings(model: torch.nn.Module) -> torch.Tensor:
    """Normalized means over the tokens of two sentences."""
    ids = torch.tensor([[1, 5, 9, 2], [1, 30, 31, 2]])
    with torch.no_grad():
        return torch.nn.functional.normalize(model(ids).last_hidden_state.mean(1), dim=-1)


def test_the_student_comes_nearer_and_keeps_what_sentence_transformers_reads(alone, folder):
    losses = logged(alone, "loss")
    assert losses[-1] < 0.7 * losses[0]
    metrics = json.loads((alone / "metrics.json").read_text())
    assert set(metrics["student"]["spearman"]) == {"sts", "valid"}
    taught, untrained, student = (
        embeddings(AutoModel.from_pretrained(path).eval())
        for path in (folder / "teacher", alone / "untrained", alone / "student")
    )
    assert float((student * taught).sum(-1).min()) > float((untrained * taught).sum(-1).min())
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert (alone / "student" / name).read_bytes() == (folder / "teacher" / name).read_bytes()


def test_two_ranks_learn_from_a_cached_teacher_what_one_learns_from_a_live_one(alone, train):
    cached = train("cached", cache=True, ranks=2)
    two = train("two", "--train.micro_batch_size", "2", "--teacher.cache", str(cached), ranks=2)
    for key in ("loss", "valid_loss"):
        live, from_cache = (logged(run, key) for run in (alone, two))
        assert from_cache == pytest.approx(live, rel=1e-4)
    one, other = (json.loads((run / "metrics.json").read_text())["untrained"]["spearman"] for run in (alone, two))
    assert one == pytest.approx(other, abs=1e-9)


def test_the_student_says_by_which_pooling_it_learned(train):
    run = train("cls", "--data.sentences.pooling", "cls", "--data.sentences.normalize", "false", "--train.steps", "1")
    found = read_sentence_settings(run / "student")
    assert found.pooling == Pooling(("cls",), normalize=False)
    assert found.max_length == 16


def test_the_kept_student_was_scored_without_dropout(train, folder):
    with_dropout = folder / "with_dropout"
    shutil.copytree(folder / "teacher", with_dropout)
    config = json.loads((with_dropout / "config.json").read_text())
    config.update(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    (with_dropout / "config.json").write_text(json.dumps(config))
    keep = ("--train.keep_best", "score", "--train.validate_every", "4", "--teacher.model", str(with_dropout))
    run = train("kept", *keep)
    best = max(logged(run, "valid_score"))
    assert json.loads((run / "metrics.json").read_text())["student"]["spearman"]["valid"] == pytest.approx(best)


@pytest.fixture(scope="module")
def narrow(train):
    """The runs of one rank, whose students are half as wide as the teacher, by what becomes of the matrix."""
    given = {"data": "triples.jsonl"}
    return {what: train(what, *NARROW, "--embedding.projection", what, **given) for what in ("drop", "keep")}


def dense_of(run: Path) -> Tensor:
    return load_file(run / "student/2_Dense/model.safetensors")["linear.weight"]


def spearman(student: Path, pairs: Path, dense: Tensor | None) -> float:
    """The score of a folder without padding, batches or our code."""
    model = AutoModel.from_pretrained(student).eval()
    cosines, scores = [], []
    for line in pairs.read_text().splitlines():
        score, *texts = line.split("\t")
        means = []
        for text in texts:
            ids = [1, *(WORDS.index(word) for word in text.split()), 2]
            with torch.no_grad():
                mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
            means.append((mean if dense is None else dense @ mean).numpy())
        cosines.append(means[0] @ means[1] / np.linalg.norm(means[0]) / np.linalg.norm(means[1]))
        scores.append(float(score))
    return 100 * float(stats.spearmanr(cosines, scores).statistic)


@pytest.mark.parametrize("what", ["drop", "keep"])
def test_a_narrow_student_is_scored_by_what_is_saved(narrow, folder, what):
    student = narrow[what] / "student"
    assert not any("projector" in name or "dense" in name.split(".")[0] for name in weights(narrow[what]))
    modules = [module["type"].rpartition(".")[2] for module in json.loads((student / "modules.json").read_text())]
    assert modules == ["Transformer", "Pooling", *(["Dense"] if what == "keep" else []), "Normalize"]
    assert json.loads((student / "1_Pooling/config.json").read_text())["word_embedding_dimension"] == 16
    dense = dense_of(narrow[what]) if what == "keep" else None
    if dense is not None:
        assert dense.shape == (32, 16)
        moved = float((dense.T @ dense - torch.eye(16)).abs().max())
        assert 1e-3 < moved < 0.5, "it was orthonormal, and has learned"
    found = json.loads((narrow[what] / "metrics.json").read_text())["student"]["spearman"]["sts"]
    assert found == pytest.approx(spearman(student, folder / "sts.tsv", dense), abs=1e-9)


@pytest.mark.parametrize("what", ["drop", "keep"])
def test_sentence_transformers_gives_the_same_score(narrow, folder, what):
    library = pytest.importorskip("sentence_transformers")
    encoder = library.SentenceTransformer(str(narrow[what] / "student"))
    pairs = [line.split("\t") for line in (folder / "sts.tsv").read_text().splitlines()]
    ones, others = (encoder.encode([pair[place] for pair in pairs], convert_to_tensor=True) for place in (1, 2))
    assert ones.shape == (20, 32 if what == "keep" else 16)
    cosines = torch.cosine_similarity(ones, others).numpy()
    found = json.loads((narrow[what] / "metrics.json").read_text())["student"]["spearman"]["sts"]
    assert found == pytest.approx(100 * float(stats.spearmanr(cosines, [float(pair[0]) for pair in pairs]).statistic))


def test_a_narrow_student_is_the_same_on_two_ranks_of_zero3_and_resumed(narrow, train, folder):
    one, given = narrow["keep"], (*NARROW, "--embedding.projection", "keep")
    two = train("two_keep", *given, "--ds_config", "zero3", ranks=2, data="triples.jsonl")
    # The gradient of the keys' bias is rounding alone, and Adam makes whole steps of it.
    assert largest_difference(one, two, without=r".*\.key\..*bias") < 1e-5
    assert float((dense_of(one) - dense_of(two)).abs().max()) < 1e-6
    for key in ("valid_loss", "margin"):
        assert logged(two, key) == pytest.approx(logged(one, key), rel=1e-4)
    assert min(logged(one, "margin")) > 0
    interrupted_copy(one, folder / "killed")
    killed = train("killed", *given, data="triples.jsonl")
    assert largest_difference(one, killed) == 0
    assert torch.equal(dense_of(one), dense_of(killed))
