"""Breaks of what tasks read, keep, score and write, of generated answers, and of the embedded world."""

from __future__ import annotations

from breaks import Break

TASKS = "llmdistill/tasks"
TESTS = "tests/unit/tasks"
GENERATION = "llmdistill/generation"
GENERATION_TESTS = "tests/unit/generation"

BREAKS = [
    Break(
        "read-changes-the-task",
        f"{TASKS}/base.py",
        "task = copy.copy(self)",
        "task = self",
        f"{TESTS}/test_classification.py::test_the_steps_of_an_epoch_of_glue_learn_each_example",
    ),
    Break(
        "folder-of-a-task-unchecked",
        f"{TASKS}/benchmark.py",
        "        cls.files_in(folder, key, setting=setting)\n",
        "",
        f"{TESTS}/test_squad_files.py::test_files_and_languages_that_are_not_there",
    ),
    Break(
        "changed-files-unseen",
        f"{TASKS}/stored.py",
        '"examples": hashes if files is None else files.digest',
        '"examples": None',
        f"{TESTS}/test_stored.py::test_other_files_and_settings_are_tokenized_anew",
    ),
    Break(
        "values-in-order-of-length",
        f"{TASKS}/forward.py",
        "[found[index] for index in range(len(items))]",
        "list(found.values())",
        f"{TESTS}/test_spans.py::test_the_best_span_of_all_windows {TESTS}/test_sentences.py",
    ),
    Break(
        "mrpc-dev-is-learned",
        f"{TASKS}/glue_files.py",
        'in dev) == (split == "dev")',
        'in dev) != (split == "dev")',
        f"{TESTS}/test_glue_files.py::test_original_mrpc",
    ),
    Break(
        "torn-lines-everywhere",
        f"{TASKS}/glue_files.py",
        "elif is_test or not task.has_torn_lines",
        "elif not task.has_torn_lines",
        f"{TESTS}/test_glue_files.py::test_lines_of_qqp_that_are_torn_are_left_out",
    ),
    Break(
        "misplaced-answers-are-learned",
        f"{TASKS}/squad_files.py",
        "train = [question for question in found if question.is_located]",
        "train = found",
        f"{TESTS}/test_squad_files.py::test_a_training_set_without_a_located_answer",
    ),
    Break(
        "mlqa-averages-dev",
        f"{TASKS}/squad_files.py",
        'is_averaged=name != "dev" and pair.context == pair.question',
        "is_averaged=pair.context == pair.question",
        f"{TESTS}/test_squad_files.py::test_mlqa_learns_english_and_is_scored_by_language",
    ),
    Break(
        "hints-are-mixed",
        f"{TASKS}/writing_files.py",
        "groups.setdefault((example.source, example.hint), [])",
        "groups.setdefault((example.source, None), [])",
        f"{TESTS}/test_writing.py::test_examples_of_one_source_are_one_with_several_references",
    ),
    Break(
        "pair-with-itself",
        f"{TASKS}/sentences.py",
        "embeddings[::2], embeddings[1::2]",
        "embeddings[::2], embeddings[::2]",
        f"{TESTS}/test_sentences.py::test_the_score_is_spearmans_correlation_of_the_cosines",
    ),
    Break(
        "chosen-by-the-last-metric",
        f"{TASKS}/benchmark.py",
        'columns[self.column("dev")][self.metrics[0]]',
        'columns[self.column("dev")][self.metrics[-1]]',
        f"{TESTS}/test_writing.py::test_summary_and_table",
    ),
    Break(
        "submission-in-order-of-reading",
        f"{TASKS}/classification.py",
        "in sorted(texts.items())",
        "in texts.items()",
        f"{TESTS}/test_classification.py::test_files_for_the_server",
    ),
    Break(
        "chance-against-own-references",
        f"{TASKS}/rouge.py",
        "[*references[far:], *references[:far]]",
        "references",
        f"{TESTS}/test_text_metrics.py::test_the_other_score_is_that_of_other_questions",
    ),
    Break(
        "deviation-of-a-population",
        f"{TASKS}/answers.py",
        "statistics.stdev(",
        "statistics.pstdev(",
        f"{TESTS}/test_instruct.py::test_score_is_the_mean_over_seeds_and_predictions_are_kept",
    ),
    Break(
        "spans-in-order-of-kind",
        f"{TASKS}/chunk_files.py",
        "[drawn[index] for index in rng.permutation(len(drawn))]",
        "drawn",
        f"{TESTS}/test_chunk_files.py::test_spans_are_drawn_once_each_of_both_kinds_and_by_the_seed",
    ),
    Break(
        "torn-line-stays",
        f"{GENERATION}/answers_file.py",
        "if whole < len(content)",
        "if whole > len(content)",
        f"{GENERATION_TESTS}/test_responses.py::test_an_interrupted_run_goes_on_and_ends_byte_equal",
    ),
    Break(
        "finished-answers-counted",
        f"{GENERATION}/responses.py",
        "ids[-1] not in ends",
        "ids[-1] in ends",
        f"{GENERATION_TESTS}/test_responses.py::test_rows_are_the_teachers_greedy_answers_and_the_record_counts_them",
    ),
    Break(
        "one-random-stream",
        f"{GENERATION}/rollout.py",
        "manual_seed(seed) for seed in seeds",
        "manual_seed(seeds[0]) for _ in seeds",
        f"{GENERATION_TESTS}/test_rollout.py",
    ),
    Break(
        "minimum-length-off-by-one",
        f"{GENERATION}/beams.py",
        "if length <= settings.min_length",
        "if length < settings.min_length",
        f"{GENERATION_TESTS}/test_beams.py::test_it_is_the_search_with_lists",
    ),
    Break(
        "vllm-scores-shifted",
        f"{GENERATION}/vllm_engine.py",
        "(result.prompt_logprobs or [])[1:]",
        "(result.prompt_logprobs or [])[:-1]",
        "tests/unit/run/cache/test_made.py::test_vllm_writes_the_likely_tokens_that_the_teacher_writes",
    ),
    Break(
        "fewer-usual-answers",
        "llmdistill/embedded/corpus.py",
        "USUAL_SHARE = 0.8",
        "USUAL_SHARE = 0.7",
        "tests/unit/embedded/test_corpus.py::test_shipped_files_are_what_the_generator_makes",
    ),
    Break(
        "answer-beside-its-place",
        "llmdistill/embedded/questions.py",
        '"answer_start": len(context)}',
        '"answer_start": len(context) + 1}',
        "tests/unit/embedded/test_questions.py::test_the_answer_is_the_fact_and_no_answer_is_no_sentence",
    ),
]
