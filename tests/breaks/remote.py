"""Breaks of a teacher behind a server."""

from __future__ import annotations

from breaks import Break

REMOTE = "llmdistill/teacher/remote.py"
REMOTE_TESTS = "tests/unit/teacher/test_remote.py"
LOST = "tests/dist/test_remote_teacher.py::test_a_server_that_dies_costs_no_step"

BREAKS = [
    Break(
        "lost-server-found-in-the-step",
        "llmdistill/run/callbacks/answers.py",
        "on_every(lambda: teacher.wait(batches), self.trainer.world)",
        "on_every(lambda: None, self.trainer.world)",
        LOST,
    ),
    Break(
        "lost-server-saves-nothing",
        "llmdistill/run/callbacks/checkpoints.py",
        "if state.signal or state.failure is not None or state.is_due",
        "if state.signal or state.is_due",
        LOST,
    ),
    Break(
        "padding-has-answers",
        REMOTE,
        'torch.searchsorted(batch.rows_at("tokens"), batch.rows_at(place))',
        "batch.rows_at(place)",
        f"{REMOTE_TESTS}::test_the_likely_tokens_are_those_of_the_model_alone",
    ),
    Break(
        "packed-row-is-one-sequence",
        REMOTE,
        "ids_T[mask_T == number]",
        "ids_T[mask_T > 0]",
        f"{REMOTE_TESTS}::test_the_likely_tokens_are_those_of_the_model_alone",
    ),
    Break(
        "lost-at-the-first-failure",
        "llmdistill/generation/model_server.py",
        "max(began, self._answered) >= self._wait",
        "max(began, self._answered) >= 0",
        f"{REMOTE_TESTS}::test_a_request_that_fails_is_repeated",
    ),
    Break(
        "asked-in-the-step",
        REMOTE,
        "return [self.ask(batch) for batch in self.loader.micro_batches(step)]",
        "return [batch for batch in self.loader.micro_batches(step)]",
        f"{REMOTE_TESTS}::test_what_was_asked_before_is_not_asked_again",
    ),
    Break(
        "token-outside-is-learned",
        REMOTE,
        "<= int(top.tokens.max()) < self._vocabulary:",
        "<= int(top.tokens.max()):",
        f"{REMOTE_TESTS}::test_what_is_wrong_with_a_server_is_said",
    ),
    Break(
        "least-likely-tokens",
        "llmdistill/generation/vllm_engine.py",
        "np.lexsort((ids, values))[:, ::-1][:, :k]",
        "np.lexsort((ids, values))[:, :k]",
        f"{REMOTE_TESTS}::test_the_likely_tokens_are_those_of_the_model_alone",
    ),
]
