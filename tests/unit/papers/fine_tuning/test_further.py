"""Sets on which models are scored and by which nothing is chosen: other domains, and the languages of XNLI."""

import json
import math
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

LANGUAGES = ("de", "en", "sw")
SHARED = ("--learning_rates", "3e-3", "--batch_size", "8", "--dtype", "fp32", "--max_length", 24)


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
def predictions(model_dir, rows):
    """The class of each pair, one by one, by transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    logits = [model(**tokenizer(first, second, return_tensors="pt")).logits for first, second, _ in rows]
    return [model.config.id2label[int(each.argmax())] for each in logits]


def test_a_classifier_is_scored_on_another_set(evaluate, engine, tmp_path) -> None:
    rows, file = rows_of(37, 5, ["entailment", "non-entailment"]), tmp_path / "heuristics.txt"
    lines = ["gold_label\tbinary_parse\tsentence1\tsentence2", *(f"{label}\t()\t{a}\t{b}" for a, b, label in rows)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    own = {"data": str(file), "sentences": ["sentence1", "sentence2"], "label": "gold_label"}
    sets = {"HANS": own, "Other": {**own, "task": "cola", "labels": {"0": "a", "1": "b"}}}
    command = (*SHARED, "--tasks", "rte", "--out_of_domain", json.dumps(sets))
    results, _ = evaluate(*command)
    found = results["tasks"]["RTE"]
    right = {"entailment": "entailment", "not_entailment": "non-entailment"}
    predicted = predictions(tmp_path / "out/RTE/best", rows)
    hits = [right[each] == row[2] for each, row in zip(predicted, rows, strict=True)]
    assert found["dev"]["HANS"]["accuracy"]["mean"] == pytest.approx(100 * fmean(hits))
    assert 60 < 100 * fmean(hits) < 95  # a fifth of the words lie
    assert list(found["dev"]) == ["RTE", "HANS"]  # the other set is CoLA's
    assert found["examples"]["HANS"] == len(rows)
    # With other examples the further set is scored again.
    file.write_text(f"{file.read_text(encoding='utf-8')}entailment\t()\tw1 yes\tw2\n", encoding="utf-8")
    assert evaluate(*command)[0]["tasks"]["RTE"]["examples"]["HANS"] == len(rows) + 1
    # Mistakes are found before anything is trained.
    for change, message in (
        ({"file": "x"}, "HANS.file: there is no such setting"),
        ({"labels": {"entailment": "entailment"}}, "give a label of the set for each class of RTE"),
        ({"label": "gold"}, "heuristics.txt:2: has no gold"),
        (
            {"labels": {"entailment": "entailment", "not_entailment": "neutral"}},
            "label 'non-entailment', but data.task.out_of_domain.HANS.labels knows entailment, neutral",
        ),
    ):
        wrong = json.dumps({"HANS": {**own, **change}})
        assert message in evaluate(*command, "--out_of_domain", wrong, folder="wrong", code=2)[1], message
    assert engine.built == 1


def test_xnli_is_scored_in_each_language(evaluate, engine, tmp_path) -> None:
    """The training set is that of XNLI's own translation package."""
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
    words = (*SHARED, "--data_dir", folder.parent, "--tasks", "xnli")
    results, _ = evaluate(*words, "--learning_rates", "3e-3,1e-5")
    found = results["tasks"]["XNLI"]
    means = []
    for language, rows in sets.items():
        predicted = predictions(tmp_path / "out/XNLI/best", rows)
        hits = [each == row[2] for each, row in zip(predicted, rows, strict=True)]
        assert math.isclose(found["dev"][f"XNLI-{language}"]["accuracy"]["mean"], 100 * fmean(hits)), language
        means.append(100 * fmean(hits))
    assert math.isclose(found["dev"]["XNLI"]["accuracy"]["mean"], fmean(means))
    assert found["examples"]["dev"] == 27  # the joint dev set of the languages, by which settings are chosen
    first, second = (each["mean"] for each in found["grid"])
    assert first > second
    assert found["main_column"] == "XNLI"
    # Mistakes are found before anything is trained.
    languages = json.dumps({"data.task.languages": ["en", "zh"]})
    _, error = evaluate(*words, "--run_settings", languages, folder="wrong", code=2)
    assert "has no dev and test examples for zh, only for de, en, sw" in error
    file = folder / "xnli.test.tsv"
    file.write_text(file.read_text(encoding="utf-8").replace("sentence2", "hypothesis"), encoding="utf-8")
    assert "expected sentence1, sentence2, gold_label" in evaluate(*words, folder="wrong", code=2)[1]
    assert engine.built == 2
