"""The names of llmdistill.losses."""

import textwrap

import torch

from llmdistill import losses


def test_the_example_runs():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, requires_grad=True)
    hidden = torch.randn(2, 5, 3, requires_grad=True)
    names = {
        "student_logits": logits,
        "teacher_logits": torch.randn(2, 5, 7),
        "labels": torch.randint(7, (2, 5)),
        "student_hidden": hidden,
        "teacher_hidden": torch.randn(2, 5, 3),
        "attention_mask": torch.ones(2, 5),
    }
    lines = (losses.__doc__ or "").split("\n")
    exec(textwrap.dedent("\n".join(line for line in lines if line.startswith("    "))), names)
    assert logits.grad is not None
    assert torch.allclose(hidden.grad, 2 * (hidden.detach() - names["teacher_hidden"]) / 30)
