"""Breaks of data, training, checkpoints, caches and configuration."""

from __future__ import annotations

from breaks import Break

DATA = "llmdistill/data"
DATA_TESTS = "tests/unit/data"
RUN = "llmdistill/run"
RUN_TESTS = "tests/unit/run"
GENERATION = "llmdistill/generation"
GENERATION_TESTS = "tests/unit/generation"
SAMPLER = f"{DATA_TESTS}/test_sampler.py"
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
        f"{TRAINER}::test_first_token_is_no_label",
    ),
    Break(
        "prompt-is-learned",
        f"{DATA}/collate.py",
        "first = max(learned, len(item.prompt_ids))",
        "first = learned",
        f"{DATA_TESTS}/test_collate.py::test_right_padding_labels_and_mask",
    ),
    Break(
        "packed-first-token-learned",
        f"{DATA}/collate.py",
        "_labels(item, learned=1)",
        "_labels(item)",
        f"{DATA_TESTS}/test_packing.py::test_the_first_token_of_an_example_is_no_label",
    ),
    Break(
        "packed-numbers-from-zero",
        f"{DATA}/collate.py",
        "enumerate(row, start=1)",
        "enumerate(row)",
        f"{DATA_TESTS}/test_packing.py::test_rows_masks_positions_and_labels",
    ),
    Break(
        "packed-row-not-filled",
        f"{DATA}/collate.py",
        "used + lengths[index] <= max_length",
        "used + lengths[index] < max_length",
        f"{DATA_TESTS}/test_packing.py::test_first_fit_decreasing",
    ),
    Break(
        "sample-id-without-parts",
        f"{DATA}/collate.py",
        'digest.update(len(tokens).to_bytes(8, "little"))',
        "pass",
        f"{DATA_TESTS}/test_collate.py::test_where_the_parts_end_counts_and_segments_do",
    ),
    Break(
        "no-token-kept-as-it-is",
        f"{DATA}/masking.py",
        "dice < 0.9",
        "dice < 1.0",
        f"{DATA_TESTS}/test_masking.py::TestTokens::test_of_ten_chosen_eight_are_masked_one_is_replaced_and_one_stays",
    ),
    Break(
        "one-word-too-few",
        f"{DATA}/masking.py",
        "int(np.searchsorted(reached, number)) + 1",
        "int(np.searchsorted(reached, number))",
        f"{DATA_TESTS}/test_masking.py::TestWholeWords::test_are_chosen_as_a_whole_until_the_number_is_reached",
    ),
    Break(
        "window-answer-end",
        f"{DATA}/windows.py",
        "len(answer.text.rstrip()) - 1",
        "len(answer.text.rstrip())",
        f"{DATA_TESTS}/test_windows.py::test_windows_slide_over_a_long_context",
    ),
    # sampler
    Break(
        "sampler-seed-not-used",
        f"{DATA}/sampler.py",
        "default_rng((seed, epoch))",
        "default_rng(epoch)",
        f"{SAMPLER}::test_seed_and_step_alone_decide",
    ),
    Break(
        "sampler-epochs-alike",
        f"{DATA}/sampler.py",
        "default_rng((seed, epoch))",
        "default_rng(seed)",
        f"{SAMPLER}::test_each_epoch_is_a_permutation_and_batches_straddle_epochs",
    ),
    Break(
        "sampler-rank-ignored",
        f"{DATA}/sampler.py",
        "range(rank * micro_batch_size, len(batch), stride)",
        "range(0, len(batch), stride)",
        f"{SAMPLER}::test_ranks_and_micro_batches_make_up_the_global_batch",
    ),
    Break(
        "sampler-spread-over-ranks",
        f"{DATA}/sampler.py",
        "in range(rank, parts, world_size)]",
        "in range(rank, parts)]",
        f"{SAMPLER}::test_ranks_and_micro_batches_do_not_change_what_a_step_learns",
    ),
    Break(
        "buckets-in-order",
        f"{DATA}/sampler.py",
        "ordered[taken * size : (taken + 1) * size]",
        "ordered[offset * size : (offset + 1) * size]",
        f"{SAMPLER}::test_a_window_is_sorted_and_cut_into_its_steps",
    ),
    Break(
        "filler-is-scored",
        f"{DATA}/sampler.py",
        "_unlearned(collate([items[index] for index in parts[0]]))",
        "collate([items[index] for index in parts[0]])",
        f"{TRAINER}::test_validation_loss_is_the_mean_over_all_answer_tokens",
    ),
    Break(
        "epoch-of-first-place",
        f"{DATA}/sampler.py",
        "(first + offset) // size * size + index",
        "first // size * size + index",
        f"{DATA_TESTS}/test_text.py::TestOrder::test_each_epoch_masks_other_tokens_even_within_a_batch",
    ),
    Break(
        "mixture-linear",
        f"{DATA}/mixture.py",
        "size**exponent",
        "size * exponent",
        f"{DATA_TESTS}/test_mixture.py::test_an_epoch_has_the_shares_of_the_formula",
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
        f"{TRAINER}::test_the_average_of_the_engine_over_ranks_is_undone",
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
        f"{TRAINER}::test_validation_stands_in_the_log_where_it_is_due",
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
        "tests/unit/runtime/test_schedule.py::test_decay_is_that_of_transformers",
    ),
    Break(
        "biases-decay",
        "llmdistill/runtime/engine.py",
        '"weight_decay": 0.0}',
        '"weight_decay": weight_decay}',
        "tests/unit/runtime/test_engine.py::test_biases_and_norms_do_not_decay",
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
        "tests/dist/test_checkpoints.py::test_a_run_goes_on_at_another_layout",
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
        "tests/unit/teacher/test_rows.py::test_rows_of_a_decoder_fit_any_batch_of_its_examples",
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
        "tests/unit/teacher/test_rows.py::test_rows_of_a_decoder_fit_any_batch_of_its_examples",
    ),
    Break(
        "cache-places-not-sorted",
        "llmdistill/teacher/cache_folder.py",
        "all_ids[order], all_places[order]",
        "all_ids[order], all_places",
        f"{RUN_TESTS}/test_cache.py::test_losses_and_gradients_are_those_of_the_live_teacher",
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
