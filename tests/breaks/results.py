"""Breaks of factorization, export, scores, reports and generation."""

from __future__ import annotations

from breaks import Break

RUN = "llmdistill/run"
FACTORIZE = "llmdistill/factorize"
FACTORIZE_TESTS = "tests/unit/factorize"
TASKS = "llmdistill/tasks"
TASK_TESTS = "tests/unit/tasks"
GENERATION = "llmdistill/generation"
GENERATION_TESTS = "tests/unit/generation"
REPORT = "llmdistill/report"
REPORT_TESTS = "tests/unit/report"

BREAKS = [
    # factorization
    Break(
        "whitened-by-transpose",
        f"{FACTORIZE}/weighted.py",
        "whitened = weight.double() @ inner",
        "whitened = weight.double() @ inner.T",
        f"{FACTORIZE_TESTS}/test_weighted.py::test_no_gradient_descent_finds_a_better_product",
    ),
    Break(
        "whitening-not-undone",
        f"{FACTORIZE}/weighted.py",
        "torch.linalg.solve_triangular(inner, vh, upper=False, left=False)",
        "vh @ inner",
        f"{FACTORIZE_TESTS}/test_weighted.py::test_no_gradient_descent_finds_a_better_product",
    ),
    Break(
        "cost-divided-once",
        f"{FACTORIZE}/weighted.py",
        "moments.tokens ** (1 if outer is None else 2)",
        "moments.tokens",
        f"{FACTORIZE_TESTS}/test_weighted.py::test_the_predicted_cost_is_that_of_the_product",
    ),
    Break(
        "cost-one-rank-off",
        f"{FACTORIZE}/weighted.py",
        "cumsum(0), (1, 0))",
        "cumsum(0), (0, 1))",
        f"{FACTORIZE_TESTS}/test_weighted.py::test_the_predicted_cost_is_that_of_the_product",
    ),
    Break(
        "corrected-inversely",
        f"{FACTORIZE}/weighted.py",
        "costs[name] / cost for name",
        "cost / costs[name] for name",
        f"{FACTORIZE_TESTS}/test_moments.py::test_corrected_factors_cost_what_was_measured",
    ),
    Break(
        "sampled-gradient-sign",
        f"{FACTORIZE}/sampled.py",
        "p_NV.new_full((), -1.0)",
        "p_NV.new_full((), 1.0)",
        f"{FACTORIZE_TESTS}/test_moments.py::test_moments_are_those_of_a_loop_over_tokens",
    ),
    Break(
        "calibration-seed-not-used",
        f"{FACTORIZE}/sampled.py",
        "(seed * 0x9E3779B97F4A7C15 + int(each[0]))",
        "int(each[0])",
        f"{FACTORIZE_TESTS}/test_moments.py::test_the_seed_draws_other_labels_and_no_moment_outlives_what_is_returned",
    ),
    Break(
        "kronecker-cost-divided-once",
        f"{FACTORIZE}/weighted_kronecker.py",
        "power = 1 if moments.gradients is None else 2",
        "power = 1",
        f"{FACTORIZE_TESTS}/test_weighted.py::test_it_is_as_good_as_exact_alternating_least_squares",
    ),
    Break(
        "table-cost-divided-once",
        f"{FACTORIZE}/weighted_embedding.py",
        "power = 1 if moments.gradients is None else 2",
        "power = 1",
        f"{FACTORIZE_TESTS}/test_weighted.py::test_no_gradient_descent_finds_a_better_table",
    ),
    Break(
        "sigma-on-both-sides",
        f"{FACTORIZE}/svd.py",
        "root = s.sqrt()",
        "root = s",
        f"{FACTORIZE_TESTS}/test_convert.py::test_each_module_is_the_best_approximation_and_keeps_its_bias",
    ),
    Break(
        "blocks-not-rearranged",
        f"{FACTORIZE}/kronecker.py",
        "reshape(m1, m2, n1, n2).transpose(1, 2).reshape(",
        "reshape(m1, m2, n1, n2).reshape(",
        f"{FACTORIZE_TESTS}/test_kronecker.py::test_rearrangement_is_that_of_equation_3",
    ),
    Break(
        "one-addition-too-many",
        f"{FACTORIZE}/kronecker.py",
        "+ (shape.sums - 1) * m",
        "+ shape.sums * m",
        f"{FACTORIZE_TESTS}/test_sizes.py::test_counts_of_kroneckerbert",
    ),
    # ONNX
    Break(
        "onnx-keys-for-values",
        f"{FACTORIZE}/onnx_export.py",
        "cache.update(key, value, layer)",
        "cache.update(value, key, layer)",
        f"{FACTORIZE_TESTS}/test_onnx_export.py::test_a_decoder_writes_token_by_token_what_transformers_writes",
    ),
    Break(
        "onnx-tolerance-of-nothing",
        f"{FACTORIZE}/onnx_export.py",
        "max(TOLERANCE, 2 * own)",
        "min(TOLERANCE, 2 * own)",
        f"{FACTORIZE_TESTS}/test_onnx_export.py::test_a_model_that_rounds_more_allows_a_larger_difference",
    ),
    # scores
    Break(
        "rouge-without-stems",
        f"{TASKS}/rouge.py",
        "use_stemmer=True",
        "use_stemmer=False",
        f"{TASK_TESTS}/test_text_metrics.py::test_rouge_l_by_hand",
    ),
    Break(
        "rouge-recall",
        f"{TASKS}/rouge.py",
        "[kind].fmeasure",
        "[kind].recall",
        f"{TASK_TESTS}/test_text_metrics.py::test_rouge_l_by_hand",
    ),
    Break(
        "f1-arithmetic-mean",
        f"{TASKS}/squad_metrics.py",
        "2 * precision * recall / (precision + recall)",
        "(precision + recall) / 2",
        f"{TASK_TESTS}/test_squad_metrics.py::test_squad1_and_mlqa",
    ),
    Break(
        "worst-reference",
        f"{TASKS}/squad_metrics.py",
        "RawScore(float(mine in theirs), max(",
        "RawScore(float(mine in theirs), min(",
        f"{TASK_TESTS}/test_squad_metrics.py::test_squad1_and_mlqa",
    ),
    Break(
        "threshold-excluded",
        f"{TASKS}/squad_metrics.py",
        "null_odds[key] <= threshold",
        "null_odds[key] < threshold",
        f"{TASK_TESTS}/test_squad_metrics.py::test_at_the_threshold_a_question_is_answered",
    ),
    Break(
        "answers-cost-nothing",
        f"{TASKS}/squad_metrics.py",
        "score -= 1",
        "pass",
        f"{TASK_TESTS}/test_squad_metrics.py::test_squad2_with_every_threshold_tried",
    ),
    Break(
        "null-odds-of-last-window",
        f"{TASKS}/spans.py",
        'min(no_answer, null.get(question, float("inf")))',
        "no_answer",
        f"{TASK_TESTS}/test_spans.py::test_the_best_span_of_all_windows",
    ),
    Break(
        "f1-of-class-0",
        f"{TASKS}/classification.py",
        "pos_label=1",
        "pos_label=0",
        f"{TASK_TESTS}/test_classification.py::test_binary_metrics_follow_their_formulas",
    ),
    Break(
        "glue-with-squad",
        f"{TASKS}/classification.py",
        "for name, score in there.items() if name != SQUAD2]",
        "for name, score in there.items()]",
        f"{TASK_TESTS}/test_classification.py::test_columns_that_are_missing_are_named",
    ),
    Break(
        "bleu-with-case",
        f"{TASKS}/text_metrics.py",
        "lowercase=True",
        "lowercase=False",
        f"{TASK_TESTS}/test_text_metrics.py::test_bleu4_is_that_of_the_definition",
    ),
    Break(
        "one-window-too-few",
        f"{TASKS}/windows.py",
        "(len(tokens) - length) // step + 1",
        "(len(tokens) - length) // step",
        f"{TASK_TESTS}/test_windows.py::test_it_is_the_loss_of_a_plain_loop",
    ),
    Break(
        "perplexities-arithmetic-mean",
        f"{TASKS}/perplexity.py",
        "statistics.geometric_mean(",
        "statistics.fmean(",
        f"{REPORT_TESTS}/test_comparison.py::test_results_are_the_statistics_of_the_runs",
    ),
    # reports
    Break(
        "population-deviation",
        f"{REPORT}/spread.py",
        "statistics.stdev(values)",
        "statistics.pstdev(values)",
        f"{REPORT_TESTS}/test_comparison.py::test_results_are_the_statistics_of_the_runs",
    ),
    Break(
        "deviation-for-error",
        f"{REPORT}/results.py",
        "best.std / math.sqrt(len(best.values))",
        "best.std",
        f"{REPORT_TESTS}/test_results.py::test_finding_is_a_lead_only_over_the_standard_error",
    ),
    Break(
        "cost-mean-for-median",
        f"{REPORT}/results.py",
        "return statistics.median(values)",
        "return statistics.fmean(values)",
        f"{REPORT_TESTS}/test_comparison.py::test_results_are_the_statistics_of_the_runs",
    ),
    Break(
        "higher-perplexity-better",
        f"{REPORT}/score.py",
        "higher_is_better=False",
        "higher_is_better=True",
        f"{REPORT_TESTS}/test_comparison.py::test_of_perplexities_the_lowest_is_the_best_everywhere",
    ),
    Break(
        "tokens-of-one-row",
        f"{REPORT}/table.py",
        'sum(row["tokens"] for row in rows)',
        'max(row["tokens"] for row in rows)',
        f"{REPORT_TESTS}/test_table.py::test_training_cost_sums_tokens_and_takes_the_median_speed_and_the_peak",
    ),
    Break(
        "distance-of-teacher",
        f"{REPORT}/published.py",
        "else score - teacher",
        "else teacher - score",
        "tests/unit/experiments/test_table_study.py::test_our_figures_stand_beside_the_paper_s",
    ),
    Break(
        "resumed-log-lacks-a-row",
        f"{RUN}/log.py",
        '["step"] <= step]',
        '["step"] < step]',
        f"{REPORT_TESTS}/test_metrics_log.py::test_a_resumed_run_drops_later_rows_and_what_a_kill_left_of_one",
    ),
    # generation
    Break(
        "left-padding-is-seen",
        f"{GENERATION}/decode.py",
        "[0] * (width - len(ids)) + [1] * len(ids)",
        "[1] * width",
        f"{GENERATION_TESTS}/test_decode.py::test_batching_and_left_padding_do_not_change_greedy_answers",
    ),
    Break(
        "batches-draw-alike",
        f"{GENERATION}/decode.py",
        "np.random.SeedSequence((seed, number))",
        "np.random.SeedSequence(seed)",
        f"{GENERATION_TESTS}/test_decode.py::test_samples_depend_on_the_seed_and_the_place_alone",
    ),
    Break(
        "end-token-cut-off",
        f"{GENERATION}/decode.py",
        "enumerate(row, start=1) if token",
        "enumerate(row) if token",
        f"{GENERATION_TESTS}/test_decode.py::test_an_answer_stops_at_the_end_of_a_turn",
    ),
    Break(
        "length-penalty",
        f"{GENERATION}/beams.py",
        "float(((5 + length) / 6)",
        "float((length / 6)",
        f"{GENERATION_TESTS}/test_beams.py::test_the_penalty_is_that_of_gnmt",
    ),
    Break(
        "too-few-candidates",
        f"{GENERATION}/beams.py",
        "every_BC.topk(2 * beams)",
        "every_BC.topk(beams)",
        f"{GENERATION_TESTS}/test_beams.py::test_it_is_the_search_with_lists",
    ),
    Break(
        "search-ends-early",
        f"{GENERATION}/beams.py",
        "reachable_B = live_BK[:, 0] / settings.penalty(settings.max_length)",
        "reachable_B = live_BK[:, 0] / settings.penalty(length)",
        f"{GENERATION_TESTS}/test_beams.py",
    ),
    Break(
        "rollout-rank-ignored",
        f"{GENERATION}/rollout.py",
        "(number * self.world_size + self.rank) * len(items)",
        "number * len(items)",
        f"{GENERATION_TESTS}/test_rollout.py::test_ranks_and_micro_batches_do_not_change_an_answer",
    ),
    Break(
        "rollout-step-ignored",
        f"{GENERATION}/rollout.py",
        "(seed, step, row, _ROW_NOISE)",
        "(seed, row, _ROW_NOISE)",
        f"{GENERATION_TESTS}/test_rollout.py::test_the_same_prompts_are_answered_anew_in_another_step",
    ),
    Break(
        "rollout-share-reversed",
        f"{GENERATION}/rollout.py",
        ".random() < self.share",
        ".random() > self.share",
        f"{GENERATION_TESTS}/test_rollout.py::test_share_of_the_steps",
    ),
]
