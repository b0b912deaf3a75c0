"""The arithmetic of ZeRO in round numbers: a billion parameters in bf16 on four ranks, all figures in GB."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmdistill.config.machine import MachineConfig
from llmdistill.run.forecast.layout import Layout, Sizes, Zero
from llmdistill.run.forecast.step import Moment
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.tracing import Work

RANKS = 4
SIZES = Sizes(
    student_bytes=2 * 10**9, element_bytes=2, trained=10**9, teacher_bytes=16 * 10**9, teacher_element_bytes=2
)
MOMENTS = [
    Moment(0, {"activations": 9e9, "taps": 1e9}),  # the backward pass begins
    Moment(10**9, {"activations": 1e9, "taps": 0.0}),  # it ends
]


def layout(name: str, teacher: str | None = "replicated", *, steps: int = 1, sizes=SIZES, **machine) -> Layout:
    zero = Zero.of(read_ds_config(name), accumulation_steps=steps)
    found = MachineConfig(**{"gpus": RANKS, "bandwidth_share": 1, **machine})
    return Layout(zero=zero, sizes=sizes, teacher=teacher, machine=found, accumulation_steps=steps)


def parts(found: Layout, moments=MOMENTS) -> dict[str, float]:
    memory = found.peak_memory(moments)
    return {part: round(size / 1e9, 3) for part, size in memory.items() if size and part != "allocator"}


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
    assert parts(layout(name, steps=steps)) == expected


def test_sharded_teacher_keeps_its_share_and_what_it_gathers():
    found = parts(layout("zero2", "zero3"))
    assert (found["teacher"], found["gathered"]) == (4.0, 2.1)
    assert "teacher" not in parts(layout("zero2", None))


def test_teacher_of_a_node_is_shared_by_its_ranks_and_sends_within_it():
    def found(teacher: str, ranks_of_node: int) -> dict[str, float]:
        return parts(layout("zero1", teacher, gpus=ranks_of_node, nodes=RANKS // ranks_of_node))

    assert found("node", 2)["teacher"] == 8
    assert found("node", RANKS) == found("zero3", RANKS)
    assert found("node", 1) == found("replicated", 1)

    def wire(teacher: str | None) -> float:
        return layout("zero1", teacher, gpus=2, nodes=2, nvlink=300, infiniband=25).step_duration(Work()).wire

    # A rank sends 1/2 of 16 GB at 300 GB/s within its node, or 3/4 of them at the 2 x 25 GB/s between the nodes.
    assert wire("node") - wire(None) == pytest.approx(8 / 300)
    assert wire("zero3") - wire(None) == pytest.approx(12 / 50)
    assert wire("replicated") == wire(None)


def test_peak_is_in_the_optimizers_step_where_activations_are_small():
    little = [Moment(0, {"activations": 1e9}), Moment(10**9, {"activations": 0.0})]
    fused, without = layout("zero2"), {"teacher": 16.0, "student": 2.0, "optimizer": 3.0}
    assert parts(fused, little) == {**without, "buckets": 0.8, "gradients": 0.5, "step": 1.0}
    # An optimizer that is not fused needs temporary tensors.
    assert parts(replace(fused, zero=replace(fused.zero, fused=False)), [Moment(0, {})])["step"] == 3
    assert Zero.of({"optimizer": {"params": {"foreach": True}}}, accumulation_steps=1).fused is False
    # Gradients grow while activations shrink, and the allocator holds a share of the tensors.
    growing = [Moment(0, {"activations": 5e9}), Moment(10**9, {"activations": 4.5e9})]
    assert parts(layout("zero1"), growing)["gradients"] == 2.0
    found = layout("zero1", reserved="2GB", fragmentation=0.1).reserved({"student": 100e9, "taps": 20e9})
    assert found["allocator"] == pytest.approx(14e9)


def test_bytes_on_the_wire():
    def sent(name: str, teacher: str | None = None, steps: int = 1) -> float:
        return layout(name, teacher, steps=steps).wire_bytes / 1e9

    assert sent("zero1", steps=4) == pytest.approx(0.75 * 4)  # one all-reduce a step, however many micro batches
    assert sent("zero2", steps=4) == pytest.approx(0.75 * (4 * 2 + 2))
    assert sent("zero3", steps=2) == pytest.approx(0.75 * 2 * (2 + 2 + 2))
    assert sent("zero1", "zero3") - sent("zero1", "replicated") == pytest.approx(0.75 * 16)


def test_wire_is_as_fast_as_the_slowest_link_of_a_ring():
    for gpus, nodes, bandwidth in ((8, 1, 300), (8, 2, 200), (2, 2, 50)):
        assert layout("zero1", gpus=gpus, nodes=nodes).sent_seconds(1e9) == pytest.approx(1 / bandwidth)


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
    assert layout(name, None, nvlink=50, bandwidth_share=0.75).step_duration(work).bound == bound


def test_time_is_the_work_at_the_reached_peaks():
    speeds = {"tflops": 100, "product_share": 0.5, "memory_bandwidth": 1000, "bandwidth_share": 0.5}
    alone = layout("zero1", None, steps=3, sizes=replace(SIZES, trained=0), gpus=1, **speeds)
    found = alone.step_duration(Work(flops=1e14, product_bytes=1e9, other_bytes=1e12))
    assert (found.compute, found.memory, found.seconds) == pytest.approx((6.0, 6.0, 12.0))
