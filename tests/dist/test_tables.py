"""Rows of published tables from start to end, in processes of their own, with a tiny teacher."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from glue_tasks import TOKENS, write_task, write_text
from word_models import save_bert, save_tokenizer


@pytest.fixture(scope="module")
def bring(tmp_path_factory):
    """What a user brings: a teacher, a text, and the files of RTE and SST-2."""
    folder = tmp_path_factory.mktemp("bring")
    save_bert(folder / "t", TOKENS, hidden_size=32, intermediate_size=64, num_attention_heads=4)
    save_tokenizer(folder / "t", TOKENS)
    write_text(folder / "text.txt")
    for task in ("RTE", "SST-2"):
        write_task(folder / "glue", task, {"train": 32, "dev": 20})
    return folder


SETTINGS = shlex.split("""--seed 3 --data.max_length 16 --train.steps 2 --train.warmup_steps 0 --train.dtype fp32
--train.global_batch_size 4 --train.micro_batch_size 4 --tasks.protocol custom --tasks.learning_rates 3e-3
--tasks.epochs 1""")
Compare = Callable[..., tuple[str, Any]]


@pytest.fixture(scope="module")
def compare(bring, launch):
    """Runs a table, each run in a process of its own; returns what the command printed, and results.json."""
    command = ["--teacher.model", str(bring / "t"), "--data.train", str(bring / "text.txt"), *SETTINGS]
    command += ["--tasks.data_dir", str(bring / "glue")]

    def run(folder: Path, *words: str) -> tuple[str, Any]:
        given = ["compare", *words, "--output_dir", str(folder), *command]
        said = launch(*given, program="llmdistill.cli", ranks=0).stdout
        return said, json.loads((folder / "results.json").read_text(encoding="utf-8"))

    return run


def test_rows_are_trained_fine_tuned_and_shown_beside_the_paper_s(bring, compare, tmp_path):
    words = ("--suite", "minilm-table2", "--rows", "teacher,minilm", "--student.shape", "1x16x4")
    words = (*words, "--tasks.names", "rte", "--tasks.seeds", "1,2")

    said, results = compare(tmp_path / "table", *words)

    rows = {row["key"]: row for row in results["rows"]}
    assert [key for key, row in rows.items() if row["measured"] is not None] == ["teacher", "minilm"]
    place = {label: number for number, label in enumerate(results["columns"])}
    for key in ("teacher", "minilm"):
        study = json.loads((tmp_path / "table" / "tasks" / key / "results.json").read_text(encoding="utf-8"))
        found = study["tasks"]["RTE"]["dev"]["RTE"]["accuracy"]
        figure = rows[key]["measured"]["figures"][place["RTE"]]
        assert (figure["mean"], figure["std"]) == (found["mean"], found["std"])
        assert len(found["seeds"]) == 2
        assert rows[key]["measured"]["figures"][place["CoLA"]] is None
    assert rows["teacher"]["measured"]["model"] == str(bring / "t")
    student = Path(rows["minilm"]["measured"]["model"])
    assert json.loads((student / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"] == 1
    assert "(71.5)" in " ".join(said.split())  # MiniLM's RTE in the paper
    again, same = compare(tmp_path / "table", *words)
    assert "(kept)" in again
    assert [row["measured"] for row in same["rows"]] == [row["measured"] for row in results["rows"]]


def test_kroneckerbert_s_rows_have_the_second_stage_of_their_recipe(compare, tmp_path):
    words = ("--suite", "kroneckerbert-table6", "--rows", "two-stages,no-kd", "--tasks.names", "sst2")
    shapes = json.dumps({"*.attention.*": "16x8", "*.intermediate.dense": "8x2", "*": "2x8"})
    words = (*words, "--student.factorize.shapes", shapes, "--student.factorize.embedding_columns", "4")
    words = (*words, "--data.text.fraction", "1", "--train.epochs", "null", "--data.text.next_sentence", "false")

    _, results = compare(tmp_path / "table", *words)

    rows = {row["key"]: row["measured"] for row in results["rows"] if row["measured"] is not None}
    assert list(rows) == ["two-stages", "no-kd"]
    (run,) = (tmp_path / "table" / "trials").glob("*/metrics.json")  # both rows have one first stage
    for key, row in (("two-stages", "two_stages"), ("no-kd", "no_kd")):
        study = json.loads((run.parent / "tasks" / row / "results.json").read_text(encoding="utf-8"))
        assert rows[key]["figures"][1]["mean"] == study["tasks"]["SST-2"]["dev"]["SST-2"]["accuracy"]["mean"]
        assert (study["teacher"] is None) == (key == "no-kd")


def test_models_of_one_set_are_scored_on_another(bring, compare, tmp_path):
    rows = [("0" if number % 4 else "1", f"{'no' if number % 4 else 'yes'} w{number}") for number in range(16)]
    file = tmp_path / "imdb.tsv"
    file.write_text("\n".join(["label\ttext", *map("\t".join, rows)]) + "\n", encoding="utf-8")
    words = ("--suite", "kroneckerbert-table9", "--rows", "teacher", "--tasks.names", "sst2", "--train.epochs", "null")

    _, results = compare(tmp_path / "table", *words, "--tasks.out_of_domain.IMDb.data", str(file))

    # The accuracies themselves are compared in tests/unit/papers/fine_tuning/test_further.py.
    study = json.loads((tmp_path / "table" / "tasks" / "teacher" / "results.json").read_text(encoding="utf-8"))
    found = {row["key"]: row["measured"] for row in results["rows"]}["teacher"]["figures"]
    assert found[0] is found[2] is None  # the sets of the tasks that were not asked for
    assert found[1]["mean"] == study["tasks"]["SST-2"]["dev"]["IMDb"]["accuracy"]["mean"]
