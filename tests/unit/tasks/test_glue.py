from collections import Counter

import datasets
import pytest
from hostile import refuses

from llmdistill.data.pairs import PairExample
from llmdistill.tasks.glue import read_split

MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
NLI = "index sentence1 sentence2"
MISMATCHED = ("dev_mismatched", "test_mismatched")


def write(folder, name: str, text: str):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


# A space stands for a tab where there is no tab.
def test_files(tmp_path):
    for task, split, file, text, expected in (
        ("CoLA", "train", "train.tsv", 'gj04\t0\t*\tThey "drank.\n', ('They "drank.', None, 0, 0)),
        ("CoLA", "dev", "dev.tsv", "\t1\t\t It is. \n", (" It is. ", None, 1, 0)),
        ("CoLA", "test", "test.tsv", "index\tsentence\n7\tBill left.\n", ("Bill left.", None, None, 7)),
        ("SST-2", "dev", "dev.tsv", "sentence\tlabel\nno wit \t0\n", ("no wit ", None, 0, 0)),
        ("SST-2", "test", "test.tsv", "index\tsentence\r\n3\tno wit\r\n", ("no wit", None, None, 3)),
        ("MRPC", "dev", "dev.tsv", f"\ufeff{MRPC_HEADER}1\t70\t71\tOne.\tTwo.\n", ("One.", "Two.", 1, 0)),
        ("MRPC", "test", "test.tsv", f"index\t{MRPC_HEADER}5\t?\t70\t71\tA\tB\n", ("A", "B", None, 5)),
        ("QQP", "dev", "dev.tsv", "id question1 question2 is_duplicate\n133 A B 1\n", ("A", "B", 1, 0)),
        ("QQP", "test", "test.tsv", "id question1 question2\n4 A B\n", ("A", "B", None, 4)),
        ("STS-B", "train", "train.tsv", "index sentence1 sentence2 score\n0 A B 3.800\n", ("A", "B", 3.8, 0)),
        ("MNLI", "train", "train.tsv", f"{NLI} label1 gold_label\n9 A B x entailment\n", ("A", "B", 0, 0)),
        ("MNLI", "dev", "dev_matched.tsv", f"{NLI} gold_label\n9 A B contradiction e\n", ("A", "B", 2, 0)),
        ("MNLI", MISMATCHED[0], "dev_mismatched.tsv", f"{NLI} gold_label\n9 A B neutral\n", ("A", "B", 1, 0)),
        ("MNLI", MISMATCHED[1], "test_mismatched.tsv", f"{NLI}\n9 A B\n", ("A", "B", None, 9)),
        ("QNLI", "train", "train.tsv", "index question sentence label\n9 Q S not_entailment\n", ("Q", "S", 1, 0)),
        ("WNLI", "dev", "dev.tsv", f"{NLI} label\n9 A B 1\n", ("A", "B", 1, 0)),
        # As people's own tables have them.
        ("SST-2", "dev", "dev.tsv", "Sentence\tLABEL\nno wit\t1.0\n", ("no wit", None, 1, 0)),
        ("RTE", "dev", "dev.tsv", "sentence1\tSentence2\tlabel\nA\tB\t not_entailment \n", ("A", "B", 1, 0)),
        ("SST-2", "test", "test.tsv", "Index\tSentence\n3\tno wit\n", ("no wit", None, None, 3)),
    ):
        write(tmp_path / task, file, text if "\t" in text else text.replace(" ", "\t"))
        assert read_split(task, split, tmp_path) == [PairExample(*expected)], (task, split)


def test_examples_stay_in_order_and_only_newlines_end_a_line(tmp_path):
    write(tmp_path / "SST-2", "train.tsv", 'sentence\tlabel\n"a\u2028b\t1\n\nc\rd"\t0\n"e\t1')
    found = [(each.sentence1, each.target, each.index) for each in read_split("SST-2", "train", tmp_path)]
    assert found == [('"a\u2028b', 1, 0), ('c\rd"', 0, 1), ('"e', 1, 2)]


def test_lines_of_qqp_that_are_torn_are_left_out(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    torn = "2\t3\t4\tWas he real?\n\tWhat is the evidence?\t0\n"
    write(tmp_path / "QQP", "train.tsv", f"{header}1\t1\t2\tA\tB\t0\n{torn}3\t5\t6\tC\tD\t1\n")
    assert [example.sentence1 for example in read_split("QQP", "train", tmp_path)] == ["A", "C"]
    write(tmp_path / "QQP", "test.tsv", "id\tquestion1\tquestion2\n0\tA\tB\n1\tA\n")
    refuses("test.tsv:3: has no column question2, only", read_split, "QQP", "test", tmp_path)


def test_original_mrpc(tmp_path):
    folder = tmp_path / "MRPC"
    rows = "1\t10\t11\tA\tB\n0\t20\t21\tC\tD\n1\t11\t10\tE\tF\n"
    write(folder, "msr_paraphrase_train.txt", f"\ufeff{MRPC_HEADER}{rows}")
    write(folder, "msr_paraphrase_test.txt", f"\ufeff{MRPC_HEADER}1\t30\t31\tG\tH\n0\t32\t33\tI\tJ\n")
    refuses("MRPC/dev_ids.tsv: no such file", read_split, "MRPC", "dev", tmp_path)
    write(folder, "dev_ids.tsv", "10\t11\n")
    assert read_split("MRPC", "dev", tmp_path) == [PairExample("A", "B", 1, 0)]
    write(folder, "dev_ids.tsv", "#1 ID\t#2 ID\n10\t11\n")
    assert read_split("MRPC", "dev", tmp_path) == [PairExample("A", "B", 1, 0)]
    assert read_split("MRPC", "train", tmp_path) == [PairExample("C", "D", 0, 0), PairExample("E", "F", 1, 1)]
    assert read_split("MRPC", "test", tmp_path) == [PairExample("G", "H", None, 0), PairExample("I", "J", None, 1)]
    write(folder, "dev.tsv", f"{MRPC_HEADER}0\t1\t2\tX\tY\n")
    assert read_split("MRPC", "dev", tmp_path) == [PairExample("X", "Y", 0, 0)], "a file made for GLUE wins"


def test_bad_files(tmp_path):
    rte = "index\tsentence1\tsentence2\tlabel\n"
    for task, text, said in (
        ("RTE", f"{rte}0\tA\tB\tyes\n", "dev.tsv:2: label 'yes', expected one of entailment, not_entailment"),
        ("RTE", f"{rte}\n0\tA\tB\n", "dev.tsv:3: has no column label, only index, sentence1, sentence2; expected"),
        ("STS-B", "sentence1\tsentence2\tscore\nA\tB\t5.1\n", "label '5.1', expected a score"),
    ):
        write(tmp_path / task, "dev.tsv", text)
        refuses(said, read_split, task, "dev", tmp_path)


@pytest.fixture
def hub(monkeypatch):
    sets = {}

    def load(name: str, config: str, *, split: str):
        assert name == "nyu-mll/glue"
        if (config, split) not in sets:
            raise ConnectionError("no network\nhere")
        return sets[config, split]

    monkeypatch.setattr(datasets, "load_dataset", load)
    return sets


def test_the_hub(hub):
    pair, nli = {"sentence1": "A", "sentence2": "B"}, {"premise": "A", "hypothesis": "B"}
    for name, split, row, label, task, ours, expected in (
        ("mnli", "validation_mismatched", nli, 1, "MNLI", "dev_mismatched", ("A", "B", 1, 0)),
        ("mnli", "test_matched", nli, -1, "MNLI", "test", ("A", "B", None, 8)),
        ("cola", "validation", {"sentence": "A"}, 1, "CoLA", "dev", ("A", None, 1, 0)),
        ("qqp", "test", {"question1": "A", "question2": "B"}, -1, "QQP", "test", ("A", "B", None, 8)),
        ("stsb", "train", pair, 2.4, "STS-B", "train", ("A", "B", 2.4, 0)),
    ):
        hub[name, split] = [{**row, "label": label, "idx": 8}]
        assert read_split(task, ours, None) == [PairExample(*expected)]
    refuses("glue, rte, train: not loaded from the hub (ConnectionError: no network)", read_split, "RTE", "train", None)
    hub["rte", "train"] = [{**pair, "label": 2, "idx": 0}]
    refuses("rte, train: row 1: label '2', expected one of entailment", read_split, "RTE", "train", None)
    hub["rte", "train"] = [{**pair, "sentence2": None, "label": 1, "idx": 0}]
    refuses("expected sentence1, sentence2 as text", read_split, "RTE", "train", None)


def test_real_data(real_data):
    glue = real_data / "glue"
    # Counts by class as in the published sets.
    assert Counter(example.target for example in read_split("RTE", "train", glue)) == {0: 1249, 1: 1241}
    assert Counter(example.target for example in read_split("CoLA", "train", glue)) == {1: 6023, 0: 2528}
    assert Counter(example.target for example in read_split("SST-2", "dev", glue)) == {1: 444, 0: 428}
    assert read_split("CoLA", "dev", glue)[0].sentence1 == "The sailors rode the breeze clear of the rocks."
