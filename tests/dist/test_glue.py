"""GLUE on ranks: two learn and say what one does."""

import json
from pathlib import Path

import pytest
import torch
from word_models import save_bert, save_tokenizer

TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "yes", "no", *(f"w{n}" for n in range(9))]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """STS-B, as its scores show the smallest difference; one word decides. The ranks' shares of dev differ in size."""
    folder = tmp_path_factory.mktemp("glue")
    (folder / "STS-B").mkdir()
    generator = torch.Generator().manual_seed(0)
    for split, size in (("train", 45), ("dev", 21), ("test", 5)):
        lines = ["index\tsentence1\tsentence2\tscore\n"]
        for number in range(size):
            right = int(torch.randint(2, (), generator=generator))
            noise = [f"w{int(n)}" for n in torch.randint(9, (4,), generator=generator)]
            lines.append(
                f"{number}\t{['no', 'yes'][right]} {' '.join(noise[: 1 + number % 3])}\t{noise[3]}\t{5.0 * right}\n"
            )
        (folder / f"STS-B/{split}.tsv").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def evaluate(data, launch, tmp_path_factory):
    """Runs the script eval/glue.py or the command of the same name; returns what it printed."""
    encoder = tmp_path_factory.mktemp("encoder")
    save_bert(encoder, TOKENS, initializer_range=0.4)
    save_tokenizer(encoder, TOKENS)
    settings = "--protocol custom --learning_rates 3e-3 --epochs 12 --batch_size 8 --tasks stsb --dtype fp32"

    def run(output: Path, *more: str, ranks: int, script: bool = False) -> str:
        given = ["--model", str(encoder), "--data_dir", str(data), "--output_dir", str(output), "--speed", "false"]
        words = [*given, *settings.split(), *more]
        if script:
            return launch(*words, program="eval/glue.py", ranks=ranks).stdout
        return launch("evaluate", "--suite", "glue", *words, program="llmdistill.cli", ranks=ranks).stdout

    return run


@pytest.mark.slow
def test_two_ranks_and_trials_side_by_side_learn_what_one_does(evaluate, tmp_path):
    seeds = ("--seeds", "1,2")
    evaluate(tmp_path / "one", *seeds, ranks=1, script=True)
    said = evaluate(tmp_path / "two", *seeds, ranks=2)
    assert said.count("[1/2] STS-B learning_rate=0.003 epochs=12 seed=1: ") == 1
    run = "STS-B/lr-0.003-epochs-12-seed-1"
    one, two = (
        [line.split("\t") for line in (tmp_path / name / run / "predictions/student/dev.tsv").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == len(two) == 22
    for first, second in zip(one[1:], two[1:], strict=True):
        assert first[::2] == second[::2]  # the example's number, and what is right
        assert float(first[1]) == pytest.approx(float(second[1]), abs=1e-4)
    assert (tmp_path / "one/predictions/STS-B.tsv").read_text() == (tmp_path / "two/predictions/STS-B.tsv").read_text()

    said = evaluate(tmp_path / "beside", "--trials_at_once", "2", *seeds, ranks=0)
    assert said.index("seed=1 ...") < said.index("seed=2 ...") < said.index("seed=1: pearson")
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two", "beside")]
    scores = [each["tasks"]["STS-B"]["dev"]["STS-B"] for each in results]
    for metric in ("pearson", "spearman"):
        assert scores[0][metric]["mean"] > 50
        assert scores[1][metric]["mean"] == pytest.approx(scores[0][metric]["mean"], rel=1e-5)
    for each in results:
        del each["run"], each["tasks"]["STS-B"]["seconds"]
    assert results[2] == results[0]
    weights = [(tmp_path / name / "STS-B/best/model.safetensors").read_bytes() for name in ("one", "beside")]
    assert weights[0] == weights[1]
