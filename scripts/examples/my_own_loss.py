"""Train with a loss of your own: a divergence of the outputs and a distance of hidden states, in some 20 lines.

    pip install -e .                            # in a checkout of llmdistill
    python scripts/examples/my_own_loss.py      # the embedded teacher, 1.2 million parameters, on a CPU
    python scripts/examples/my_own_loss.py --teacher my-llama --train train.jsonl --test test.jsonl

The cells (`# %%`) open as a notebook in VS Code, and in Jupyter with jupytext; there, change the defaults below.
"""

# %% The teacher and the data
import argparse
import sys
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmdistill
from llmdistill import losses
from llmdistill.data.prompts import render_prompt, resolve_prompt
from llmdistill.data.sources import examples_of
from llmdistill.embedded import locate
from llmdistill.methods import METHODS, Method, MethodEntry, Terms
from llmdistill.methods.output import divergence_terms, label_terms
from llmdistill.models.families import shape_of

parser = argparse.ArgumentParser(description="Distill with a loss of one's own.", allow_abbrev=False)
parser.add_argument("--teacher", default="embedded:teacher", help="a fine-tuned decoder: a folder, or a hub name")
parser.add_argument("--train", default="embedded:train", help="rows of instructions or messages: JSONL, Parquet, CSV")
parser.add_argument("--test", default="embedded:unseen", help="rows of the same form, by which the models are scored")
parser.add_argument("--size", default="34%", help="parameters of the student: a share, or a number such as 0.7B")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--learning_rate", type=float, help="1.5e-3 for the embedded teacher, 1e-4 for another one")
parser.add_argument("--limit", type=int, help="score only so many rows of the test set")
given = parser.parse_args([] if "ipykernel" in sys.modules else None)  # a notebook has no command line
rate = given.learning_rate or (1.5e-3 if given.teacher == "embedded:teacher" else 1e-4)


# %% The loss: 20 lines. The divergence gets log-probabilities (N, V), the distance hidden states (B, T, W)
def hellinger(log_p, log_q):
    return 1 - (0.5 * (log_p + log_q)).exp().sum(-1)  # 1 - Σ √(p q), a number for each token


@dataclass(frozen=True, kw_only=True)
class MineConfig:
    """The squared Hellinger distance of the outputs, the angle of the last hidden states, and the labels."""

    angle: float = 0.5
    """Weight of 1 - cos between the last hidden states."""


def build_mine(settings, teacher, student, objective):
    mine, theirs = (shape_of(config).num_layers - 1 for config in (student, teacher))

    def angle(of_student, of_teacher, mask):
        return losses.hidden_cosine(of_student.hidden[mine], of_teacher.hidden[theirs], mask)

    needs = frozenset({("hidden", mine)}), frozenset({("hidden", theirs)})
    divergence = losses.divergence_by_autograd(hellinger)
    terms = Terms({"angle": settings.angle}, [losses.LayerTerm("angle", *needs, angle)])
    terms |= divergence_terms(losses.TokenTerm("hellinger", divergence), 1.0, objective)
    return Method(**vars(terms | label_terms(0.5, objective)))


METHODS["mine"] = MethodEntry(label="mine", help="Hellinger, angle, labels", settings=MineConfig, build=build_mine)

# %% A run with it. Each term has its column, and from now on `mine` is a method like any other
student = llmdistill.compress(given.teacher, target_params=given.size)
result = llmdistill.distill(
    given.teacher,
    student,
    given.train,
    "mine",
    tests={"test": given.test},
    steps=given.steps,
    learning_rate=rate,
    global_batch_size=32,
    max_prompt_length=96,
    max_length=160,
    decoding="greedy",
    settings={"mine.angle": 0.2, "scoring.limit": given.limit},
)
for name in ("teacher", "untrained", "student"):
    print(f"ROUGE-L of the {name}: {result.metrics[name]['rougeL']['test']:.1f}")

# %% The same loss in a loop of PyTorch, on one batch
source = locate(given.teacher)
teacher, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
prompt = resolve_prompt(None, [tokenizer])
texts = [render_prompt(each, tokenizer, prompt) + each.outputs[0] for each in examples_of(given.train)[:16]]
batch = tokenizer(texts, padding=True, return_tensors="pt")
batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)

loss = llmdistill.DistillationLoss(teacher, student, "mine", angle=0.2)
optimizer = torch.optim.AdamW(student.parameters(), lr=rate)
for step in range(5):
    output = loss(batch)
    output.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(
        f"step {step + 1}: loss {output.loss.item():.3f}", {name: f"{term:.3f}" for name, term in output.terms.items()}
    )
