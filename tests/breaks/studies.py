"""Breaks of studies, comparisons, tables and plots."""

from __future__ import annotations

from breaks import Break

EXPERIMENTS = "llmdistill/experiments"
FINE_TUNING = f"{EXPERIMENTS}/fine_tuning"
REPORT = "llmdistill/report"
TESTS = "tests/unit/experiments"
REPORT_TESTS = "tests/unit/report"

BREAKS = [
    Break(
        "best-seed-for-best-mean",
        f"{EXPERIMENTS}/grid.py",
        "statistics.fmean(map(score, group))",
        "max(map(score, group))",
        f"{TESTS}/test_grid.py::test_the_best_mean_over_seeds_is_chosen",
    ),
    Break(
        "model-dropped-too-early",
        f"{EXPERIMENTS}/grid.py",
        "if len(group) < seeds]",
        "if len(group) < seeds - 1]",
        f"{TESTS}/test_grid.py::test_trials_that_may_yet_be_the_best",
    ),
    Break(
        "trials-see-the-tests",
        f"{EXPERIMENTS}/study.py",
        "tests=len(self.points(variant)) == 1),",
        "tests=True),",
        f"{TESTS}/test_study.py::test_settings_are_chosen_on_validation_and_tests_are_not_looked_at",
    ),
    Break(
        "starts-of-different-size",
        f"{EXPERIMENTS}/equal.py",
        'replace(recipe.student.factorize, weighting="none", allocation="uniform")',
        "recipe.student.factorize",
        f"{TESTS}/test_equal.py",
    ),
    Break(
        "seqkd-steps-not-adjusted",
        f"{EXPERIMENTS}/equal.py",
        "return max(1, step + is_nearer)",
        "return config.train.steps",
        f"{TESTS}/test_study.py::test_every_method_gets_the_same_start_order_and_batch_and_seqkd_as_many_tokens",
    ),
    Break(
        "gpus-shared-unevenly",
        f"{EXPERIMENTS}/launcher.py",
        "share = len(gpus) // count",
        "share = 1",
        f"{TESTS}/test_launcher.py::test_gpus_are_shared_out_evenly",
    ),
    Break(
        "untrained-for-student",
        f"{EXPERIMENTS}/side_by_side.py",
        'found[MODELS["student"]]}',
        'found[MODELS["untrained"]]}',
        f"{TESTS}/test_side_by_side.py::test_a_run_is_its_three_models_and_with_a_name_its_student",
    ),
    Break(
        "divergence-the-other-way",
        f"{EXPERIMENTS}/attention.py",
        "map_divergence(_drawn(first, head), _drawn(log_HTT, head))",
        "map_divergence(_drawn(log_HTT, head), _drawn(first, head))",
        f"{TESTS}/test_attention.py::test_chosen_heads_have_a_row_each",
    ),
    Break(
        "recipe-wins-over-user",
        f"{FINE_TUNING}/protocols.py",
        "**{**_settings_of(recipe_of(task)), **different, **given}",
        "**{**different, **given, **_settings_of(recipe_of(task))}",
        f"{TESTS}/fine_tuning/test_protocols.py::test_given_settings_win_over_a_recipe",
    ),
    Break(
        "first-seed-for-best",
        f"{FINE_TUNING}/results.py",
        '"best_run": choice.best.trial.folder.name',
        '"best_run": results[0].trial.folder.name',
        f"{TESTS}/fine_tuning/test_study.py::test_a_grid_can_grow_and_shrink",
    ),
    Break(
        "finished-trials-run-again",
        f"{EXPERIMENTS}/launcher.py",
        "        if kept is not None:\n            return progress.end(kept, kept=True)\n",
        "",
        f"{TESTS}/test_launcher.py::test_in_process_a_failed_trial_stops_no_other_and_finished_ones_are_kept",
    ),
    Break(
        "average-of-a-part",
        f"{REPORT}/published.py",
        "if len(means) == len(columns) else None",
        "if means else None",
        f"{TESTS}/test_table_study.py::test_our_figures_stand_beside_the_paper_s",
    ),
    Break(
        "teacher-is-the-best",
        f"{REPORT}/results.py",
        "trained = [row for row in rows if row.trained and row.average is not None]",
        "trained = [row for row in rows if row.average is not None]",
        f"{REPORT_TESTS}/test_comparison.py::test_page_stands_alone_and_only_the_best_method_is_bold",
    ),
    Break(
        "curves-with-infinities",
        f"{REPORT}/plots.py",
        "value is not None and math.isfinite(value)",
        "value is not None",
        f"{REPORT_TESTS}/test_plots.py::test_curve_is_mean_and_range_over_runs",
    ),
    Break(
        "spectrum-half-a-rank-off",
        f"{REPORT}/starts.py",
        "((low + high + 1) / 2,",
        "((low + high) / 2,",
        f"{REPORT_TESTS}/test_starts.py::test_spectra_are_the_savings_of_single_values_with_a_dot_at_the_rank",
    ),
    Break(
        "layers-from-zero",
        f"{REPORT}/starts.py",
        "int(place[1]) + 1",
        "int(place[1])",
        f"{REPORT_TESTS}/test_starts.py::test_matrices_have_layer_kind_rank_and_what_is_kept",
    ),
    Break(
        "hidden-panel-too-many",
        f"{REPORT}/panels.py",
        "return figure, grid[: len(titles)]",
        "return figure, grid",
        f"{REPORT_TESTS}/test_plots.py",
    ),
    Break(
        "users-card-overwritten",
        f"{REPORT}/card.py",
        "_COMMENT.encode() not in file.read_bytes()",
        "not file.read_bytes()",
        f"{REPORT_TESTS}/test_card.py::test_a_card_may_be_changed_without_damage_and_is_then_the_users",
    ),
]
