"""The forecast of memory beside what a real DeepSpeed engine and the trainer allocate on gloo ranks.

The file is also the program of a rank: it measures every setting and forecasts it.
"""

import json
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import BertConfig, GPT2Config

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "scripts" / "bench"), str(TESTS)]  # of a rank

from small_training import Setting, batch_of, forecast, measure  # noqa: E402

from llmdistill.config.teacher import CacheConfig  # noqa: E402
from llmdistill.runtime.distributed import World, init_distributed, shut_down  # noqa: E402
from llmdistill.runtime.terminal import quiet_libraries  # noqa: E402
from llmdistill.teachers.cache.folder import CacheFolder  # noqa: E402
from llmdistill.teachers.cache.shards import Job, finish, write_by_teacher  # noqa: E402
from llmdistill.teachers.cache.teacher import CachedTeacher  # noqa: E402
from llmdistill.teachers.output_rows import Request  # noqa: E402

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
# Attention dropout would make a CPU, unlike a GPU, take the attention apart.
GPT2 = GPT2Config(**SIZES, attn_pdrop=0.0)
BERT = BertConfig(**SIZES, intermediate_size=512, attention_probs_dropout_prob=0.0)
SETTINGS: list[tuple[Setting, Any]] = [
    (Setting(), None),
    (Setting(stage=1, accumulation_steps=2), None),
    (Setting(stage=3, dtype="bf16", accumulation_steps=2), None),
    (Setting(micro_batch_size=1, length=16, dtype="bf16"), None),  # most is needed in the optimizer's step
    (Setting(stage=3, length=256, checkpointing=True), None),
    (Setting(config=GPT2, factorized=False, method="kd", length=256), "hidden_states"),
    (Setting(stage=3, method="kd"), "top_k"),
    (Setting(config=BERT), None),
    (Setting(config=BERT, factorized=False, method="minilm", micro_batch_size=8, checkpointing=True), None),
]
"""And what a cache holds that is read in place of the teacher's pass."""


def cached(setting: Setting, content: Any, folder: Path, live: Any, method: Any) -> CachedTeacher:
    """The teacher's cache of the one batch, which is made in a folder of this rank."""
    settings, request, rows = CacheConfig(content=content), Request.of(method), range(setting.micro_batch_size)
    device = torch.device("cpu")
    with World(rank=0, size=1, device=device).entered():
        record = {"held": {**request.record(), "top_k": settings.stored_top_k}, "data": {}}
        given: Any = {"folder": folder, "settings": settings, "request": request, "record": record}
        given |= {"items": rows, "shards": [[list(rows)]], "collate": lambda _: batch_of(setting)}
        job = Job(**given, shift=method.shift, vocabulary=None)
        write_by_teacher(job, [0], live, sharded=False)
        live.remove()
        finish(job)
    return CachedTeacher(CacheFolder(folder), request, shift=method.shift, device=device)


def main() -> None:
    world = init_distributed()
    quiet_libraries()
    torch.set_num_threads(1)  # the buffers of the blocks grow with the threads
    rows = []
    for setting, content in SETTINGS:
        with TemporaryDirectory() as folder:
            taught_by = {} if content is None else {"taught_by": partial(cached, setting, content, Path(folder))}
            measured = measure(setting, **taught_by)
        parts = forecast(setting, 2, content)
        rows.append({"setting": str((setting, content)), "stage": setting.stage, **measured, "parts": parts})
    if world.is_main:
        Path(sys.argv[-1]).write_text(json.dumps(rows), encoding="utf-8")
    shut_down()


def test_memory_is_as_forecast(rank_server, tmp_path):
    """Resident tensors are those of the engine, and peaks within 15 % of what the allocator gives."""
    file = tmp_path / "rows.json"
    done = rank_server.run([str(file)], ranks=2, program=__file__)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert len(rows) == len(SETTINGS)
    for row in rows:
        # Under ZeRO-3 the gradients' memory and the bucket stay between steps.
        kept = ("teacher", "student", "optimizer", *(("gradients", "buckets") if row["stage"] == 3 else ()))
        assert sum(row["parts"][part] for part in kept) == pytest.approx(row["resident"], rel=0.03), row["setting"]
        above = sum(row["parts"].values()) - row["resident"]
        assert 0.85 < above / row["peak"] < 1.15, (row["setting"], above, row["peak"])


if __name__ == "__main__":
    main()
