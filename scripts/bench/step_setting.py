"""What a row of bench_step is made on: models with random weights, and a batch.

Dropout is off everywhere (as TRL's trainers have it), and weights are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedModel

if TYPE_CHECKING:  # TRL's row runs in an environment without the package
    from llmdistill.config import FactorizeConfig

IGNORE = -100


@dataclass(frozen=True)
class Setting:
    """What a step is made on; every row of a comparison builds the same."""

    teacher: Any
    student: Any
    ids: Tensor
    """(B, T)."""
    labels: Tensor
    """(B, T), -100 where none; all of them for an encoder, which has `targets`."""
    targets: Tensor | None
    """(B,) classes, of an encoder."""


def make_setting(row: dict[str, Any], device: torch.device) -> Setting:
    """The models and the batch. A share of the labels, at the end of each sequence, is the response."""
    torch.manual_seed(0)
    tokens, share = row["tokens"], row.get("labeled", 1.0)
    if row["task"] == "encoder":
        teacher, student = (bert(row, layers) for layers in (row["layers"], row["student_layers"]))
    else:
        teacher, student = (gpt2(row, layers) for layers in (row["layers"], row["student_layers"]))
    if "rank" in row:
        from llmdistill.config import FactorizeConfig

        low_rank(student, FactorizeConfig(rank=row["rank"]))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(teacher.config.vocab_size, (row["batch"], tokens), generator=generator)
    targets = torch.randint(2, (row["batch"],), generator=generator) if row["task"] == "encoder" else None
    labels = ids.masked_fill(torch.arange(tokens) < round((1 - share) * tokens), IGNORE)
    if targets is not None:
        labels = torch.full_like(ids, IGNORE)
        targets = targets.to(device)
    teacher.eval().requires_grad_(False)
    return Setting(teacher.to(device), student.to(device).train(), ids.to(device), labels.to(device), targets)


def gpt2(row: dict[str, Any], layers: int) -> PreTrainedModel:
    sizes = {"n_embd": row["width"], "n_head": row["heads"], "vocab_size": row["vocabulary"]}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    # The naive step reads the attention maps off both models, and only eager attention has them.
    attention = "eager" if row["way"] == "naive" else "sdpa"
    return GPT2LMHeadModel._from_config(GPT2Config(n_layer=layers, **sizes, **dropout), attn_implementation=attention)


def bert(row: dict[str, Any], layers: int) -> PreTrainedModel:
    sizes = {"hidden_size": row["width"], "intermediate_size": 4 * row["width"], "num_attention_heads": row["heads"]}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = BertConfig(num_hidden_layers=layers, vocab_size=row["vocabulary"], **sizes, **dropout)
    return BertForSequenceClassification._from_config(config, attn_implementation="sdpa")


def low_rank(model: PreTrainedModel, factorize: FactorizeConfig) -> None:
    """Factorized modules of random weights: a step costs the same whatever they hold."""
    from llmdistill.factorize.install import install
    from llmdistill.factorize.modules import LowRankLinear
    from llmdistill.factorize.sizes import plan

    install(model, plan(model, factorize))
    for module in model.modules():
        if isinstance(module, LowRankLinear):
            nn.init.normal_(module.A.weight, std=0.02)
            nn.init.normal_(
                module.B.weight, std=module.A.in_features**-0.5
            )  # the product is as large as a dense weight
