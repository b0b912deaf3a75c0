"""The perplexity of the references where two ranks share them, with a whole model and with one in shards.

The file is also the program of a rank.
"""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmdistill.config import GenerationConfig
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.runtime.distributed import init_distributed
from llmdistill.tasks.answers import score_sets
from llmdistill.teacher.live import load_teacher

PAIRS = {
    # The shortest examples come first and two make a batch: rank 0 has one example of few tokens more than rank 1.
    "odd": [(f"Town {n}", " lies by a lake" * n) for n in (0, 1, 2, 3, 4)],
    # Rank 1 has no example at all.
    "one": [("Say:", " so")],
}
SHARDINGS = ("replicated", "zero3")


def main():
    folder, source = Path(sys.argv[-2]), sys.argv[-1]
    world, zero = init_distributed(), {"stage3_param_persistence_threshold": 0}
    sets = {name: [Example("", "", (answer,), raw_prompt=p) for p, answer in rows] for name, rows in PAIRS.items()}
    settings, limits = GenerationConfig(decoding="greedy", batch_size=2), Limits(max_prompt_length=24, max_length=26)
    for sharding in SHARDINGS:
        synced = sharding == "zero3"
        given = {"dtype": torch.float32, "sharding": sharding, "zero": zero if synced else None, "world": world}
        model, tokenizer = load_teacher(source, **given).model, load_tokenizer(source)
        scores = score_sets(model, tokenizer, sets, settings, limits, world=world, synced=synced)
        (folder / f"{sharding}-{world.rank}.json").write_text(json.dumps(scores))
    torch.distributed.barrier()


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


def test_every_token_counts_once_whichever_rank_has_it(launch, tiny_teacher, tmp_path):
    launch(str(tmp_path), str(tiny_teacher), ranks=2, program=__file__)
    for name, pairs in PAIRS.items():
        loss, count = by_transformers(tiny_teacher, pairs)
        for file in (tmp_path / f"{sharding}-{rank}.json" for sharding in SHARDINGS for rank in (0, 1)):
            found = json.loads(file.read_text())[name]
            assert found["reference_tokens"] == count
            assert found["reference_loss"] == pytest.approx(loss, rel=1e-5)
            assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


if __name__ == "__main__":
    main()
