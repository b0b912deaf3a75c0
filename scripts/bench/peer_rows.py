"""The rows of bench_step --peers: a step of KL(T‖S), by the package and by TRL's two trainers, where trl is installed.

All have the same models, prompts and optimizer. The answers are given, or with "on_policy" in the row the student
writes as many tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from benching import Work
from datasets import Dataset
from step_rows import IGNORE, Setting, make_setting, ours, plain_engine
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llmdistill.batch import Batch
from llmdistill.data.collate import Encoded, collate
from llmdistill.data.sampler import Share, TrainLoader
from llmdistill.training.own_answers import OnPolicyLoader, StudentWriter

END = 1
"""Ends an answer: of random weights nearly none does."""


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: {"task": "kl", "way": ours, gkd or distillation, "labeled": share, "on_policy": whether, and sizes}."""
    setting = make_setting(row, device)
    if row["way"] == "ours":
        return Work(ours(setting, row, batches=written(setting) if row["on_policy"] else None))
    return Work(trl_step(setting, row["way"], row["on_policy"]))


def prompts_and_answers(setting: Setting) -> tuple[list[list[int]], list[list[int]]]:
    """The first token of a sequence is always a part of its prompt, as nothing predicts it."""
    length = max(1, int((setting.labels[0] == IGNORE).sum()))
    return setting.ids[:, :length].tolist(), setting.ids[:, length:].tolist()


def written(setting: Setting) -> Callable[[int], list[Batch]]:
    """The package's batches with answers of the student, by step."""
    prompts, answers = prompts_and_answers(setting)
    items, size = [Encoded(*pair) for pair in zip(prompts, answers, strict=True)], len(prompts)
    share = Share(seed=0, global_batch_size=size, micro_batch_size=size)
    return OnPolicyLoader(
        TrainLoader(items, share, partial(collate, pad_token_id=END)),
        StudentWriter(setting.student, len(answers[0]), [END], pad_token_id=END, synced=False),
        on_policy=1.0,
        pad_token_id=END,
    ).micro_batches


def trl_step(setting: Setting, way: str, on_policy: bool) -> Callable[[], float]:
    """The training_step of one of TRL's trainers, with our optimizer. A text is the numbers of its tokens."""
    from trl import DistillationConfig, DistillationTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    prompts, answers = prompts_and_answers(setting)
    words = {"<end>" if number == END else str(number): number for number in range(setting.student.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict.fromkeys(("eos_token", "pad_token"), "<end>")  # no number, as it is looked for within words too
    plain: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False, "report_to": []}
    plain |= {"output_dir": tempfile.mkdtemp(), "use_cpu": setting.ids.device.type != "cuda"}
    plain |= {"beta": 0.0, "temperature": 1.0}
    given: dict[str, Any] = {"model": setting.student, "teacher_model": setting.teacher}
    given["processing_class"] = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    given["train_dataset"] = Dataset.from_list([{"prompt": "", "messages": []}])  # their steps are given batches
    trainer: Any
    inputs: Any
    if way == "gkd":  # makes the logits of all tokens
        arguments = GKDConfig(**plain, lmbda=float(on_policy), max_new_tokens=len(answers[0]))
        trainer = GKDTrainer(**given, args=arguments, data_collator=lambda rows: rows)
        ids, prompt_ids = setting.ids, torch.tensor(prompts, device=setting.ids.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": setting.labels}
        inputs |= {"prompts": prompt_ids, "prompt_attention_mask": torch.ones_like(prompt_ids)}
    else:  # takes the divergence in chunks, and has no answers but the student's
        trainer = DistillationTrainer(**given, args=DistillationConfig(**plain, max_completion_length=len(answers[0])))
        inputs = [{"prompt": " ".join(map(str, each))} for each in prompts]
        if not on_policy:
            trainer._generate_single_turn = lambda *_: answers
    trainer.current_gradient_accumulation_steps = 1  # its own loop would have set that
    engine = plain_engine(setting.student)

    def step() -> float:
        loss = trainer.training_step(setting.student, copy(inputs), None)  # None: the mean over the batch
        engine.step()
        return float(loss)

    return step
