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
import math
from functools import partial
from pathlib import Path

import torch
from embedded_world import corpus
from embedded_world.questions import write_questions
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from tqdm import trange
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import llmdistill
from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.collate import Encoded, collate
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.prompts import render_prompt
from llmdistill.data.sampler import Share, TrainLoader
from llmdistill.embedded import FOLDER
from llmdistill.files import write_json

VOCAB_SIZE = 1024
LIMITS = Limits()
SEED, STEPS, BATCH_SIZE, PEAK = 1, 2400, 32, 3e-3
"""Of the teacher's training; the last is the peak of the learning rate."""
TEACHER = FOLDER / "teacher"
PAD, END = "<|pad|>", "<|end|>"


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
    examples = corpus.splits()["teacher"]
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
    share = Share(seed=SEED, global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE, bucket_steps=8)
    loader = TrainLoader(items, share, partial(collate, pad_token_id=pad))
    warmup, steps = 100, trange(1, STEPS + 1, unit="step")
    model.train()
    for step in steps:
        factor = min(1.0, step / warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        optimizer.param_groups[0]["lr"] = PEAK * factor
        (batch,) = loader.micro_batches(step - 1)
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.set_postfix(loss=f"{loss.item():.4f}", refresh=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="store_true", help="only write the corpus")
    parser.add_argument(
        "--questions", type=Path, metavar="DIR", help="only write questions, to DIR/squad1 and DIR/squad2"
    )
    asked = parser.parse_args()
    if asked.questions is not None:
        write_questions(asked.questions)
        return
    corpus.write(FOLDER / "data")
    if asked.data:
        return
    make_tokenizer(TEACHER)
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    model = new_teacher(end=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)
    data = encode(corpus.splits()["teacher"], tokenizer, LIMITS)
    print(f"{len(data.items):,} examples, {model.num_parameters():,} parameters", flush=True)
    train(model, data.items, tokenizer.pad_token_id)
    # The weights in bf16, half the size, under a configuration that loads them as fp32.
    model.bfloat16().save_pretrained(TEACHER)
    LlamaConfig.from_pretrained(TEACHER, dtype=torch.float32).save_pretrained(TEACHER)
    tests = {split: f"embedded:{split}" for split in corpus.TESTS}
    scored = llmdistill.evaluate(TEACHER, tests, decoding="greedy")
    scores = {split: round(each["rougeL"], 2) for split, each in scored.items()}
    print(scores)
    measure = "ROUGE-L F, greedy, maximum over references, x100"
    report = {"metric": measure, "scores": scores, "command": "python scripts/make/make_embedded.py"}
    write_json(TEACHER / "scores.json", report)


if __name__ == "__main__":
    main()
