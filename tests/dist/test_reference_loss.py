"""The perplexity of the references where two ranks share them, with a whole model and with one in shards."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROGRAM = """
import json, sys
from pathlib import Path

import torch

from llmdistill.config import GenerationConfig
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.runtime.distributed import init_distributed
from llmdistill.tasks.answers import score_sets
from llmdistill.teacher.live import load_teacher

folder, sharding = Path(sys.argv[-2]), sys.argv[-1]
pairs = json.loads((folder / "pairs.json").read_text())
world = init_distributed()
zero = {"stage3_param_persistence_threshold": 0} if sharding == "zero3" else None
source = str(folder / "model")
model = load_teacher(source, dtype=torch.float32, sharding=sharding, zero=zero, world=world).model
scores = score_sets(
    model,
    load_tokenizer(source),
    {name: [Example("", "", (answer,), raw_prompt=prompt) for prompt, answer in rows] for name, rows in pairs.items()},
    GenerationConfig(decoding="greedy", batch_size=2),
    Limits(max_prompt_length=24, max_length=26),
    world=world,
    synced=sharding == "zero3",
)
(folder / f"{sharding}-{world.rank}.json").write_text(json.dumps(scores))
torch.distributed.barrier()
"""
PAIRS = {
    # The shortest examples come first and two make a batch: rank 0 has one example of few tokens more than rank 1.
    "odd": [[f"Town {n}", " lies by a lake" * n] for n in (0, 1, 2, 3, 4)],
    # Rank 1 has no example at all.
    "one": [["Say:", " so"]],
}


def by_transformers(folder, pairs):
    """The mean loss of a token and the number of tokens, by the loss of the model itself, an example at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for prompt, answer in pairs:
        start = tokenizer(prompt)["input_ids"]
        end = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id][: 26 - len(start)]
        labels = torch.tensor([[-100] * len(start) + end])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([start + end]), labels=labels).loss
        total, count = total + float(loss) * len(end), count + len(end)
    return total / count, count


@pytest.mark.parametrize("sharding", ["replicated", "zero3"])
def test_every_token_counts_once_whichever_rank_has_it(launch, tiny_teacher, tmp_path, sharding):
    (tmp_path / "model").symlink_to(tiny_teacher)
    (tmp_path / "pairs.json").write_text(json.dumps(PAIRS))
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    launch(str(tmp_path), sharding, ranks=2, program=str(tmp_path / "program.py"))
    one, two = (json.loads((tmp_path / f"{sharding}-{rank}.json").read_text()) for rank in (0, 1))
    for name, pairs in PAIRS.items():
        loss, count = by_transformers(tiny_teacher, pairs)
        assert one[name]["reference_tokens"] == two[name]["reference_tokens"] == count
        assert one[name]["reference_loss"] == two[name]["reference_loss"] == pytest.approx(loss, rel=1e-5)
        assert one[name]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
