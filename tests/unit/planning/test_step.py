"""The step of a run traced without weights, for architectures that are unlike Llama."""

import pytest
import torch
from tiny import tiny_config
from torch import nn

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.methods import METHODS
from llmdistill.models.load import build_meta
from llmdistill.planning.step import ForecastModels, StepTrace, trace_step
from llmdistill.students.install import install
from llmdistill.students.sizes import plan_factors

WORDS, ROWS, TOKENS = 5000, 2, 16


def trace_of(name: str, **changes) -> StepTrace:
    config = tiny_config(name, vocab_size=WORDS, **changes)
    teacher, student = build_meta(config, "lm_head"), build_meta(config, "lm_head")
    install(student, plan_factors(student, FactorizeConfig(rank=4)))
    entry = METHODS["kd"]
    method = entry.build(entry.settings(), config, config)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    batch = Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).with_positions(shift=method.shift)
    models = ForecastModels(student=student, projectors=nn.ModuleDict(), teacher=teacher, method=method)
    return trace_step(models, batch.to("meta"), checkpointing=False)


def peak(trace: StepTrace) -> float:
    return max(sum(moment.live.values()) for moment in trace.moments)


def test_logits_with_a_factor_take_no_memory_of_their_own() -> None:
    plain, scaled = trace_of("granite", logits_scaling=1.0), trace_of("granite", logits_scaling=8.0)
    assert peak(scaled) == pytest.approx(peak(plain), abs=1000)


@pytest.mark.parametrize("name", ["phi", "mpnet"])
def test_masks_that_transformers_makes_can_be_traced(name: str) -> None:
    assert peak(trace_of(name)) > 0


def test_every_expert_has_its_share_of_the_tokens() -> None:
    one, all_of_them = (trace_of("qwen3_moe", num_experts_per_tok=count) for count in (1, 4))
    # two layers of gate, up and down of rank 4, for three more experts a token, forward and twice as much backward
    factors = 4 * (16 + 24) + 4 * (12 + 16)
    more = 2 * 3 * 2 * factors * 3 * ROWS * TOKENS
    assert all_of_them.student.flops - one.student.flops == pytest.approx(more, rel=0.01)
