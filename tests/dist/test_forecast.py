"""The forecast of memory beside what a real DeepSpeed engine and the trainer allocate on gloo ranks.

The file is also the program of a rank: it measures every setting and forecasts it.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig, TrainConfig
from llmdistill.factorize.install import install
from llmdistill.factorize.plan import plan as plan_factorization
from llmdistill.methods import METHODS, Method, build_method
from llmdistill.models.forward import TappedModel
from llmdistill.models.load import build_meta, build_random
from llmdistill.models.taps import Recorder
from llmdistill.run.forecast.memory import Sizes, Zero, peak_memory
from llmdistill.run.forecast.step import Models, model_bytes, trace_step, trained_parameters
from llmdistill.run.log import Stopwatch
from llmdistill.run.trainer import Trainer
from llmdistill.runtime.distributed import TORCH_DTYPES, World, init_distributed, shut_down
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.engine import add_projectors, build_engine, split_batch, student_ds_config
from llmdistill.runtime.terminal import quiet_libraries

pytestmark = pytest.mark.dist

WORDS, WIDTH, DEPTH = 512, 128, 4  # few words: the LM head takes more rows at once on a GPU than on a CPU
BUCKET = 100_000
"""Elements of a bucket, fewer than shipped, so that the buckets are not all of the memory."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    family: str = "llama"
    method: str = "makd"
    factorized: bool = True
    stage: int = 2
    micro_batch_size: int = 4
    length: int = 128
    checkpointing: bool = False
    dtype: str = "fp32"
    accumulation_steps: int = 1


SETTINGS = [
    Setting(),
    Setting(stage=1, accumulation_steps=2),
    Setting(accumulation_steps=2, micro_batch_size=2),
    Setting(stage=3),
    Setting(stage=3, dtype="bf16", accumulation_steps=2),
    Setting(micro_batch_size=1, length=16, dtype="bf16"),  # most is needed in the optimizer's step
    Setting(micro_batch_size=8, checkpointing=True),
    Setting(stage=3, length=256, checkpointing=True),
    Setting(family="gpt2", factorized=False, method="kd", length=256),
    Setting(family="bert"),
    Setting(family="bert", factorized=False, method="minilm", micro_batch_size=8, checkpointing=True),
]


def config_of(setting: Setting) -> PreTrainedConfig:
    # Attention dropout would make a CPU, unlike a GPU, take the attention apart.
    if setting.family == "llama":
        return LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=DEPTH,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    if setting.family == "gpt2":
        return GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=DEPTH, n_head=4, attn_pdrop=0.0)
    return BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        attention_probs_dropout_prob=0.0,
    )


def models_of(setting: Setting, config: PreTrainedConfig, *, meta: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The teacher and the student of a setting, with weights or on the meta device."""
    made = [build_meta(config, "lm_head") if meta else build_random(config, "lm_head", seed=0) for _ in range(2)]
    if setting.factorized:
        planned = plan_factorization(build_meta(config, "lm_head"), FactorizeConfig(target_params="70%"))
        install(made[1], planned)
    teacher, student = (each.to(TORCH_DTYPES[setting.dtype]) for each in made)
    return teacher.eval().requires_grad_(False), student


def batch_of(setting: Setting) -> Batch:
    ids = torch.randint(5, WORDS, (setting.micro_batch_size, setting.length))
    labels = ids.clone()
    if setting.family == "bert":
        labels[:, setting.length // 4 :] = -100
    return Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)


def ds_config_of(setting: Setting, world_size: int) -> tuple[dict[str, Any], TrainConfig]:
    size = setting.micro_batch_size * world_size * setting.accumulation_steps
    train = TrainConfig(
        global_batch_size=size,
        micro_batch_size=setting.micro_batch_size,
        activation_checkpointing=setting.checkpointing,
        dtype=setting.dtype,  # type: ignore[arg-type]
    )
    name = f"zero{setting.stage}"
    shipped = read_ds_config(name)
    del shipped["tensorboard"]
    shipped["zero_optimization"] |= {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if setting.stage == 3:  # otherwise every matrix of these models would be small enough to stay whole
        shipped["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    split = split_batch(size, setting.micro_batch_size, world_size)
    return student_ds_config(shipped, name, train, split, output_dir="none"), train


def method_of(setting: Setting, config: PreTrainedConfig) -> Method:
    kind = METHODS[setting.method].settings
    own = {} if kind is None else {setting.method: kind()}
    return build_method([setting.method], own, config, config)


def measure(setting: Setting, world: World) -> dict[str, int]:
    """The bytes of all tensors between two steps, and the most that the allocator gave out in a step above them."""
    before = storages()
    config = config_of(setting)
    teacher, student = models_of(setting, config, meta=False)
    method = method_of(setting, config)
    ds_config, train = ds_config_of(setting, world.size)
    projectors = add_projectors(student, method.projections, seed=0)
    engine = build_engine(student, ds_config, train)
    trainer = Trainer(
        engine=engine,
        student=TappedModel(engine, Recorder(engine.module, method.student_taps, projectors)),
        teacher=TappedModel(teacher, Recorder(teacher, method.teacher_taps)) if method.needs_teacher else None,
        method=method,
        loader=None,  # type: ignore[arg-type]
        settings=train,
        seed=0,
        folder=Path(),
        world=world,
    )
    clock = Stopwatch(world.device)
    batches = [batch_of(setting)] * setting.accumulation_steps
    trainer.train_step(batches, clock)  # the first step makes the optimizer's state
    gc.collect()
    resident = sum(size for key, size in storages().items() if key not in before)
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiler:
        trainer.train_step(batches, clock)
    return {"resident": resident, "peak": allocated(profiler)}


def storages() -> dict[int, int]:
    """Address -> bytes of the storages of all tensors."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    found = [each.untyped_storage() for each in tensors if each.device.type == "cpu"]
    return {each.data_ptr(): each.nbytes() for each in found if each.nbytes()}


def allocated(profiler: Any) -> int:
    """The most bytes that were allocated at the same time."""
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def forecast(setting: Setting, ranks: int) -> dict[str, float]:
    """The same memory by part, from shapes alone."""
    config = config_of(setting)
    teacher, student = models_of(setting, config, meta=True)
    method = method_of(setting, config)
    ds_config, _ = ds_config_of(setting, ranks)
    with torch.device("meta"):
        projectors = add_projectors(student, method.projections, seed=0)
    models = Models(
        student=student, projectors=projectors, teacher=teacher if method.needs_teacher else None, method=method
    )
    batch = batch_of(setting).with_label_rows(shift=method.shift).to("meta")
    trace = trace_step(models, batch, checkpointing=setting.checkpointing)
    sizes = Sizes.of(student, teacher)
    zero = Zero.of(ds_config, accumulation_steps=setting.accumulation_steps)
    return peak_memory(
        zero, sizes, "replicated", trace.moments, ranks=ranks, accumulation_steps=setting.accumulation_steps
    )


def main() -> None:
    world = init_distributed()
    quiet_libraries()
    torch.set_num_threads(1)  # the buffers of the blocks grow with the threads
    rows = []
    for setting in SETTINGS:
        measured = measure(setting, world)
        if world.is_main:
            rows.append({"setting": repr(setting), "stage": setting.stage, **measured, "parts": forecast(setting, 2)})
    if world.is_main:
        Path(sys.argv[-1]).write_text(json.dumps(rows), encoding="utf-8")
    shut_down()


@pytest.fixture(scope="module")
def rows(rank_server, tmp_path_factory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("forecast") / "rows.json"
    done = rank_server.run([str(file)], ranks=2, program=__file__)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    assert len(found) == len(SETTINGS)
    return found


def test_resident_tensors_are_those_of_the_engine(rows):
    for row in rows:
        # Under ZeRO-3 the gradients' memory and the bucket stay between steps.
        kept = ("teacher", "student", "optimizer", *(("gradients", "buckets") if row["stage"] == 3 else ()))
        assert sum(row["parts"][part] for part in kept) == pytest.approx(row["resident"], rel=0.03), row["setting"]


def test_peak_is_within_15_percent_of_what_the_allocator_gives(rows):
    for row in rows:
        above = sum(row["parts"].values()) - row["resident"]
        assert 0.85 < above / row["peak"] < 1.15, (row["setting"], above, row["peak"])


if __name__ == "__main__":
    main()
