"""Distill a student in a plain loop of PyTorch: KD and MaKD of an SVD student, in one flat file to read and to fork.

    pip install -e .                         # in a checkout of llmdistill
    python scripts/examples/plain_loop.py    # the embedded teacher, 1.2 million parameters, on a CPU
    python scripts/examples/plain_loop.py --teacher my-llama --train train.jsonl --test test.jsonl --max_length 512

The models are those of transformers, the optimizer and the loop are PyTorch's. `llmdistill.compress` makes the student,
and `llmdistill.DistillationLoss` computes the loss. What a run has besides (ZeRO, accumulation, checkpoints, scores,
reports) is in `llmdistill.distill`. The cells (`# %%`) open as a notebook in VS Code, and in Jupyter with jupytext.

Shapes: B examples of a batch, T tokens, V entries of the vocabulary.
"""

# %% Settings
import argparse
import sys
from copy import deepcopy

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import llmdistill
from llmdistill.data.prompts import render_prompt, resolve_prompt
from llmdistill.data.sources import examples_of
from llmdistill.embedded import locate

parser = argparse.ArgumentParser(description="Distill a decoder in a plain loop.", allow_abbrev=False)
parser.add_argument("--teacher", default="embedded:teacher", help="a fine-tuned decoder: a folder, or a hub name")
parser.add_argument("--train", default="embedded:train", help="rows of instructions or messages: JSONL, Parquet, CSV")
parser.add_argument("--test", default="embedded:unseen", help="rows of the same form; these ask what train leaves out")
parser.add_argument("--size", default="45%", help="parameters of the student: a share, or a number such as 0.7B")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--learning_rate", type=float, default=1.5e-3, help="1e-4 is usual for a pretrained teacher")
parser.add_argument("--max_length", type=int, default=160, help="tokens of prompt and answer; what is longer is cut")
parser.add_argument("--output", help="a folder for the student of MaKD")
given = parser.parse_args([] if "ipykernel" in sys.modules else None)  # a notebook has no command line
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% The teacher: any decoder that transformers loads
source = locate(given.teacher)
teacher = AutoModelForCausalLM.from_pretrained(source).to(device)
tokenizer = AutoTokenizer.from_pretrained(source, padding_side="right")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token


# %% The data: a prompt and its answer are one sequence, and only the tokens of the answer have labels
def encode(path):
    """Return the tokens (T,) and labels (T,) of each example of a file; the labels are -100 in the prompt."""
    sequences = []
    for example in examples_of(path):
        text = render_prompt(example, tokenizer, resolve_prompt(None, [tokenizer]))
        prompt = tokenizer(text)["input_ids"]
        answer = [*tokenizer(example.outputs[0], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        tokens, labels = prompt + answer, [-100] * len(prompt) + answer
        sequences.append({"input_ids": tokens[: given.max_length], "labels": labels[: given.max_length]})
    return sequences


train, test = encode(given.train), encode(given.test)
collate = DataCollatorForSeq2Seq(tokenizer)  # pads the sequences to a batch (B, T), and the labels with -100


# %% The score
@torch.no_grad()
def perplexity(model):
    """Return exp of the mean cross-entropy of the answers' tokens in the test set; 1 is the best."""
    model.eval()
    total = count = 0
    for start in range(0, len(test), given.batch_size):
        batch = collate(test[start : start + given.batch_size]).to(device)
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch).logits[:, :-1].float()  # (B, T - 1, V): each token predicts the next one
        total += functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum").item()
        count += (labels != -100).sum().item()
    return torch.tensor(total / count).exp().item()


# %% The loop. Another method is another name here: minilm, minilmv2, distilbert, tinybert ..., see docs/methods.md
def distill(student, method, **settings):
    """Train the student in place."""
    loss = llmdistill.DistillationLoss(teacher, student, method, **settings)  # may add parameters to the student
    optimizer = torch.optim.AdamW(student.parameters(), lr=given.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.learning_rate, given.steps + 1, pct_start=0.1)
    order = torch.Generator().manual_seed(0)  # the same batches for each method
    student.train()
    for step in range(1, given.steps + 1):
        rows = torch.randint(len(train), (given.batch_size,), generator=order)
        output = loss(collate([train[row] for row in rows]).to(device))
        output.backward()
        clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == given.steps:
            terms = "  ".join(f"{name} {value:.3f}" for name, value in output.terms.items())
            print(f"{method} step {step}: loss {output.loss.item():.3f}  {terms}")
    loss.remove()  # its hooks: from here on the student is a model like any other


# %% The students. Each matrix of the teacher becomes a product of two by its SVD, and both methods start from there
def report(name, model):
    print(f"{name}: {model.num_parameters():,} parameters, perplexity {perplexity(model):.3f}")


report("teacher", teacher)
untrained = llmdistill.compress(teacher, target_params=given.size)
report("untrained", untrained)
for method, settings in {"kd": {"ratio": 0.5}, "makd": {"logits": 10, "scale": "plain"}}.items():
    student = deepcopy(untrained)
    distill(student, method, **settings)
    report(method, student)

# %% MaKD's student becomes a folder, which transformers loads wherever llmdistill is imported
if given.output:
    student.save_pretrained(given.output)
    tokenizer.save_pretrained(given.output)
