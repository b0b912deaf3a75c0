"""Breaks of the student's own answers, by a server and in the log, and of what is learned from samples."""

from __future__ import annotations

from breaks import Break

SERVER, LAYERS = "llmdistill/generation/rollout_server.py", "llmdistill/factorize/vllm_layers.py"
DIVERGENCE, AGREEMENT = "llmdistill/losses/divergence.py", "llmdistill/losses/agreement.py"
SEEN, SEEN_RUNS = "tests/unit/generation/test_rollout.py", "tests/dist/test_rollouts.py"
SEEN_LAYERS = "tests/unit/factorize/test_vllm_plugin.py"
SEEN_LOSSES, SEEN_AGREEMENT = "tests/unit/losses/test_head.py", "tests/unit/losses/test_agreement.py"

BREAKS = [
    Break("weights-stay-at-the-start", SERVER, "if self._period != step // self.every:", "if False:", SEEN),
    Break("weights-handed-over-once", SERVER, "self._period = step // self.every", "self._period = 0", SEEN),
    Break("restarted-server-is-trusted", SERVER, "== self._stamp:", "is not ...:", SEEN),
    Break("another-training-is-not-noticed", SERVER, "if stamp is not None:", "if False:", SEEN),
    Break("cache-of-older-weights", SERVER, 'said.get("success", True)', "True", SEEN),
    Break(
        "padding-of-teachers-is-averaged",
        AGREEMENT,
        "cut(head, vocabulary) for head in taught.heads",
        "head for head in taught.heads",
        SEEN_AGREEMENT,
    ),
    Break(
        "equal-tokens-by-another-prompt",
        "llmdistill/experiments/equal.py",
        "[load_tokenizer(path) for path in tokenizers]",
        "[]",
        "tests/unit/experiments/test_equal.py",
    ),
    Break(
        "student-pools-as-the-teacher",
        "llmdistill/runtime/engine.py",
        "elif pooling is not None and",
        "elif False and",
        "tests/dist/test_sentences.py::test_the_student_says_by_which_pooling_it_learned",
    ),
    Break(
        "window-begins-with-half-a-character",
        "llmdistill/teacher/translated.py",
        "pieces = pieces[rest:]",
        "pass",
        "tests/unit/teacher/test_translated.py::test_a_window_may_begin_within_a_character",
    ),
    Break(
        "validations-count-as-tokens",
        "llmdistill/report/table.py",
        'if "tokens" in row',
        'if row["step"] > 0',
        "tests/unit/report/test_table.py",
    ),
    Break("server-asked-for-another-length", SERVER, '"max_tokens": self._longest,', '"max_tokens": 512,', SEEN),
    Break("ends-are-not-asked-for", SERVER, '"stop_token_ids": self._ends,', '"stop_token_ids": [],', SEEN),
    Break("every-answer-has-one-seed", SERVER, '"seed": prompt.seed,', '"seed": 0,', SEEN),
    Break(
        "sampled-token-outside-is-learned", SERVER, "<= max(found.ids) < self._vocabulary", "<= max(found.ids)", SEEN
    ),
    Break(
        "unreadable-weights-are-tried-for-ever",
        SERVER,
        "remedy=remedy, final=501)",
        "remedy=remedy)",
        f"{SEEN}::test_what_is_wrong_is_said_before_the_run",
    ),
    Break(
        "lost-server-is-asked-for-figures",
        "llmdistill/run/callbacks/own_answers.py",
        "state.is_last or state.signal or state.failure is not None or not",
        "state.is_last or state.signal or not",
        f"{SEEN_RUNS}::test_a_server_that_dies_costs_no_step",
    ),
    Break(
        "gap-to-the-answers-of-the-step-before",
        "llmdistill/run/callbacks/own_answers.py",
        "self.trainer.micro_batches(state.step)",
        "state.micro_batches",
        f"{SEEN_RUNS}::test_the_log_says_how_near_the_models_are",
    ),
    Break(
        "gradient-of-the-value",
        DIVERGENCE,
        "[log_ratio(log_p, log_q), torch",
        "[torch.ones_like(log_q[:, 0]), torch",
        SEEN_LOSSES,
    ),
    Break("log-ratio-upside-down", DIVERGENCE, "log_q[:, 0] - log_p[:, 0]", "log_p[:, 0] - log_q[:, 0]", SEEN_LOSSES),
    Break(
        "samples-of-given-answers",
        "llmdistill/methods/method.py",
        "if term.divergence.of_labels and not own:",
        "if False:",
        "tests/unit/methods/test_method.py",
    ),
    Break("likely-tokens-beyond-the-vocabulary", AGREEMENT, "part_nV[:, :vocabulary]", "part_nV", SEEN_AGREEMENT),
    Break(
        "likely-tokens-place-by-place",
        AGREEMENT,
        "own_nk[:, :, None] == teacher_Nk[here, None, :]",
        "own_nk == teacher_Nk[here]",
        SEEN_AGREEMENT,
    ),
    Break("new-weights-go-nowhere", LAYERS, "values[key] = value\n", "values[key] = value.clone()\n", SEEN_LAYERS),
    Break("new-biases-go-nowhere", LAYERS, "taken[index] = start", "pass", SEEN_LAYERS),
    Break(
        "new-square-matrices-are-not-turned", LAYERS, "elif hasattr(layer, TAKEN) and", "elif False and", SEEN_LAYERS
    ),
]
