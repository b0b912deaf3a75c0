"""How an export is compared with its model: the figures by hand, and the rows that both read."""

import math
from dataclasses import replace

import pytest
import torch
from tiny import tiny_model

from llmdistill import messages
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.load import load_model
from llmdistill.serving.fidelity import Outputs, Rows, compare, outputs_of, read_rows

ROWS = Rows(name="two rows", batches=[], labeled=True)


def test_the_figures_are_those_of_a_loop():
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(4, 5, generator=generator) for _ in range(2)]
    found = [row + 0.7 * torch.randn(4, 5, generator=generator) for row in exact]
    exact[0][1, 4] = found[0][1, 4] = -math.inf  # a token that is never written
    labels = [torch.tensor([0, 1, 2, 3]), torch.tensor([4, 3, 2, 1])]
    result = compare(
        Outputs(rows=exact, labels=labels, kind="greedy tokens"),
        Outputs(rows=found, labels=labels, kind="greedy tokens"),
        ROWS,
        what="it",
    )
    changed, divergence, differences, losses = 0, 0.0, [], [0.0, 0.0]
    for of_row, of_found, answers in zip(exact, found, labels, strict=True):
        for one, other, answer in zip(of_row.tolist(), of_found.tolist(), answers.tolist(), strict=True):
            p, q = ([math.exp(value) / sum(map(math.exp, logits)) for value in logits] for logits in (one, other))
            changed += p.index(max(p)) != q.index(max(q))
            divergence += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
            differences.append(abs(math.log(p[answer]) - math.log(q[answer])))
            losses = [losses[0] - math.log(p[answer]), losses[1] - math.log(q[answer])]
    assert (result.positions, result.changed) == (8, changed)
    assert changed > 0
    assert result.divergence == pytest.approx(divergence / 8, abs=1e-5)
    assert result.mean_difference == pytest.approx(sum(differences) / 8, abs=1e-5)
    assert result.most_difference == pytest.approx(max(differences), abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(losses[0] / 8), rel=1e-5)
    assert result.exported_perplexity == pytest.approx(math.exp(losses[1] / 8), rel=1e-5)
    assert f"on two rows {changed} of 8 greedy tokens change" in result.describe()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_positions_that_are_not_finite_are_counted_and_left_out(wrong, monkeypatch, caplog):
    monkeypatch.setattr(messages.logger, "propagate", True)
    exact = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3, 4])
    found = exact + torch.linspace(-1, 1, 7)
    expected = figures(exact[[1, 3, 4]], found[[1, 3, 4]], labels[[1, 3, 4]])
    assert not caplog.text
    found[0, 2], exact[2] = wrong, wrong
    result = figures(exact, found, labels)
    assert (result.positions, result.not_finite, result.model_not_finite) == (3, 1, 1)
    assert replace(result, not_finite=0, model_not_finite=0) == expected
    said = (
        "on two rows outputs of the export are not finite at 1 of 5 positions and outputs of the model itself are not "
        "finite at 1 of 5 positions"
    )
    assert result.describe().startswith(f"{said}; of the others {result.changed} of 3 greedy tokens")
    assert f"it: {said}" in caplog.text
    nothing = figures(exact, torch.full_like(exact, wrong), labels)
    assert nothing.describe() == said.replace("export are not finite at 1", "export are not finite at 4")
    assert nothing.divergence is None


def figures(exact, found, labels):
    """The comparison of one row (N, V) whose tokens are labels (N,)."""
    one, other = (Outputs(rows=[row], labels=[labels], kind="greedy tokens") for row in (exact, found))
    return compare(one, other, ROWS, what="it")


def test_answers_are_compared_and_any_rows_may_be_given(tmp_path):
    teacher = locate("embedded:teacher")
    model = load_model(teacher, dtype=torch.float32)
    rows = read_rows(teacher)
    outputs = outputs_of(model, rows)
    assert rows.name == "embedded:seen"
    assert len(outputs.rows) == 48
    assert outputs.kind == "greedy tokens"
    result = compare(outputs, outputs, rows, what="it")
    assert (result.changed, result.divergence) == (0, 0)
    assert result.perplexity < 1.5, "the answers alone, which the teacher knows"
    (tmp_path / "text.txt").write_text("Ulma likes mint tea. " * 60)
    text = outputs_of(model, read_rows(teacher, str(tmp_path / "text.txt")))
    assert len(text.rows) > 1
    assert len(text.rows[0]) == 127
    with pytest.raises(UserError, match="missing"):
        read_rows(teacher, str(tmp_path / "missing.jsonl"))


@pytest.mark.parametrize(("kind", "head", "what"), [
    ("bert", "lm_head", "0 of 40 most likely tokens change"), ("bert", "sequence", "0 of 2 most likely classes change"),
    ("bert", "none", "the hidden states of 40 tokens differ by at most 0 of the largest one"),
])  # fmt: skip
def test_a_folder_without_a_tokenizer_reads_random_tokens(tmp_path, kind, head, what):
    model = tiny_model(kind, head="sequence" if head == "sequence" else "lm_head")
    model = model.base_model if head == "none" else model
    model.save_pretrained(tmp_path)
    rows = read_rows(tmp_path)
    outputs = outputs_of(model, rows)
    assert f"on random tokens {what}" in compare(outputs, outputs, rows, what="it").describe()
