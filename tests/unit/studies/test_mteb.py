"""Tasks of MTEB, on tasks of our own, by its library where it is installed and by a stand-in, against plain torch."""

import importlib.util
import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import stand_in_mteb
import torch
from scipy import stats
from sentence_encoders import encoder
from stand_in_mteb import StandInTask

from llmdistill.commands.side_by_side import main
from llmdistill.models.load import load_model
from llmdistill.models.pooling import read_sentence_settings
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.tasks.mteb import SentenceEncoder

ROWS = {
    "First": [("a b", "a c", 4.0), ("d", "e f a", 0.5), ("b b b", "b", 5.0), ("c d e", "f", 1.0), ("a", "d e", 2.0)],
    "Second": [("f e d c b a", "a", 1.5), ("b c", "b", 3.0), ("e", "a d", 4.5), ("c", "f f", 0.0)],
}


def library_tasks(names):
    """Tasks of the installed library with these rows."""
    import datasets
    from mteb.abstasks import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    empty = ("date", "domains", "task_subtypes", "license", "annotations_creators", "dialect", "sample_creation")

    def load(self, **_):
        rows = [dict(zip(("sentence1", "sentence2", "score"), row, strict=True)) for row in names[self.metadata.name]]
        self.dataset, self.data_loaded = datasets.DatasetDict(test=datasets.Dataset.from_list(rows)), True

    made = {}
    for name in names:
        metadata = TaskMetadata(
            name=name, description=name, reference=None, dataset={"path": "own/own", "revision": "1"}, type="STS",
            category="t2t", modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"], bibtex_citation=None,
            main_score="cosine_spearman", **dict.fromkeys(empty),
        )  # fmt: skip
        made[name] = type(name, (AbsTaskSTS,), {"metadata": metadata, "load_data": load})
    return made


@pytest.fixture(params=["stand-in", "mteb"])
def tasks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "stand-in":
        stand_in_mteb.install(monkeypatch, [StandInTask(name, rows) for name, rows in ROWS.items()])
        return
    if importlib.util.find_spec("mteb") is None:
        pytest.skip("the library of MTEB is not installed")
    made = library_tasks(ROWS)
    monkeypatch.setattr("mteb.get_task", lambda name, **_: made[name]())


@torch.no_grad()
def spearman(model, folder, name):
    """The correlation of the first token's cosines, one sentence at a time, of at most four tokens."""
    tokenizer = load_tokenizer(folder)

    def embedding(text: str) -> torch.Tensor:
        ids = tokenizer(text)["input_ids"]
        return model(torch.tensor([[*ids[:3], ids[-1]] if len(ids) > 4 else ids])).last_hidden_state[0, 0]

    cosines = [float(torch.cosine_similarity(embedding(one), embedding(two), dim=0)) for one, two, _ in ROWS[name]]
    return float(stats.spearmanr(cosines, [row[2] for row in ROWS[name]]).statistic)


def test_encoders_are_scored_side_by_side_and_finished_tasks_are_kept(tasks, tmp_path, capsys):
    models = {name: encoder(tmp_path / name, seed=seed) for seed, name in enumerate(("teacher", "student"))}
    named = ",".join(f"{name}={tmp_path / name}" for name in models)
    command = ["--model", named, "--dtype", "fp32", "--output_dir", str(tmp_path / "out"), "--batch_size", "2"]

    def scored(names: str) -> list[str]:
        capsys.readouterr()
        assert main("mteb", [*command, "--tasks", names]) == 0
        said = [line.removesuffix(" ...").split(": ") for line in capsys.readouterr().out.splitlines() if ": " in line]
        return [f"{words[0]} {words[1]}" for words in said if words[1] in ROWS]

    assert scored("First") == ["teacher First", "student First"]
    assert scored("First,Second") == ["teacher Second", "student Second"]
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    for name, model in models.items():
        entry = results["models"][name]
        assert (entry["params"], entry["embeddings"]) == (model.num_parameters(), "cls of at most 4 tokens")
        for task in ROWS:
            found = entry["tasks"][task]
            assert found["score"] == pytest.approx(spearman(model, tmp_path / name, task))
            assert (found["type"], found["metric"], found["revision"]) == ("STS", "cosine_spearman", "1")
    assert len({entry["tasks"]["First"]["score"] for entry in results["models"].values()}) == 2
    # A model that has changed is scored again, and so is one whose embeddings are made in another way.
    shutil.rmtree(tmp_path / "student")
    encoder(tmp_path / "student", seed=2)
    assert scored("First") == ["student First"]
    (tmp_path / "teacher" / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    assert scored("First") == ["teacher First"]
    assert scored("First") == []


def test_a_task_draws_the_same_examples_for_every_model(tmp_path, monkeypatch):
    many = [(f"{'abcdef'[i % 6]} {'abc'[i % 3]}", f"{'fedcb'[i % 5]} {'ab'[i % 2]}", float(i % 7)) for i in range(40)]
    same = [(one, two, 1.0) for one, two, _ in many[:3]]
    stand_in_mteb.install(monkeypatch, [StandInTask("Drawn", many, drawn=9), StandInTask("Same", same)])
    encoder(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    named = f"one={tmp_path / 'one'},two={tmp_path / 'two'}"
    assert main("mteb", ["--model", named, "--benchmark", "All", "--output_dir", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    one, two = (entry["tasks"]["Drawn"]["score"] for entry in results["models"].values())
    assert one == two != 0
    assert results["models"]["one"]["tasks"]["Same"]["score"] == 0  # not NaN, which is no JSON


def test_the_prompt_of_a_text_is_the_most_special_one_that_the_files_name(tmp_path):
    encoder(tmp_path)
    prompts = {"query": "a ", "passage": "b ", "STS": "c ", "Own": "d ", "Own-query": "e ", "plain": "f "}
    values = {"prompts": prompts, "default_prompt_name": "plain"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(values))
    settings, tokenizer = read_sentence_settings(tmp_path), load_tokenizer(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, head="none")
    made = SentenceEncoder(model, tokenizer, settings)
    for name, kind, prompt_type, prompt in (
        ("Own", "STS", "query", "e "),
        ("Own", "STS", None, "d "),
        ("Other", "STS", "query", "c "),
        ("Other", "Retrieval", "query", "a "),
        ("Other", "Retrieval", "document", "b "),
        ("Other", "Other", None, "f "),
    ):
        task = SimpleNamespace(name=name, type=kind)
        asked = None if prompt_type is None else SimpleNamespace(value=prompt_type)
        given = {"task_metadata": task, "hf_split": "test", "hf_subset": "default", "prompt_type": asked}
        expected = model(**tokenizer(prompt + "c", return_tensors="pt")).last_hidden_state[:, 0].detach()
        torch.testing.assert_close(made.encode([{"text": ["c"]}], **given), expected)


def test_mistakes_are_told_before_a_model_is_loaded(tmp_path, refused, monkeypatch):
    pictures = StandInTask("Pictures", [], modalities=("image", "text"))
    gone = StandInTask("Gone", [], error=ConnectionError("no route to the hub"))
    stand_in_mteb.install(monkeypatch, [StandInTask("First", ROWS["First"]), pictures, gone])
    encoder(tmp_path)
    model, task = ("--model", tmp_path), ("--tasks", "First")
    for words, said in (
        ((*model, "--tasks", "Frist"), "MTEB has no 'Frist'; did you mean First?"),
        (model, "--tasks or --benchmark: give one of them"),
        ((*model, "--benchmark", "All", "--languages", "eng"), "a benchmark has its own languages"),
        ((*model, *task, "--languages", "deu"), "--languages deu: First is not scored in them"),
        ((*model, "--tasks", "Pictures"), "Pictures is a task of image"),
        ((*model, "--tasks", "Gone"), "--tasks Gone: the data are not loaded (ConnectionError: no route to the hub)"),
        (("--model", "embedded:teacher", *task), "is a decoder"),
    ):
        assert said in refused("mteb", *words)
    monkeypatch.setitem(sys.modules, "mteb", None)  # as if it were not installed
    assert 'pip install -e ".[mteb]"' in refused("mteb", *model, *task)
