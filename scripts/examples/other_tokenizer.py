"""A student with a tokenizer of its own that starts in its teacher's layers.

    python scripts/examples/other_tokenizer.py                                 # 512 tokens, learned from embedded:train
    python scripts/examples/other_tokenizer.py --teacher DIR --tokenizer gpt2 --output other-tokens

The student is a copy of the teacher with other tokens: the embedding of a token that the teacher knows is the
teacher's, that of another the mean of the teacher's embeddings of its text. `llmdistill train --method kd
--student.model other-tokens` then distills between both tokenizers (docs/teachers.md).
"""

# %% The models and the tokenizer
import argparse
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from llmdistill.data.sources import examples_of
from llmdistill.embedded import locate

parser = argparse.ArgumentParser(description="Give a copy of a decoder another tokenizer.", allow_abbrev=False)
parser.add_argument("--teacher", default="embedded:teacher", help="a folder, or a name on the hub")
parser.add_argument("--tokenizer", help="the student's: a folder, or a name on the hub; default: learned from --texts")
parser.add_argument(
    "--texts", default="embedded:train", help="rows of instructions that a new tokenizer is learned from"
)
parser.add_argument("--tokens", type=int, default=512, help="the size of a new tokenizer's vocabulary")
parser.add_argument("--output", default="other-tokens", type=Path, help="the student's folder")
given = parser.parse_args([] if "ipykernel" in sys.modules else None)  # a notebook has no command line

teacher = str(locate(given.teacher))
model, old = AutoModelForCausalLM.from_pretrained(teacher), AutoTokenizer.from_pretrained(teacher)
if given.tokenizer:
    new = AutoTokenizer.from_pretrained(given.tokenizer)
else:
    texts = [f"{row.instruction} {row.input} {row.outputs[0]}" for row in examples_of(given.texts)]
    new = old.train_new_from_iterator(texts, given.tokens)
new.pad_token = new.pad_token or new.eos_token

# %% The student's embedding: a token takes the teacher's vector of the same text, or the mean of several
table = model.get_input_embeddings().weight.detach().clone()
known = old.get_vocab() | {new.eos_token: old.eos_token_id}
model.resize_token_embeddings(len(new), mean_resizing=False)
for token, index in new.get_vocab().items():
    same = [known[token]] if token in known else old(new.decode([index]), add_special_tokens=False).input_ids
    model.get_input_embeddings().weight.data[index] = table[same].mean(0)
for config in (model.config, model.generation_config):
    config.eos_token_id, config.pad_token_id = new.eos_token_id, new.pad_token_id

# %% A folder, which is the student of a run
model.save_pretrained(given.output)
new.save_pretrained(given.output)
print(f"{given.output}: {len(new):,} tokens in place of the teacher's {len(old):,}")
