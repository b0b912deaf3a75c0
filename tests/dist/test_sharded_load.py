"""Models loaded in shards: the values of a whole one, and no rank ever holds more than its share and one parameter.

The file is also the program of a rank.
"""

import gc
import json
import sys
import threading
import time
from pathlib import Path

import deepspeed
import pytest
import torch
from tiny import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from llmdistill.config import FactorizeConfig, StudentConfig
from llmdistill.models.load import load_model
from llmdistill.models.sharded_load import Sharding, load_sharded
from llmdistill.runtime.distributed import init_distributed
from llmdistill.students.convert import compress_folder


def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def main():
    folder, head, classes = Path(sys.argv[-3]), sys.argv[-2], int(sys.argv[-1])
    world = init_distributed()
    config = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    sharding = Sharding(config)
    load_sharded(folder / "tiny", sharding=sharding, dtype=torch.float32)  # what is only made once is no part of it
    gc.collect()
    before = anonymous()
    seen, over = [before], threading.Event()

    def watch():
        while not over.is_set():
            seen.append(anonymous())
            time.sleep(0.002)

    named = {"dtype": torch.float32, "head": head, "new_head": True, "num_classes": classes or None}
    threading.Thread(target=watch, daemon=True).start()
    torch.manual_seed(5)
    model = load_sharded(folder, sharding=sharding, **named)
    over.set()
    after = anonymous()
    torch.manual_seed(5)
    whole = load_model(folder, **named)
    state, size = dict(whole.named_parameters()), sum(4 * each.numel() for each in whole.parameters())
    assert list(state) == [name for name, _ in model.named_parameters()]
    shards = sum(4 * each.ds_tensor.numel() for each in model.parameters())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        assert all(torch.equal(each, state[name]) for name, each in model.named_parameters())
    buffers = dict(whole.named_buffers())
    assert all(torch.equal(each, buffers[name]) for name, each in model.named_buffers())
    assert model.config.to_dict() == whole.config.to_dict()
    assert not model.training
    engine, *_ = deepspeed.initialize(model=model, config=config)
    ids = torch.arange(5, 17).view(2, 6)
    with torch.no_grad():
        assert torch.equal(engine(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)
    figures = {"shards": shards, "resident": after - before, "peak": max(seen) - before}
    told = {name: figure / size for name, figure in figures.items()} | {"size": size}
    (folder / f"memory-{world.rank}.json").write_text(json.dumps(told))


def llama(folder, width):
    torch.manual_seed(0)
    sizes = {"vocab_size": 16 * width, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)


@pytest.mark.parametrize("case", [pytest.param("pivoted", marks=pytest.mark.slow), "pieces", "a new classifier"])
def test_shards_are_those_of_the_whole_model(launch, tmp_path, case):
    folder = tmp_path / "model"
    llama(tmp_path / "dense", 512)
    if case == "pivoted":
        compress_folder(tmp_path / "dense", folder, StudentConfig(factorize=FactorizeConfig(rank=192, form="pivoted")))
    elif case == "pieces":
        load_model(tmp_path / "dense", dtype=torch.float32).save_pretrained(folder, max_shard_size="20MB")
        assert len(list(folder.glob("*.safetensors"))) > 3
    else:
        tiny_model("bert").save_pretrained(folder)
    llama(folder / "tiny", 32)
    head = ("sequence", "3") if case == "a new classifier" else ("lm_head", "0")
    launch(str(folder), *head, ranks=2, program=__file__)
    for rank in (0, 1):
        told = json.loads((folder / f"memory-{rank}.json").read_text())
        assert told["shards"] <= 0.51
        if told["size"] > 20e6:  # the rest of the process does not matter beside it
            assert told["resident"] <= 0.55
            assert told["peak"] <= 0.6


def test_a_classifier_of_another_size_is_refused_as_without_shards(launch, tmp_path):
    tiny_model("bert", head="sequence", num_labels=2).save_pretrained(tmp_path)
    llama(tmp_path / "tiny", 32)
    done = launch(str(tmp_path), "sequence", "3", ranks=2, program=__file__, code=1)
    assert "in load_sharded" in done.stderr, "it is refused while it is loaded in shards, not later"
    assert "cannot be loaded" in done.stderr


if __name__ == "__main__":
    main()
