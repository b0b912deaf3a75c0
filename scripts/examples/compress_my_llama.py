"""Compress a fine-tuned Llama: an SVD student with a third of its parameters that answers nearly as well.

    pip install -e .                                 # in a checkout of llmdistill
    python scripts/examples/compress_my_llama.py     # the embedded teacher, 1.2 million parameters, on a CPU
    python scripts/examples/compress_my_llama.py --teacher my-llama --train train.jsonl --test test.jsonl --size 50%

The cells (`# %%`) open as a notebook in VS Code, and in Jupyter with jupytext; there, change the defaults below. Any
decoder in docs/students.md does in place of a Llama.
"""

# %% The teacher, the data and the size of the student
import argparse
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import llmdistill  # also lets transformers load the student
from llmdistill.data.prompts import is_chat, render_prompt, resolve_prompt
from llmdistill.data.sources import examples_of

parser = argparse.ArgumentParser(description="Compress a fine-tuned decoder.", allow_abbrev=False)
parser.add_argument("--teacher", default="embedded:teacher", help="a folder, or a name on the hub")
parser.add_argument("--train", default="embedded:train", help="rows of instructions or messages: JSONL, Parquet, CSV")
parser.add_argument("--test", default="embedded:unseen", help="rows of the same form, by which the models are scored")
parser.add_argument("--size", default="34%", help="parameters of the student: a share, or a number such as 0.7B")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--learning_rate", type=float, help="1.5e-3 for the embedded teacher, 1e-4 for another one")
parser.add_argument("--max_prompt_length", type=int, default=96, help="tokens of a prompt; longer ones are an error")
parser.add_argument("--max_length", type=int, default=160, help="tokens of prompt and answer")
parser.add_argument("--limit", type=int, help="score only so many rows of the test set")
parser.add_argument("--output", default="runs/my-llama", help="the folder of the run; the student is in student/")
given = parser.parse_args([] if "ipykernel" in sys.modules else None)  # a notebook has no command line

limits = {"max_prompt_length": given.max_prompt_length, "max_length": given.max_length}
rate = given.learning_rate or (1.5e-3 if given.teacher == "embedded:teacher" else 1e-4)

# %% How large the student will be, from the teacher's config.json alone
size = llmdistill.sizes(given.teacher, target_params=given.size)
print(f"teacher {size['teacher_params']:,} parameters, student {size['student_params']:,}")

# %% The first student: each matrix becomes a product of two, weighted by inputs and gradients on the training data
calibration = {"data": given.train, "examples": 256}
student = llmdistill.compress(
    given.teacher,
    target_params=given.size,
    weighting="gradients",
    allocation="loss",
    calibration=calibration,
    **limits,
)

# %% Distillation; "kd" in place of "makd" compares the output alone. The same call goes on where it stopped
result = llmdistill.distill(
    given.teacher,
    student,
    given.train,
    "makd",
    tests={"test": given.test},
    output_dir=given.output,
    steps=given.steps,
    learning_rate=rate,
    warmup_steps=given.steps // 10,
    global_batch_size=32,
    decoding="greedy",
    settings={"makd.logits": 10, "scoring.limit": given.limit},
    **limits,
)
for name in ("teacher", "untrained", "student"):
    print(f"ROUGE-L of the {name}: {result.metrics[name]['rougeL']['test']:.1f}")

# %% The student is a folder with its tokenizer, which plain transformers loads
folder = result.folder / "student"
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
question = examples_of(given.test)[0]
asked = resolve_prompt(None, [tokenizer])  # as it was trained, which its tokenizer keeps
text = render_prompt(question, tokenizer, asked)
starts = not is_chat(question, asked)  # a chat template writes the start token itself
prompt = tokenizer(text, add_special_tokens=starts, return_tensors="pt")
answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
print(f"{text}\n{tokenizer.decode(answer, skip_special_tokens=True)}\n(right is {' or '.join(question.outputs)})")
