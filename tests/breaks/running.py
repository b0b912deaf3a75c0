"""Breaks of training, checkpoints, caches and configuration."""

from __future__ import annotations

from breaks import Break

RUN = "llmdistill/run"
RUN_TESTS = "tests/unit/run"
GENERATION = "llmdistill/generation"
GENERATION_TESTS = "tests/unit/generation"
TRAINER = f"{RUN_TESTS}/test_trainer.py"
CHECKPOINTS = f"{RUN_TESTS}/test_checkpoints.py"
RESTORED = f"{CHECKPOINTS}::test_a_restored_engine_goes_on_as_the_one_that_was_saved"

BREAKS = [
    # collator
    Break(
        "first-token-is-label",
        "llmdistill/batch.py",
        "(self.labels[:, 1:] != IGNORE_INDEX).sum()",
        "(self.labels != IGNORE_INDEX).sum()",
        "tests/unit/test_batch.py::test_which_sequences_have_a_target",
    ),
    # trainer and callbacks
    Break(
        "accumulation-averaged",
        f"{RUN}/trainer.py",
        "self.world.size * len(batches)",
        "self.world.size",
        f"{TRAINER}::test_loss_is_divided_once_by_the_global_counts",
    ),
    Break(
        "ranks-averaged",
        f"{RUN}/trainer.py",
        "self.world.size * len(batches)",
        "len(batches)",
        f"{TRAINER}::test_loss_is_divided_once_by_the_global_counts",
    ),
    Break(
        "ranks-draw-alike",
        f"{RUN}/trainer.py",
        "* 65_537 + self.world.rank)",
        "* 65_537)",
        f"{TRAINER}::test_every_step_and_rank_draws_its_own_random_numbers",
    ),
    Break(
        "steps-draw-alike",
        f"{RUN}/trainer.py",
        "(self.seed * 1_000_003 + step)",
        "(self.seed * 1_000_003)",
        f"{TRAINER}::test_every_step_and_rank_draws_its_own_random_numbers",
    ),
    Break(
        "validation-of-last-batch",
        f"{RUN}/callbacks/validation.py",
        "sums += torch.stack(",
        "sums = torch.stack(",
        f"{TRAINER}::test_validation_loss_is_the_mean_over_all_answer_tokens",
    ),
    Break(
        "last-step-not-due",
        f"{RUN}/callbacks/base.py",
        "(self.step % every == 0 or self.is_last)",
        "self.step % every == 0",
        f"{TRAINER}::test_validation_checkpoints_and_rows_of_the_log_come_where_they_are_due",
    ),
    Break(
        "log-sum-for-mean",
        f"{RUN}/callbacks/log_rows.py",
        "value / self._steps",
        "value",
        f"{TRAINER}::test_a_row_has_the_means_of_the_applied_steps_without_another_sum_over_the_ranks",
    ),
    Break(
        "fourth-skipped-step",
        f"{RUN}/callbacks/finite.py",
        "self.in_a_row == LIMIT",
        "self.in_a_row > LIMIT",
        f"{RUN_TESTS}/test_finite.py::test_skipped_steps_go_on_until_the_third_in_a_row",
    ),
    Break(
        "skipped-steps-not-in-a-row",
        f"{RUN}/callbacks/finite.py",
        "self.in_a_row = 0",
        "pass",
        f"{RUN_TESTS}/test_finite.py::test_skipped_steps_go_on_until_the_third_in_a_row",
    ),
    Break(
        "best-of-equal-losses",
        f"{RUN}/callbacks/best.py",
        'value < best["value"]',
        'value <= best["value"]',
        f"{RUN_TESTS}/test_best.py::test_the_smallest_loss_is_kept_and_of_equal_ones_the_first",
    ),
    Break(
        "best-score-is-smallest",
        f"{RUN}/callbacks/best.py",
        'value > best["value"]',
        'value < best["value"]',
        f"{RUN_TESTS}/test_best.py::test_the_largest_score_is_kept_whatever_the_losses_are",
    ),
    Break(
        "any-loss-is-a-jump",
        f"{RUN}/callbacks/loss_watch.py",
        " and loss > max(self._before)",
        "",
        f"{RUN_TESTS}/test_finite.py::TestLossWatch::test_a_first_loss_is_no_jump_and_neither_is_one_that_was_there_before",
    ),
    Break(
        "warm-up-from-zero",
        "llmdistill/runtime/engine.py",
        "settings.learning_rate * (step + 1) /",
        "settings.learning_rate * step /",
        "tests/unit/runtime/test_engine.py::test_decay_is_that_of_transformers",
    ),
    Break(
        "biases-decay",
        "llmdistill/runtime/engine.py",
        '"weight_decay": 0.0}',
        '"weight_decay": weight_decay}',
        "tests/unit/runtime/test_engine.py::test_biases_and_norms_do_not_decay_and_what_is_not_trained_is_left_out",
    ),
    Break(
        "accumulation-without-ranks",
        "llmdistill/runtime/engine.py",
        "BatchSplit(micro_batch_size, global_batch_size // unit)",
        "BatchSplit(micro_batch_size, global_batch_size // micro_batch_size)",
        "tests/unit/runtime/test_ds_config.py::test_accumulation_is_derived",
    ),
    # checkpoints and sharding
    Break(
        "oldest-checkpoints-kept",
        f"{RUN}/checkpoints.py",
        "[-keep:]",
        "[:keep]",
        f"{CHECKPOINTS}::test_only_complete_checkpoints_count_and_the_newest_stay",
    ),
    Break(
        "checkpoints-by-name",
        f"{RUN}/checkpoints.py",
        "key=lambda each: each.step)",
        "key=lambda each: each.folder)",
        f"{CHECKPOINTS}::test_only_complete_checkpoints_count_and_the_newest_stay",
    ),
    Break(
        "adam-step-forgotten",
        f"{RUN}/checkpoints.py",
        'set_counters(engine, state["counters"])',
        "set_counters(engine, {})",
        RESTORED,
    ),
    Break(
        "micro-steps-forgotten",
        f"{RUN}/checkpoints.py",
        "found.step * engine.gradient_accumulation_steps()",
        "found.step",
        RESTORED,
    ),
    Break(
        "moments-not-restored",
        "llmdistill/runtime/training_state.py",
        "_viewed(name, kind, 0, value.view(-1))",
        "_viewed(name, kind, 0, value.clone().view(-1))",
        RESTORED,
    ),
    Break(
        "shards-from-zero",
        "llmdistill/runtime/training_state.py",
        "size * dist.get_rank(parameter.ds_process_group)",
        "0",
        "tests/dist/test_main_job.py::test_a_run_goes_on_at_another_layout",
    ),
    Break(
        "every-rank-the-same-jobs",
        f"{GENERATION}/decode.py",
        "number = first + world.rank",
        "number = first",
        f"{GENERATION_TESTS}/test_decode.py::test_every_job_is_one_rank_s_and_shares_differ_by_one",
    ),
    # caches
    Break(
        "cache-samples-from-one",
        "llmdistill/teacher/rows.py",
        "+ batch.attention_mask - 1",
        "+ batch.attention_mask",
        "tests/unit/run/cache/test_made.py::test_losses_and_gradients_are_those_of_the_live_teacher",
    ),
    Break(
        "cache-vocabulary-whole",
        "llmdistill/teacher/rows.py",
        "head.weight[:vocabulary]",
        "head.weight",
        "tests/unit/teacher/test_rows.py::test_most_likely_tokens_come_from_the_shared_vocabulary",
    ),
    Break(
        "cache-heads-and-tokens-swapped",
        "llmdistill/teacher/rows.py",
        "whole.transpose(1, 2) if whole.dim() == 4 else whole",
        "whole",
        "tests/unit/run/cache/test_made.py::test_losses_and_gradients_are_those_of_the_live_teacher",
    ),
    Break(
        "cache-places-not-sorted",
        "llmdistill/teacher/cache_folder.py",
        "all_ids[order], all_places[order]",
        "all_ids[order], all_places",
        f"{RUN_TESTS}/cache/test_made.py::test_losses_and_gradients_are_those_of_the_live_teacher",
    ),
    Break(
        "cache-of-any-size-is-sensible",
        f"{RUN}/forecast/caching.py",
        "size is not None and size <= most",
        "size is not None",
        f"{RUN_TESTS}/cache/test_made.py::test_forecast_of_its_size_is_its_size",
    ),
    # configuration and published values
    Break(
        "steps-beside-epochs",
        "llmdistill/config/training.py",
        'metadata=COMMON | replaces("train.epochs")',
        "metadata=COMMON",
        "tests/unit/config/test_overrides.py::test_settings_that_exclude_each_other_replace_each_other",
    ),
    Break(
        "disagreement-accepted",
        "llmdistill/runtime/ds_config.py",
        "elif given != value:",
        "elif False:",
        "tests/unit/runtime/test_ds_config.py::test_disagreement_names_key_values_and_remedy",
    ),
    Break(
        "figure-mistyped",
        "llmdistill/suites/minilm-table5.yaml",
        "71.0",
        "71.3",
        "tests/unit/experiments/test_tables.py::test_tables_without_averages_have_the_papers_figures",
    ),
    # trackers
    Break(
        "tracker-gets-a-step-twice",
        f"{RUN}/trackers.py",
        "if step > self.last:",
        "if step >= self.last:",
        f"{RUN_TESTS}/test_trackers.py::test_a_killed_run_goes_on_in_the_same_tracker_and_sends_no_step_twice",
    ),
    Break(
        "tensorboard-loses-the-step-of-the-checkpoint",
        f"{RUN}/trackers.py",
        "0 if start == 0 else start + 1",
        "start",
        f"{RUN_TESTS}/test_trackers.py::test_tensorboard_shows_no_step_of_a_killed_process",
    ),
    Break(
        "tracker-mixes-rows-of-two-learning-rates",
        f"{RUN}/trackers.py",
        'if tracker.last > start and entry["shaping"] != shaping:',
        'if tracker.last > start and entry["shaping"] is None:',
        f"{RUN_TESTS}/test_trackers.py::test_other_rows_than_were_sent_make_another_run",
    ),
    # run folder
    Break(
        "validation-free-where-it-chooses",
        f"{RUN}/artifacts.py",
        '"loss": ("data.valid", "train.validate_every")',
        '"loss": ("data.valid",)',
        f"{RUN_TESTS}/test_artifacts.py::test_what_validates_belongs_to_a_run_that_keeps_its_best_student",
    ),
    Break(
        "own-products-are-inputs",
        f"{RUN}/artifacts.py",
        "made_below is None else Path(made_below).resolve()",
        "made_below is None else None",
        f"{RUN_TESTS}/test_artifacts.py::test_what_a_run_makes_itself_is_no_input",
    ),
    Break(
        "disk-without-the-checkpoint-that-is-written",
        f"{RUN}/disk.py",
        "config.train.keep_checkpoints + 1 if saves",
        "config.train.keep_checkpoints if saves",
        f"{RUN_TESTS}/test_disk.py::test_the_need_is_that_of_the_files_of_a_run",
    ),
    Break(
        "model-that-is-not-finite-by-a-loop-variable",
        f"{RUN}/origin.py",
        "found.append(places[module])",
        "found.append((called, places[module][1]))",
        f"{RUN_TESTS}/test_finite.py::TestOrigin",
    ),
    # forecast
    Break(
        "gradients-unsharded",
        f"{RUN}/forecast/layout.py",
        "own = 0 if self.zero.offloads_optimizer else self.share",
        "own = 0 if self.zero.offloads_optimizer else self.sizes.trained",
        f"{RUN_TESTS}/forecast/test_layout.py::test_parts_of_each_ds_config",
    ),
    Break(
        "ring-sends-to-itself",
        f"{RUN}/forecast/layout.py",
        "return (ranks - 1) / ranks * sent +",
        "return sent +",
        f"{RUN_TESTS}/forecast/test_layout.py::test_bytes_on_the_wire",
    ),
    Break(
        "nodes-share-the-teacher-over-all-ranks",
        f"{RUN}/forecast/layout.py",
        'return {"node": machine.ranks_of_node, "zero3": machine.ranks}',
        'return {"node": machine.ranks, "zero3": machine.ranks}',
        f"{RUN_TESTS}/forecast/test_layout.py::test_teacher_of_a_node_is_shared_by_its_ranks_and_sends_within_it",
    ),
    Break(
        "tight-choices-first",
        f"{RUN}/forecast/choices.py",
        "loose = [choice for choice in fitting if not choice.tight]",
        "loose = [choice for choice in fitting if choice.tight]",
        f"{RUN_TESTS}/forecast/test_choices.py::test_tight_only_if_nothing_else_fits",
    ),
    Break(
        "a-term-alone-is-uneven",
        f"{RUN}/callbacks/uneven_terms.py",
        "elif norm > LARGE * total and len(gradients) > 1:",
        "elif norm > LARGE * total:",
        f"{RUN_TESTS}/test_finite.py::TestLossWatch",
    ),
]
