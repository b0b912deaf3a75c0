"""Breaks of what measures and disturbs the package: benches, gpu_check, torture, fuzz."""

from __future__ import annotations

from breaks import Break

BENCH, GPU, TORTURE = "scripts/bench", "scripts/gpu_check", "scripts/torture"
BENCHES = "tests/unit/test_benches.py"
OF_GPU, OF_TORTURE, OF_FUZZ = "tests/unit/test_gpu_check.py", "tests/dist/test_torture.py", "tests/unit/test_fuzz.py"

BREAKS = [
    # what the benches share
    Break(
        "ratio-of-medians",
        f"{BENCH}/benching.py",
        'statistics.median([a / b for a, b in rounds] or [float("nan")])',
        "one.median / other.median",
        f"{BENCHES}::test_ratio_is_the_median_of_the_rounds_ratios",
    ),
    Break(
        "missing-input-is-a-traceback",
        f"{BENCH}/benching.py",
        "    except UserError as error:",
        "    except TypeError as error:",
        f"{BENCHES}::test_a_missing_input_is_one_sentence",
    ),
    Break(
        "warm-up-counts",
        f"{BENCH}/benching.py",
        "if repeat >= 0:",
        "if seconds >= 0:",
        f"{BENCHES}::test_rows_are_processes_of_their_own_that_take_turns",
    ),
    Break(
        "target-itself-is-missed",
        f"{BENCH}/benching.py",
        "self.value <= self.target",
        "self.value < self.target",
        f"{BENCHES}::test_verdict",
    ),
    Break(
        "nan-in-the-json-line",
        f"{BENCH}/benching.py",
        'float(f"{value:.4g}") if math.isfinite(value) else None',
        'float(f"{value:.4g}")',
        f"{BENCHES}::test_json_line_has_no_nan",
    ),
    # single benches
    Break(
        "labels-at-the-start",
        f"{BENCH}/step_rows.py",
        "torch.arange(tokens) < round((1 - share) * tokens)",
        "torch.arange(tokens) >= round(share * tokens)",
        f"{BENCHES}::test_labeled_share_stands_at_the_end",
    ),
    Break(
        "naive-layers-shifted",
        f"{BENCH}/step_rows.py",
        "if layer < layers // 2:",
        "if layer <= layers // 2:",
        f"{BENCHES}::test_naive_makd_is_the_same_loss_as_ours",
    ),
    Break(
        "gradients-stay",
        "tests/plain_engine.py",
        "            self.optimizer.zero_grad()\n",
        "",
        f"{BENCHES}::test_steps_leave_no_gradient_and_barely_move",
    ),
    Break(
        "peers-without-a-prompt",
        f"{BENCH}/peer_rows.py",
        "max(1, int((setting",
        "max(0, int((setting",
        f"{BENCHES}::test_peers_have_the_same_prompts_and_as_many_tokens_to_write",
    ),
    Break(
        "growth-times-products",
        f"{BENCH}/bench_scale.py",
        "time / products, None, detail",
        "time * products, None, detail",
        f"{BENCHES}::test_growth_is_the_ratio_of_the_rounds_over_that_of_the_products",
    ),
    Break(
        "generation-without-growth",
        f"{BENCH}/bench_serve.py",
        "new * (first + last) / 2",
        "new * first",
        f"{BENCHES}::test_serving_counts_the_products_of_a_runtime",
    ),
    Break(
        "statistics-of-inputs-alone",
        f"{BENCH}/bench_calibration.py",
        "shapes, gradients=True, memory",
        "shapes, gradients=False, memory",
        f"{BENCHES}::test_calibration_counts_the_bytes_of_its_statistics",
    ),
    Break(
        "zero-sum-runs-away",
        f"{BENCH}/bench_starts.py",
        "heaps[running <= 0] or heaps[running > 0]",
        "heaps[running > 0] or heaps[running <= 0]",
        f"{BENCHES}::test_zero_sum_ranks_are_those_of_a_plain_search",
    ),
    # gpu_check
    Break(
        "nan-keeps-its-limit",
        f"{GPU}/gpu_check.py",
        'line.verdict(quick=False) == "ok"',
        'line.verdict(quick=False) != "MISS"',
        f"{OF_GPU}::test_no_part_stops_another_and_each_is_reported",
    ),
    Break(
        "wait-of-the-outermost-library",
        f"{GPU}/gpu_check_waits.py",
        "    for frame in reversed(place):\n        for name, folder",
        "    for frame in place:\n        for name, folder",
        f"{OF_GPU}::test_a_wait_belongs_to_the_innermost_library",
    ),
    Break(
        "late-part-is-not-told",
        f"{GPU}/gpu_check.py",
        "time.monotonic() - began >= limit",
        "time.monotonic() - began < 0",
        f"{OF_GPU}::test_no_part_stops_another_and_each_is_reported",
    ),
    # torture and fuzz
    Break(
        "launcher-is-never-killed",
        f"{TORTURE}/torture_faults.py",
        '("rank 0", "rank 1", "launcher")',
        '("rank 0", "rank 1")',
        f"{OF_TORTURE}::test_every_phase_and_victim_has_its_turn",
    ),
    Break(
        "failure-without-its-seed",
        f"{TORTURE}/torture.py",
        "scripts/torture.sh --seed {seed} --only {failure}",
        "scripts/torture.sh --only {failure}",
        f"{OF_TORTURE}::test_the_page_repeats_failures",
    ),
    Break(
        "writes-elsewhere-are-not-seen",
        f"{TORTURE}/fuzz.py",
        "(writes or event in CHANGES) and",
        "event in CHANGES and",
        f"{OF_FUZZ}::test_what_a_reader_did_is_told_apart",
    ),
]
