"""A teacher in shards over all ranks, or over those of each node, which then gather nothing from other nodes."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# Four ranks on two nodes: the ranks take the names of their hosts from their number.
PROGRAM = """
import json, os, socket, sys
from pathlib import Path

rank = int(os.environ["RANK"])
socket.gethostname = lambda: f"host{rank // 2}"

import deepspeed
import torch

from llmdistill.models.load import load_model
from llmdistill.models.sharded import gathered as kept_whole
from llmdistill.runtime.distributed import init_distributed
from llmdistill.teacher.live import load_teacher

folder, sharding = Path(sys.argv[-2]), sys.argv[-1]
world = init_distributed()
settings = {"stage3_prefetch_bucket_size": 12345, "offload_param": {"device": "cpu"}}
settings["stage3_param_persistence_threshold"] = 0  # without it DeepSpeed keeps parameters as small as these gathered
teacher = load_teacher(str(folder), dtype=torch.float32, sharding=sharding, zero=settings, world=world)
whole = load_model(folder, dtype=torch.float32)
rows = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(rank))
with torch.no_grad():
    for _ in range(3):
        assert torch.equal(teacher.forward(rows, use_cache=False).logits, whole(rows, use_cache=False).logits)
# The losses read the LM head after each forward pass: it is there, and no one gathers it again.
gathered = {name for name, each in teacher.model.named_parameters() if each.ds_status.name == "AVAILABLE"}
assert gathered == {"lm_head.weight"}, gathered
deepspeed.zero.GatheredParameters = None
with kept_whole(teacher.model.lm_head.weight):
    assert torch.equal(teacher.model.lm_head.weight, whole.lm_head.weight)
assert teacher.forward.zero_prefetch_bucket_size() == 12345
assert teacher.forward.zero_offload_param().device == "cpu"
size = sum(each.numel() for each in whole.parameters())
shards = sum(each.ds_tensor.numel() for each in teacher.model.parameters())
ranks = torch.distributed.get_process_group_ranks
groups = {tuple(ranks(each.ds_process_group)) for each in teacher.model.parameters()}
told = {"share": shards / size, "groups": sorted(groups)}
(folder / f"{sharding}-{rank}.json").write_text(json.dumps(told))
torch.distributed.barrier()
"""


@pytest.mark.parametrize(("sharding", "groups"), [("node", [[0, 1], [2, 3]]), ("zero3", [[0, 1, 2, 3]])])
def test_each_rank_has_its_share_and_the_whole_s_logits(launch, tmp_path, sharding, groups):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    launch(str(tmp_path), sharding, ranks=4, program=str(tmp_path / "program.py"))
    for group in groups:
        for rank in group:
            told = json.loads((tmp_path / f"{sharding}-{rank}.json").read_text())
            assert told["share"] == pytest.approx(1 / len(group), abs=0.01)
            assert told["groups"] == [group]
