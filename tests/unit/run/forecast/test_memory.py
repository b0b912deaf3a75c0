"""The arithmetic of ZeRO in round numbers: a billion parameters in bf16 on four ranks, all figures in GB."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmdistill.config.machine import MachineConfig
from llmdistill.run.forecast.duration import step_duration, wire_bandwidth, wire_bytes
from llmdistill.run.forecast.memory import Sizes, Zero, peak_memory, step_memory, with_allocator
from llmdistill.run.forecast.step import Moment
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.tracing import Work

RANKS = 4
SIZES = Sizes(
    student_bytes=2 * 10**9,
    element_bytes=2,
    trained=10**9,
    teacher_bytes=16 * 10**9,
    teacher_element_bytes=2,
)
MOMENTS = [
    Moment(0, {"activations": 9e9, "taps": 1e9}),  # the backward pass begins
    Moment(10**9, {"activations": 1e9, "taps": 0.0}),  # it ends
]


def zero_of(name: str, steps: int = 1) -> Zero:
    return Zero.of(read_ds_config(name), accumulation_steps=steps)


def parts(name: str, *, teacher: str | None = "replicated", steps: int = 1, moments=MOMENTS) -> dict[str, float]:
    found = peak_memory(zero_of(name, steps), SIZES, teacher, moments, ranks=RANKS, accumulation_steps=steps)
    return {part: round(size / 1e9, 3) for part, size in found.items() if size}


ALWAYS = {"activations": 9.0, "taps": 1.0}
WHOLE = {"teacher": 16.0, "student": 2.0, "optimizer": 3.0, **ALWAYS}


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("zero1", 1, {**WHOLE, "buckets": 0.8}),  # at the peak no gradient is complete
        ("zero1", 2, {**WHOLE, "buckets": 0.8, "gradients": 2.0}),
        ("zero2", 2, {**WHOLE, "buckets": 1.2, "gradients": 0.5}),
        ("zero3", 1, {**WHOLE, "student": 0.5, "gathered": 2.1, "buckets": 0.4, "gradients": 0.5}),
        ("zero2_offload", 1, {"teacher": 16.0, "student": 2.0, "buckets": 0.8, **ALWAYS}),
        ("zero3_offload", 1, {"teacher": 16.0, "gathered": 2.1, "buckets": 0.4, **ALWAYS}),
    ],
)
def test_parts_of_each_ds_config(name, steps, expected):
    assert parts(name, steps=steps) == expected


def test_sharded_teacher_keeps_its_share_and_what_it_gathers():
    found = parts("zero2", teacher="zero3")
    assert (found["teacher"], found["gathered"]) == (4.0, 2.1)
    assert "teacher" not in parts("zero2", teacher=None)


def test_teacher_of_a_node_is_shared_by_its_ranks_and_sends_within_it():
    def found(teacher: str, ranks_of_node: int) -> dict[str, float]:
        return peak_memory(
            zero_of("zero1"),
            SIZES,
            teacher,
            MOMENTS,
            ranks=RANKS,
            accumulation_steps=1,
            ranks_of_node=ranks_of_node,
        )

    assert found("node", 2)["teacher"] == 8e9
    assert found("node", RANKS) == found("zero3", RANKS)
    assert found("node", 1) == found("replicated", 1)

    def wire(teacher: str | None) -> float:
        machine = MachineConfig(gpus=2, nodes=2, nvlink=300, infiniband=25, bandwidth_share=1)
        return step_duration(zero_of("zero1"), SIZES, teacher, Work(), machine, accumulation_steps=1).wire

    # A rank sends 1/2 of 16 GB at 300 GB/s within its node, or 3/4 of them at the 2 x 25 GB/s between the nodes.
    assert wire("node") - wire(None) == pytest.approx(8 / 300)
    assert wire("zero3") - wire(None) == pytest.approx(12 / 50)
    assert wire("replicated") == wire(None)


def test_peak_is_in_the_optimizers_step_where_activations_are_small():
    little = [Moment(0, {"activations": 1e9}), Moment(10**9, {"activations": 0.0})]
    assert parts("zero2", moments=little) == {
        "teacher": 16.0,
        "student": 2.0,
        "optimizer": 3.0,
        "buckets": 0.8,
        "gradients": 0.5,
        "step": 1.0,
    }


def test_optimizer_that_is_not_fused_needs_temporary_tensors():
    ds_config = read_ds_config("zero2")
    ds_config["optimizer"]["params"]["fused"] = False
    zero = Zero.of(ds_config, accumulation_steps=1)
    assert step_memory(zero, SIZES, RANKS)["step"] == 3e9


def test_gradients_grow_while_activations_shrink():
    growing = [Moment(0, {"activations": 5e9}), Moment(10**9, {"activations": 4.5e9})]
    assert parts("zero1", moments=growing)["gradients"] == 2.0


def test_allocator_holds_a_share_of_the_tensors():
    assert with_allocator({"student": 100.0, "taps": 20.0}, reserved=7, fragmentation=0.1)["allocator"] == 19.0


def test_bytes_on_the_wire():
    def sent(name: str, teacher: str | None = None, steps: int = 1) -> float:
        return wire_bytes(zero_of(name, steps), SIZES, teacher, RANKS, accumulation_steps=steps) / 1e9

    assert sent("zero1", steps=4) == pytest.approx(0.75 * 4)  # one all-reduce a step, however many micro batches
    assert sent("zero2", steps=4) == pytest.approx(0.75 * (4 * 2 + 2))
    assert sent("zero3", steps=2) == pytest.approx(0.75 * 2 * (2 + 2 + 2))
    assert sent("zero1", "zero3") - sent("zero1", "replicated") == pytest.approx(0.75 * 16)


def test_wire_is_as_fast_as_the_slowest_link_of_a_ring():
    assert wire_bandwidth(MachineConfig(gpus=8)) == 300
    assert wire_bandwidth(MachineConfig(gpus=8, nodes=2)) == 200
    assert wire_bandwidth(MachineConfig(gpus=2, nodes=2)) == 50


@pytest.mark.parametrize(
    ("work", "name", "bound"),
    [
        (Work(flops=1e15, product_bytes=1e9, other_bytes=1e11), "zero1", "compute"),
        (Work(flops=1e13, product_bytes=1e9, other_bytes=1e12), "zero1", "memory"),
        (Work(flops=1e12, product_bytes=1e9), "zero3", "wire"),
        (Work(flops=1e12, product_bytes=1e9, operations=1e5), "zero1", "launch"),
        (Work(flops=1e12, product_bytes=1e9), "zero2_offload", "host"),
    ],
)
def test_what_bounds_a_step(work, name, bound):
    machine = MachineConfig(gpus=RANKS, nvlink=50)
    found = step_duration(zero_of(name), SIZES, None, work, machine, accumulation_steps=1)
    assert found.bound == bound


def test_time_is_the_work_at_the_reached_peaks():
    machine = MachineConfig(gpus=1, tflops=100, product_share=0.5, memory_bandwidth=1000, bandwidth_share=0.5)
    sizes = replace(SIZES, trained=0)
    work = Work(flops=1e14, product_bytes=1e9, other_bytes=1e12)
    found = step_duration(zero_of("zero1"), sizes, None, work, machine, accumulation_steps=3)
    assert (found.compute, found.memory, found.seconds) == pytest.approx((6.0, 6.0, 12.0))
