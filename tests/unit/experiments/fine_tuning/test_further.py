"""Sets on which models are scored and by which nothing is chosen: other domains, and the languages of XNLI."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from llmdistill.commands import fine_tuning

LANGUAGES = ("de", "en", "sw")
SHARED = ("--protocol", "custom", "--learning_rates", "3e-3", "--epochs", "4", "--batch_size", "8", "--speed", "false")


def run(*words: object) -> int:
    return fine_tuning.main([str(word) for word in (*SHARED, "--dtype", "fp32", "--max_length", 24, *words)])


def rows_of(count: int, seed: int, labels: list[str]) -> list[tuple[str, str, str]]:
    """Pairs of sentences, whose first says by a word what is right, most of the time."""
    generator = torch.Generator().manual_seed(seed)
    words, found = ["yes", "maybe", "no"] if len(labels) == 3 else ["yes", "no"], []
    for _ in range(count):
        number, noise = (int(torch.randint(n, (), generator=generator)) for n in (len(labels), 11))
        shown = number if int(torch.randint(5, (), generator=generator)) else (number + 1) % len(labels)
        found.append((f"w{noise} {words[shown]}", f"w{noise + 1 if noise < 11 else 0}", labels[number]))
    return found


@torch.no_grad()
def predictions(model_dir: Path, rows: list[tuple[str, str, str]]) -> list[str]:
    """The class of each pair, one by one, by transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    logits = [model(**tokenizer(first, second, return_tensors="pt")).logits for first, second, _ in rows]
    return [model.config.id2label[int(each.argmax())] for each in logits]


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.fixture
def hans(tmp_path: Path) -> tuple[Path, list[tuple[str, str, str]]]:
    """A set with the columns of HANS' own file."""
    rows = rows_of(37, 5, ["entailment", "non-entailment"])
    file = tmp_path / "heuristics.txt"
    lines = ["gold_label\tbinary_parse\tsentence1\tsentence2", *(f"{label}\t()\t{a}\t{b}" for a, b, label in rows)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file, rows


def test_a_classifier_is_scored_on_another_set(engine, encoder, data, tmp_path, hans, capsys) -> None:
    file, rows = hans
    own = {"data": str(file), "sentences": ["sentence1", "sentence2"], "label": "gold_label"}
    sets = {"HANS": own, "Other": {**own, "task": "cola", "labels": {"0": "a", "1": "b"}}}
    command = ("--model", encoder, "--data_dir", data, "--output_dir", tmp_path / "out", "--tasks", "rte")

    assert run(*command, "--out_of_domain", json.dumps(sets)) == 0

    found = results(tmp_path / "out")["tasks"]["RTE"]
    best = tmp_path / "out" / "RTE" / "best"
    right = {"entailment": "entailment", "not_entailment": "non-entailment"}
    hits = [right[each] == row[2] for each, row in zip(predictions(best, rows), rows, strict=True)]
    assert found["dev"]["HANS"]["accuracy"]["mean"] == pytest.approx(100 * fmean(hits))
    assert 60 < 100 * fmean(hits) < 95  # a fifth of the words lie
    assert list(found["dev"]) == ["RTE", "HANS"]  # the other set is CoLA's
    assert found["examples"]["HANS"] == len(rows)
    assert "HANS accuracy" in capsys.readouterr().out
    # With other examples the further set is scored again.
    file.write_text(f"{file.read_text(encoding='utf-8')}entailment\t()\tw1 yes\tw2\n", encoding="utf-8")
    assert run(*command, "--out_of_domain", json.dumps(sets)) == 0
    assert results(tmp_path / "out")["tasks"]["RTE"]["examples"]["HANS"] == len(rows) + 1


def test_mistakes_in_a_further_set(engine, encoder, data, tmp_path, hans, capsys) -> None:
    file, _ = hans
    whole = {"data": str(file), "sentences": ["sentence1", "sentence2"], "label": "gold_label"}
    mistakes = [
        ({"HANS": {"file": "x"}}, "HANS.file: there is no such setting"),
        ({"HANS": {**whole, "labels": {"entailment": "entailment"}}}, "give a label of the set for each class of RTE"),
        ({"HANS": {**whole, "label": "gold"}}, "heuristics.txt:2: has no gold"),
        (
            {"HANS": {**whole, "labels": {"entailment": "entailment", "not_entailment": "neutral"}}},
            "label 'non-entailment', but data.task.out_of_domain.HANS.labels knows entailment, neutral",
        ),
    ]
    for sets, message in mistakes:
        words = ("--model", encoder, "--data_dir", data, "--output_dir", tmp_path / "out", "--tasks", "rte")
        assert run(*words, "--out_of_domain", json.dumps(sets)) == 2
        assert message in capsys.readouterr().err, message
    assert engine.built == 0


@pytest.fixture
def xnli(tmp_path: Path) -> tuple[Path, dict[str, list[tuple[str, str, str]]]]:
    """XNLI's files in three languages, with a training set of XNLI's own translation package."""
    classes = ["entailment", "neutral", "contradiction"]
    folder = tmp_path / "data" / "XNLI"
    folder.mkdir(parents=True)
    sets = {}
    for split, size in (("dev", 9), ("test", 23)):
        by_language = {each: rows_of(size, 7 * number + size, classes) for number, each in enumerate(LANGUAGES)}
        lines = ["language\tgold_label\tsentence1_parse\tsentence1\tsentence2"]
        lines += [f"{name}\t{c}\t()\t{a}\t{b}" for name, rows in by_language.items() for a, b, c in rows]
        (folder / f"xnli.{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        sets = by_language
    lines = ["premise\thypo\tlabel"]
    lines += [f"{a}\t{b}\t{c.replace('contradiction', 'contradictory')}" for a, b, c in rows_of(96, 1, classes)]
    (folder / "multinli.train.en.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder.parent, sets


def test_xnli_is_scored_in_each_language(engine, encoder, tmp_path, xnli) -> None:
    folder, sets = xnli
    words = ("--model", encoder, "--data_dir", folder, "--output_dir", tmp_path / "out", "--tasks", "xnli")

    assert run(*words, "--learning_rates", "3e-3,1e-5") == 0

    found = results(tmp_path / "out")["tasks"]["XNLI"]
    best = tmp_path / "out" / "XNLI" / "best"
    means = []
    for language, rows in sets.items():
        hits = [each == row[2] for each, row in zip(predictions(best, rows), rows, strict=True)]
        assert math.isclose(found["dev"][f"XNLI-{language}"]["accuracy"]["mean"], 100 * fmean(hits)), language
        means.append(100 * fmean(hits))
    assert math.isclose(found["dev"]["XNLI"]["accuracy"]["mean"], fmean(means))
    assert found["examples"]["dev"] == 27  # the joint dev set of the languages, by which settings are chosen
    first, second = (each["mean"] for each in found["grid"])
    assert first > second
    assert found["main_column"] == "XNLI"


def test_mistakes_in_xnli(engine, encoder, tmp_path, xnli, capsys) -> None:
    folder, _ = xnli
    words = ("--model", encoder, "--data_dir", folder, "--output_dir", tmp_path / "out", "--tasks", "xnli")

    def languages(names: list[str]) -> tuple[str, str]:
        return "--run_settings", json.dumps({"data.task.languages": names})

    assert run(*words, *languages(["en", "zh"])) == 2
    assert "has no dev and test examples for zh, only for de, en, sw" in capsys.readouterr().err
    file = folder / "XNLI" / "xnli.test.tsv"
    file.write_text(file.read_text(encoding="utf-8").replace("sentence2", "hypothesis"), encoding="utf-8")
    assert run(*words) == 2
    assert "expected sentence1, sentence2, gold_label" in capsys.readouterr().err
    assert engine.built == 0
