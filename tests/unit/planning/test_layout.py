"""The arithmetic of ZeRO in round numbers, a billion parameters in bf16 on four ranks, in GB; and what is chosen."""

from dataclasses import replace

import pytest

from llmdistill.config.machine import MachineConfig
from llmdistill.errors import UserError
from llmdistill.planning.choices import LayoutChoice, best_by_kind, explain_choice, propose
from llmdistill.planning.layout import Duration, Layout, Sizes, Zero
from llmdistill.planning.step import Moment
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


def test_parts_of_each_ds_config():
    for name, steps, expected in (
        ("zero1", 1, {**WHOLE, "buckets": 0.8}),  # at the peak no gradient is complete
        ("zero1", 2, {**WHOLE, "buckets": 0.8, "gradients": 2.0}),
        ("zero2", 2, {**WHOLE, "buckets": 1.2, "gradients": 0.5}),
        ("zero3", 1, {**WHOLE, "student": 0.5, "gathered": 2.1, "buckets": 0.4, "gradients": 0.5}),
        ("zero2_offload", 1, {"teacher": 16.0, "student": 2.0, "buckets": 0.8, **ALWAYS}),
        ("zero3_offload", 1, {"teacher": 16.0, "gathered": 2.1, "buckets": 0.4, **ALWAYS}),
    ):
        assert parts(layout(name, steps=steps)) == expected, name
    # A sharded teacher keeps its share and what it gathers.
    found = parts(layout("zero2", "zero3"))
    assert (found["teacher"], found["gathered"]) == (4.0, 2.1)
    assert "teacher" not in parts(layout("zero2", None))


def test_a_teacher_that_is_cut_has_the_rest_whole_and_adds_up_within_its_node():
    cut = replace(SIZES, cut_bytes=12 * 10**9)
    assert parts(layout("zero1", "tensor", sizes=cut))["teacher"] == 16 - 12 * 3 / 4
    assert parts(layout("zero1", "tensor", sizes=cut, gpus=2, nodes=2))["teacher"] == 16 - 12 / 2
    sent = replace(layout("zero1", "tensor", steps=2, sizes=cut), summed_bytes=10**9)
    assert sent.node_bytes == 2 * 3 / 4 * 2 * 10**9
    assert replace(sent, exchanged_bytes=10**8).node_bytes == sent.node_bytes + 3 / 4 * 2 * 10**8  # it goes one way


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
    # The wire is as fast as the slowest link of a ring.
    for gpus, nodes, bandwidth in ((8, 1, 300), (8, 2, 200), (2, 2, 50)):
        assert layout("zero1", gpus=gpus, nodes=nodes).sent_seconds(1e9) == pytest.approx(1 / bandwidth)


def test_time_is_the_work_at_the_reached_peaks_and_the_longest_bounds_a_step():
    speeds = {"tflops": 100, "product_share": 0.5, "memory_bandwidth": 1000, "bandwidth_share": 0.5}
    alone = layout("zero1", None, steps=3, sizes=replace(SIZES, trained=0), gpus=1, **speeds)
    found = alone.step_duration(Work(flops=1e14, product_bytes=1e9, other_bytes=1e12))
    assert (found.compute, found.memory, found.seconds) == pytest.approx((6.0, 6.0, 12.0))
    for work, name, bound in (
        (Work(flops=1e15, product_bytes=1e9, other_bytes=1e11), "zero1", "compute"),
        (Work(flops=1e13, product_bytes=1e9, other_bytes=1e12), "zero1", "memory"),
        (Work(flops=1e12, product_bytes=1e9), "zero3", "wire"),
        (Work(flops=1e12, product_bytes=1e9, operations=1e5), "zero1", "launch"),
        (Work(flops=1e12, product_bytes=1e9), "zero2_offload", "host"),
    ):
        assert layout(name, None, nvlink=50, bandwidth_share=0.75).step_duration(work).bound == bound


GB = 10**9


def choice(ds_config: str = "zero1", *, gb: float = 50, seconds: float = 1.0, **changes) -> LayoutChoice:
    given = {
        "ds_config": ds_config,
        "micro_batch_size": 8,
        "accumulation_steps": 1,
        "checkpointing": False,
        "teacher": "replicated",
        "memory": {"student": gb * GB / 4, "activations": gb * GB * 3 / 4},
        "flops": 1e15,
        "zero": None,
        "sizes": None,
        "duration": Duration(compute=seconds, memory=0, wire=0, launch=0, host=0),
        "machine": MachineConfig(gpu_memory="80GB", margin=0.1),
    }
    return LayoutChoice(**(given | changes))


def test_the_fastest_that_fits_and_the_simplest_of_those_that_are_alike():
    slow, fast = choice(seconds=2.0), choice("zero2", seconds=1.0)
    assert propose([slow, fast, choice("zero3", seconds=0.5, gb=81)]) is fast
    simple, sharded = choice(seconds=1.01), choice(teacher="zero3", seconds=1.0)
    assert propose([simple, sharded, choice("zero3", seconds=1.0)]) is simple
    kept, recomputed = choice(gb=87.2), choice(gb=40, checkpointing=True)
    assert propose([kept, recomputed]) is recomputed
    said = explain_choice(recomputed, [kept, recomputed])
    assert said.endswith("without activation checkpointing it would need 87.2 GB")


def test_tight_only_if_nothing_else_fits():
    tight, loose = choice(gb=75, seconds=1.0), choice(gb=71, seconds=3.0)
    assert tight.tight
    assert propose([tight, loose]) is loose
    assert propose([tight, choice(gb=90)]) is tight


def test_own_micro_batch_is_kept_where_it_fits():
    own, faster = choice(seconds=2.0), choice(micro_batch_size=4, seconds=1.0)
    assert propose([own, faster], 8) is own
    assert propose([own, faster]) is faster
    assert propose([choice(gb=99), faster], 8) is faster
    assert "own micro batch size 8" in explain_choice(own, [own, faster], 8)


def test_nothing_fits():
    said = (
        r"nothing fits in 80\.0 GB: zero3, .* needs least, 95\.0 GB .*, 15\.0 GB too much, .* activations are 71\.2 GB"
    )
    with pytest.raises(UserError, match=said):
        propose([choice(gb=120), choice("zero3", gb=95, checkpointing=True)])


def test_best_of_each_kind():
    first, second, third = choice(seconds=2.0), choice(seconds=1.0), choice("zero2", gb=99)
    assert best_by_kind([first, second, third, choice("zero2", gb=90)], lambda each: each.ds_config)[0] is second
    assert best_by_kind([third, choice("zero2", gb=90)], lambda each: each.ds_config)[0].total == 90 * GB
