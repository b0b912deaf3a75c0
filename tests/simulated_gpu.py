"""A GPU that is none: tensors in the CPU's memory that claim to be on another device, and refuse to meet others.

    python tests/simulated_gpu.py    # JSON: the result of each piece of work, there and on a CPU, and its waits

What a GPU refuses is refused here: an operation on tensors of two devices. Where the host would wait for a GPU, because
it asks for a value or for a size that depends on values, or waits for a copy, that is counted, with the lines that ask.
Kernels, speed and memory are not simulated. The backend is registered for the whole process, so this is a process of
its own.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts/bench"), str(ROOT / "tests")]

torch.ones(1, requires_grad=True).sum().backward()  # autograd starts its threads before it knows of the device
_setup_privateuseone_for_python_backend("simgpu")  # type: ignore[no-untyped-call]
torch._C._set_multithreading_enabled(False)

import bench_host  # noqa: E402
import step_rows  # noqa: E402
from plain_engine import PlainEngine  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel  # noqa: E402

import llmdistill  # noqa: E402
from llmdistill.batch import Batch  # noqa: E402
from llmdistill.config import FactorizeConfig  # noqa: E402
from llmdistill.embedded import locate  # noqa: E402
from llmdistill.generation import row_draws  # noqa: E402
from llmdistill.generation.decode import Decoding, generate_passes  # noqa: E402
from llmdistill.methods import build_method  # noqa: E402
from llmdistill.methods.kd import KdConfig  # noqa: E402
from llmdistill.objective import TOKENS  # noqa: E402
from llmdistill.runtime.distributed import World  # noqa: E402
from llmdistill.step.tap_models import tap_student, tap_teacher  # noqa: E402
from llmdistill.students.start import sampled  # noqa: E402
from llmdistill.students.start.cuts import divergences, predict_losses  # noqa: E402
from llmdistill.students.start.moments import measure_moments  # noqa: E402
from llmdistill.students.start.weighted import weighted_svd  # noqa: E402
from llmdistill.students.start.weighted_factors import WeightedFactors  # noqa: E402
from llmdistill.tasks.distance import Distance, compare_rows, read_rows  # noqa: E402
from llmdistill.tasks.reference_loss import label_loss  # noqa: E402
from llmdistill.teachers.few_bits import round_teacher  # noqa: E402
from llmdistill.teachers.several import TeachersOfRows  # noqa: E402

GPU = torch.device("simgpu:0")
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
ASKS = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select}
"""Operations whose result, or its size, the host must know."""

INDEXED = {aten.index, aten.index_put, aten.index_put_}

waits: Counter[str] = Counter()
"""How often the host would have waited, by the lines of this package that ask."""


class OnGpu(Tensor):
    """A tensor that claims to be on the GPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> OnGpu:
        self: OnGpu = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=GPU, requires_grad=requires_grad,
        )  # fmt: skip
        self.inner = inner
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        count_wait()
        return self.inner.tolist()


class Simulated(TorchDispatchMode):
    """Within this block there is the GPU, also for operations that only name it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operate(func, args, kwargs or {})


def count_wait() -> None:
    lines = [
        f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if frame.filename.startswith(str(ROOT / "llmdistill"))
    ]
    waits[" < ".join(lines[:-4:-1])] += 1


def operate(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    on_gpu = [each for each in tensors if isinstance(each, OnGpu)]
    named = kwargs.get("device")
    to_gpu = bool(on_gpu) if named is None else torch.device(named).type == GPU.type
    if not (on_gpu or to_gpu):
        return func(*args, **kwargs)
    packet = func.overloadpacket
    if on_gpu and func not in COPIES:
        # A number on the CPU is passed with the launch, and indices are copied.
        others = tensors if packet not in INDEXED else [args[0], *args[2:3]]
        for each in others:
            if not isinstance(each, OnGpu) and each.dim() > 0:
                raise RuntimeError(f"{func}: tensors are on {GPU} and {each.device}")
    if on_gpu and func is aten._to_copy.default and not to_gpu and kwargs.get("non_blocking"):
        raise RuntimeError("a copy from the GPU that nobody waits for: what is read may not have arrived yet")
    masks = (
        [each for each in args[1] or () if each is not None and each.dtype == torch.bool] if packet in INDEXED else ()
    )
    if func is aten.copy_.default:
        to_gpu = isinstance(args[0], OnGpu)
    waits_for_copy = func in COPIES and (
        not to_gpu or (len(on_gpu) < len(tensors) and not (kwargs.get("non_blocking") or args[2:] == (True,)))
    )
    indices = [each for each in args[1] if each is not None] if packet in INDEXED else []
    if waits_for_copy or (on_gpu and (packet in ASKS or masks or not all(isinstance(each, OnGpu) for each in indices))):
        count_wait()
    plain_args, plain = tree_map(lambda each: each.inner if isinstance(each, OnGpu) else each, (args, dict(kwargs)))
    if named is not None and to_gpu:
        plain["device"] = "cpu"
    result = func(*plain_args, **plain)
    known = {id(each.inner): each for each in on_gpu}

    def wrap(each: Any) -> Any:
        if not isinstance(each, Tensor) or isinstance(each, OnGpu) or not to_gpu:
            return each
        return known[id(each)] if id(each) in known else OnGpu(each)  # an operation in place returns its argument

    return result if packet in (aten._local_scalar_dense, aten.equal) else tree_map(wrap, result)


def _empty(size: Any, stride: Any = None, dtype: Any = None, **_: Any) -> OnGpu:
    """torch.tensor(..., device=GPU) makes its tensor outside of any mode."""
    return OnGpu(torch.empty(size, dtype=dtype) if stride is None else torch.empty_strided(size, stride, dtype=dtype))


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if not non_blocking:
        count_wait()
    inner = [each.inner if isinstance(each, OnGpu) else each for each in (source, target)]
    inner[1].copy_(inner[0])
    return target


library = torch.library.Library("aten", "IMPL")
library.impl("empty_strided", lambda size, stride, dtype=None, *_, **__: _empty(size, stride, dtype), "PrivateUse1")
library.impl("empty.memory_format", lambda size, dtype=None, *_, **__: _empty(size, None, dtype), "PrivateUse1")
library.impl("_copy_from", _copy, "PrivateUse1")


def move(model: Any, device: torch.device) -> Any:
    """Move a model in place; `nn.Module.to` would assign data of another class."""
    if device.type == "cpu":
        return model
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = nn.Parameter(OnGpu(parameter.detach().clone()), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), new)
        module._buffers.update(
            (name, OnGpu(buffer.clone())) for name, buffer in module._buffers.items() if buffer is not None
        )
    return model


def small_llama(device: torch.device, rank: int | None = None) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    if rank is not None:
        step_rows.low_rank(model, FactorizeConfig(rank=rank))
    return move(model, device)


def small_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    mask_BT = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    ids = [torch.randint(64, (2, 8), generator=generator) for _ in range(count)]
    return [Batch(each, mask_BT, each.where(mask_BT == 1, -100), sample_ids=((0,), (1,))) for each in ids]


def start(device: torch.device, count: int) -> list[float]:
    """Calibration, costs of cuts and the held-out check on so many batches."""
    model, batches = small_llama(device).eval().requires_grad_(False), small_batches(count)
    names = list(bench_host.layer_linears(model))
    sampling = bench_host.Sampling(reads=bench_host.watch_reads(model, names, batches))
    moments = measure_moments(model, names, batches, sampling)
    factors = {}
    for name in names:
        weight = model.get_submodule(name).weight
        factors[name.removeprefix("model.")] = weighted_svd(weight, moments[name], min(weight.shape))
    costs = predict_losses(model, factors, batches, sampling)
    cut = WeightedFactors(ranks=dict.fromkeys(factors, 4), factors=factors, predicted_loss=0.0)
    return [*(float(each[4]) for each in costs.values()), *divergences(model, {"cut": cut}, batches).values()]


def train(method: str) -> Callable[[torch.device, int], list[float]]:
    """Steps of a method; what the bench itself reads of a step is no wait of the package."""

    def steps(device: torch.device, count: int) -> list[float]:
        teacher, student = small_llama(device).eval().requires_grad_(False), small_llama(device, rank=4).train()
        batches = small_batches(count)
        ids = batches[0].input_ids.to(device)
        setting = step_rows.Setting(teacher, student, ids, ids, None)
        step = step_rows.ours(setting, {"task": method}, batches=lambda number: [batches[number]])
        return [step() for _ in batches]

    return steps


def embedded_teacher(device: torch.device) -> tuple[Any, Any]:
    folder = locate("embedded:teacher")
    return move(AutoModelForCausalLM.from_pretrained(folder).eval(), device), AutoTokenizer.from_pretrained(folder)


def rows_of_two_teachers(device: torch.device, count: int) -> list[float]:
    """The loss of KD where each row has its own teacher."""
    teachers = {"": small_llama(device).eval(), "other": small_llama(device, rank=2).eval()}
    student = small_llama(device, rank=4).train()
    method = build_method(["kd"], {"kd": KdConfig()}, student.config, student.config, TOKENS)
    tapped = {name: tap_teacher(method, model, forward=model) for name, model in teachers.items()}
    both = TeachersOfRows(teachers=tapped, together=frozenset())
    learner, losses = tap_student(method, student, forward=student), []
    for batch in small_batches(count):
        moved = replace(batch, teachers=("", "other")).with_positions(shift=True).to(device)
        targets = both.compute_targets(moved, lm_head=("labels",))
        losses.append(learner.compute_losses(moved, method.bind_terms(targets, moved, moved.divisors())).total.item())
    return losses


def answer(device: torch.device, count: int) -> list[str]:
    """Samples of the embedded teacher, in which rows take each other's places."""
    model, tokenizer = embedded_teacher(device)
    decoding = Decoding(
        sample=True, max_prompt_length=20, max_length=32, top_p=0.9, top_k=20, no_repeat_ngram_size=3, batch_size=2
    )
    prompts = [tokenizer(text)["input_ids"] for text in ("What is the lamp", "Name a", "Who", "The sea is")][:count]
    with patch.object(row_draws, "cut_to_top_p", partial(row_draws.cut_to_top_p, most=5)):
        return generate_passes(model, tokenizer, prompts, decoding, seeds=[1])[0].texts


def compare(device: torch.device, count: int) -> list[float]:
    """The distance of the embedded teacher in int8 from itself."""
    exact, batches = embedded_teacher(device)[0], small_batches(count)
    rows = read_rows(exact, batches, "teacher")
    rounded = round_teacher(exact, "teacher.quantize", "int8", lambda: batches[0])
    assert rounded is not None
    return [rounded, compare_rows(rows, read_rows(exact, batches, "student")).divergence]


def score(device: torch.device, count: int) -> list[float]:
    """The losses of references."""
    with label_loss(small_llama(device).eval(), shift=True) as loss_of:
        losses = [loss_of(batch)[0] for batch in small_batches(count)]
    return [float(torch.stack(losses).sum())]


def compress(device: torch.device, count: int) -> list[float]:
    """The divergence of a student whose ranks go by the predicted loss."""
    calibration = {"data": "embedded:train", "examples": 4 * count, "held_out": 8, "micro_batch_size": 4}
    distance: list[Distance] = []
    llmdistill.compress(
        "embedded:teacher",
        target_params="70%",
        weighting="gradients",
        allocation="loss",
        form="pivoted",
        calibration=calibration,
        device=device,
        distance=distance,
    )
    return [distance[0].divergence]


WORK: dict[str, Callable[[torch.device, int], list[Any]]] = {
    "start": start,
    "kd": train("kd"),
    "makd": train("makd"),
    "rows of two teachers": rows_of_two_teachers,
    "answer": answer,
    "compare": compare,
    "score": score,
    "compress": compress,
}


def main() -> None:
    """Do all the work on the CPU and on the simulated GPU, there with two batches and with four."""
    plain_to = nn.Module.to

    def to(self: nn.Module, *given: Any, **named: Any) -> Any:
        device = named.get("device", given[0] if given else None)
        if isinstance(device, str | torch.device) and torch.device(device).type == GPU.type:
            return move(self, GPU)
        return plain_to(self, *given, **named)

    def plain_engine(student: nn.Module) -> PlainEngine:
        return PlainEngine(student, torch.optim.AdamW(student.parameters(), lr=1e-8, foreach=True))

    found = {}
    with (
        patch.object(nn.Module, "to", to),
        patch.object(PreTrainedModel, "to", to),
        patch.object(torch.cuda, "mem_get_info", lambda device=None: (2**33, 2**33)),
        patch.object(step_rows, "plain_engine", plain_engine),
        # Layers that run twice, as where memory is short, need one backward pass within another.
        patch.object(sampled, "tokens_at_a_time", lambda model: 10_000),
        sdpa_kernel(SDPBackend.MATH),
    ):
        for name, work in WORK.items():
            on_cpu, asked = work(torch.device("cpu"), 4), []
            for count in (2, 4):
                waits.clear()
                with Simulated(), replace(World.current(), device=GPU).entered():
                    on_gpu = work(GPU, count)
                asked.append(dict(waits))
            found[name] = {"cpu": on_cpu, "gpu": on_gpu, "waits of 2": asked[0], "waits of 4": asked[1]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
