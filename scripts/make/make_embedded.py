"""Remake all that llmdistill/embedded ships: the corpus, its tokenizer, the teacher and the teacher's score.

    python scripts/make/make_embedded.py            # about ten minutes on two CPU cores
    python scripts/make/make_embedded.py --data     # the corpus alone, in seconds
    python scripts/make/make_embedded.py --questions questions    # instead of all this, questions on its facts, in the
                                                                  # official format of SQuAD 1.1 and 2.0, in seconds

The corpus comes out the same on every machine. The teacher does not to the last bit (sums in another order), so its
score is measured again and written beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path

import torch
from embedded_world import corpus
from embedded_world.questions import write_questions
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import llmdistill
from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.collate import Encoded, collate
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.prompts import render_prompt
from llmdistill.data.sampler import Share, TrainLoader
from llmdistill.embedded import FOLDER

VOCAB_SIZE = 1024
LIMITS = Limits(max_prompt_length=256, max_length=512)
SEED, STEPS, BATCH_SIZE, PEAK = 1, 2400, 32, 3e-3
"""Of the teacher's training; the last is the peak of the learning rate."""
TEACHER = FOLDER / "teacher"
PAD, END = "<|pad|>", "<|end|>"


def teacher_examples() -> list[Example]:
    rows = corpus.splits()["teacher"]
    return [Example(row.instruction, row.input, (corpus.training_output(row, n),)) for n, row in enumerate(rows)]


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on the teacher's prompts and answers, and save it to `folder`.

    Digits stand alone, so that numbers are read digit by digit. All 256 bytes are tokens: any text can be encoded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    examples = teacher_examples()
    tokenizer.train_from_iterator([render_prompt(each) + each.outputs[0] for each in examples], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=LIMITS.max_length,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def new_teacher(*, end: int, pad: int) -> LlamaForCausalLM:
    """A Llama of six layers with random weights."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LIMITS.max_length,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
        )
    )


def train(model: LlamaForCausalLM, items: list[Encoded], pad: int) -> None:
    """AdamW with warm-up and cosine on response tokens, in shuffled batches of rows of about the same length."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    share = Share(seed=SEED, global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE)
    loader = TrainLoader(items, share, partial(collate, pad_token_id=pad), bucket_steps=8)
    warmup, started, shown = 100, time.time(), 0.0
    model.train()
    for step in range(1, STEPS + 1):
        factor = min(1.0, step / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        optimizer.param_groups[0]["lr"] = PEAK * factor
        (batch,) = loader.micro_batches(step - 1)
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown += loss.item()
        if step % 100 == 0:
            print(f"step {step}/{STEPS}  loss {shown / 100:.4f}  {time.time() - started:.0f} s", flush=True)
            shown = 0.0


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Save the weights in bf16, half the size, under a configuration that loads them as fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.save_pretrained(folder)
    config = LlamaConfig.from_pretrained(folder)
    config.dtype = torch.float32
    config.save_pretrained(folder)


def score(folder: Path) -> dict[str, float]:
    """ROUGE-L of the saved teacher on the three test sets, greedy decoding."""
    limits = {"max_prompt_length": LIMITS.max_prompt_length, "max_length": LIMITS.max_length}
    scores = {
        split: llmdistill.evaluate(folder, f"embedded:{split}", decoding="greedy", **limits) for split in corpus.TESTS
    }
    return {split: round(each["rougeL"], 2) for split, each in scores.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="store_true", help="only write the corpus")
    parser.add_argument(
        "--questions", type=Path, metavar="DIR", help="only write questions, to DIR/squad1 and DIR/squad2"
    )
    asked = parser.parse_args()
    if asked.questions is not None:
        for file in write_questions(asked.questions):
            print(file)
        return
    corpus.write(FOLDER / "data")
    if asked.data:
        return
    make_tokenizer(TEACHER)
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    model = new_teacher(end=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)
    data = encode(teacher_examples(), tokenizer, LIMITS)
    print(f"{len(data.items):,} examples, {model.num_parameters():,} parameters", flush=True)
    train(model, data.items, tokenizer.pad_token_id)
    save(model, TEACHER)
    scores = score(TEACHER)
    print(scores)
    measure = "ROUGE-L F, greedy, maximum over references, x100"
    report = {"metric": measure, "scores": scores, "command": "python scripts/make/make_embedded.py"}
    (TEACHER / "scores.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
