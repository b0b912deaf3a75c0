"""The model card of a student, as the hub's own library reads it."""

import re
import shutil

import pytest
import yaml
from huggingface_hub import ModelCard
from tiny import tiny_model
from transformers import AutoModelForCausalLM

import llmdistill
from llmdistill.artifacts import manifest_damage
from llmdistill.data.sources import hub_name
from llmdistill.models.load import load_model
from llmdistill.report.card import StudentFacts, TeacherFacts, without_paths, write_card
from llmdistill.report.tables import TitledTable

TEACHERS_CARD = (
    "---\nlicense: other\nlicense_name: llama3.2\nlanguage: [de, en]\nbase_model: meta-llama/Llama-3.2-1B\n"
    "tags: [secret-tag]\n---\n# Ours\nAn internal model.\n"
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "our-llama"
    tiny_model("llama").save_pretrained(folder)
    (folder / "README.md").write_text(TEACHERS_CARD, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def student(teacher):
    folder = teacher.parent / "small"
    llmdistill.compress(teacher, rank=3, output=folder)
    return folder


def test_the_card_has_the_teachers_license_counts_and_code_and_nothing_of_the_machine(student, teacher):
    text = (student / "README.md").read_text(encoding="utf-8")
    data = ModelCard(text).data
    assert (data.license, data.license_name, data.language) == ("other", "llama3.2", ["de", "en"])
    assert data.base_model == "meta-llama/Llama-3.2-1B", "the hub's own name, as the teacher is a folder here"
    assert (data.library_name, data.pipeline_tag) == ("llmdistill", "text-generation")
    assert "svd" in data.tags
    assert "secret-tag" not in data.tags
    small, whole = (AutoModelForCausalLM.from_pretrained(each).num_parameters() for each in (student, teacher))
    assert f"{small:,}, {small / whole:.0%} of the {whole:,} of our-llama" in text
    assert "llmdistill compress --model our-llama --method svd --rank 3" in text
    assert str(teacher.parent) not in text
    assert "An internal model" not in text
    # Its lines load the student.
    code = text.split("```python\n")[1].split("```")[0].replace("USER/NAME", str(student))
    code = "\n".join(line for line in code.splitlines() if not line.startswith("tokenizer"))
    names: dict[str, object] = {}
    exec(code, names)
    assert type(names["model"]).__name__ == "LlamaForCausalLM"


def test_a_card_may_be_changed_without_damage_and_is_then_the_users(student, tmp_path):
    card, folder = student / "README.md", tmp_path / "copy"
    shutil.copytree(student, folder)
    mine = card.read_text(encoding="utf-8").replace("<!-- Written by", "<!-- Not by")
    (folder / "README.md").write_text(mine, encoding="utf-8")
    assert manifest_damage(folder) is None
    load_model(folder, dtype="auto", head="saved")
    about, story = TeacherFacts(name="x", params=7), StudentFacts(intro="New.", tags=[], made=[])
    write_card(folder, "t", about, story)
    assert (folder / "README.md").read_text(encoding="utf-8") == mine
    (folder / "README.md").write_text(card.read_text(encoding="utf-8"), encoding="utf-8")
    write_card(folder, "t", about, story)
    assert "New." in (folder / "README.md").read_text(encoding="utf-8")
    (folder / "config.json").write_text("{}")
    assert manifest_damage(folder) is not None


def test_a_dense_export_loads_without_us_and_keeps_the_rest_of_the_card(student, tmp_path):
    llmdistill.export(student, tmp_path / "dense", to="dense")
    card = ModelCard.load(tmp_path / "dense" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.license_name == "llama3.2"
    assert "import llmdistill" not in card.text
    assert "--rank 3" in card.text
    assert "multiplied out" in card.text


def test_scores_are_results_for_the_hub(student, tmp_path):
    (tmp_path / "config.json").write_bytes((student / "config.json").read_bytes())
    scores = {"RTE": {"accuracy": 61.25}, "dolly": {"rougeL": 27.0, "perplexity": 5.5}}
    table = TitledTable("", ["model", "RTE"], [["teacher", "70.0"], ["trained", "61.2"]])
    story = StudentFacts(intro="A.", tags=["kd"], made=[], datasets=["databricks/dolly"], scores=scores, table=table)
    write_card(tmp_path, "run", TeacherFacts(name="t", params=10), story)
    card = ModelCard.load(tmp_path / "README.md")
    found = {(each.dataset_name, each.metric_type): each.metric_value for each in card.data.eval_results}
    assert found == {("RTE", "accuracy"): 61.25, ("dolly", "rougeL"): 27.0, ("dolly", "perplexity"): 5.5}
    assert card.data.datasets == ["databricks/dolly"]
    assert "| trained | 61.2 |" in card.text


def test_paths_are_cut_to_their_last_name_and_only_data_of_the_hub_have_its_name():
    for text, expected in (
        ("--output_dir /home/me/runs/a --x=/data/b.jsonl", "--output_dir a --x=b.jsonl"),
        ("{a: /x/y.json, b: '/z/w'}", "{a: y.json, b: 'w'}"),
        ("/runs/llama-small/student/ ~/models/llama", "llama-small llama"),
    ):
        assert without_paths(text) == expected
    relative = "data/a.jsonl OWNER/NAME hf://datasets/a/b.json 3/4"
    assert without_paths(relative) == relative
    for reference, expected in (
        ("databricks/dolly:train[:500]", "databricks/dolly"),
        ("hf://datasets/a/b/x/y.parquet:train", "a/b"),
        ("data/train.jsonl", None),
        ("embedded:train", None),
    ):
        assert hub_name(reference) == expected


HOSTILE = "x<script>alert(1)</script>`|[a](javascript:b)\n---\nlicense: mine"


def test_text_of_others_is_text_in_a_card(student, tmp_path):
    folder = tmp_path / "student"
    shutil.copytree(student, folder)
    (folder / "README.md").unlink()
    story = StudentFacts(
        intro=f"{HOSTILE}, trained.",
        tags=["svd", HOSTILE],
        made=[("Data", HOSTILE), ("Command", f"llmdistill train --data.train '{HOSTILE}'")],
        settings={"data": {"train": f"{HOSTILE}\n```\n<script>"}},
        scores={HOSTILE: {"rougeL": 1.0}},
        warnings=[HOSTILE],
    )
    teacher = TeacherFacts(name=HOSTILE, params=10, header={"license": "mit"}, origin=HOSTILE)
    write_card(folder, HOSTILE, teacher, story)
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert ModelCard(text).data.license == "mit"
    header, body = text.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(header)["license"] == "mit"
    # Outside of code, which shows what it holds, there is neither a tag nor a link.
    spoken = re.sub(r"(`{3,})yaml\n.*?\n\1\n|(`+)(?!`).*?(?<!`)\2(?!`)", "", body.replace(r"\`", ""), flags=re.DOTALL)
    assert "alert(1)" in spoken
    assert "<script" not in spoken
    assert "[a](" not in spoken.replace(r"\[", "")
