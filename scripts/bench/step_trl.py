"""A row of bench_step --peers: the same step by TRL's GKD trainer, in an environment that has trl."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
from datasets import Dataset
from step_setting import Setting
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl.experimental.gkd import GKDConfig, GKDTrainer


def trl_gkd(setting: Setting, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    """TRL's GKD trainer off-policy (lmbda 0), KL(T‖S): its training_step with our optimizer."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")
    on_gpu = setting.ids.device.type == "cuda"
    arguments = GKDConfig(
        output_dir=tempfile.mkdtemp(),
        lmbda=0.0,
        beta=0.0,
        temperature=1.0,
        bf16=False,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        report_to=[],
        max_grad_norm=0.0,
    )
    trainer = GKDTrainer(
        model=setting.student,
        teacher_model=setting.teacher,
        args=arguments,
        train_dataset=Dataset.from_list([{"messages": []}]),  # it wants one, but its step is given a batch
        data_collator=lambda rows: rows,
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1  # its own loop would have set that
    inputs = {"input_ids": setting.ids, "attention_mask": torch.ones_like(setting.ids), "labels": setting.labels}

    def step() -> float:
        loss = trainer.training_step(setting.student, dict(inputs))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step
