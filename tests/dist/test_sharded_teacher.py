"""A teacher in shards over all ranks, or over those of each node, which then gather nothing from other nodes.

The file is also the program of a rank. Four ranks on two nodes: the ranks take the names of their hosts from their
number.
"""

import json
import os
import socket
import sys
from pathlib import Path
from unittest.mock import patch

import deepspeed
import pytest
import torch
from tiny import tiny_model

from llmdistill.models.load import load_model
from llmdistill.models.sharded import gathered as kept_whole
from llmdistill.runtime.distributed import init_distributed
from llmdistill.teachers.live import load_teacher

GROUPS = {"node": [[0, 1], [2, 3]], "zero3": [[0, 1, 2, 3]]}


def main():
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[-1])
    socket.gethostname = lambda: f"host{rank // 2}"
    init_distributed()
    zero = {"stage3_prefetch_bucket_size": 12345, "offload_param": {"device": "cpu"}}
    zero["stage3_param_persistence_threshold"] = 0  # without it DeepSpeed keeps parameters as small as these gathered
    whole = load_model(folder, dtype=torch.float32)
    rows = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(rank))
    for sharding in GROUPS:
        teacher = load_teacher(str(folder), dtype=torch.float32, sharding=sharding, zero=zero)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(teacher.forward(rows, use_cache=False).logits, whole(rows, use_cache=False).logits)
        # The losses read the LM head after each forward pass: it is there, and no one gathers it again.
        gathered = {name for name, each in teacher.model.named_parameters() if each.ds_status.name == "AVAILABLE"}
        assert gathered == {"lm_head.weight"}, gathered
        with patch.object(deepspeed.zero, "GatheredParameters", None), kept_whole(teacher.model.lm_head.weight):
            assert torch.equal(teacher.model.lm_head.weight, whole.lm_head.weight)
        assert teacher.forward.zero_prefetch_bucket_size() == 12345
        assert teacher.forward.zero_offload_param().device == "cpu"
        parameters, size = list(teacher.model.parameters()), sum(each.numel() for each in whole.parameters())
        groups = {tuple(torch.distributed.get_process_group_ranks(each.ds_process_group)) for each in parameters}
        told = {"share": sum(each.ds_tensor.numel() for each in parameters) / size, "groups": sorted(groups)}
        (folder / f"{sharding}-{rank}.json").write_text(json.dumps(told))
    torch.distributed.barrier()


def test_each_rank_has_its_share_and_the_whole_s_logits(launch, tmp_path):
    tiny_model("llama", vocab_size=64, hidden_size=32, intermediate_size=64).save_pretrained(tmp_path)
    launch(str(tmp_path), ranks=4, program=__file__)
    for sharding, group in ((sharding, group) for sharding, groups in GROUPS.items() for group in groups):
        for rank in group:
            told = json.loads((tmp_path / f"{sharding}-{rank}.json").read_text())
            assert told["share"] == pytest.approx(1 / len(group), abs=0.01)
            assert told["groups"] == [group]


if __name__ == "__main__":
    main()
