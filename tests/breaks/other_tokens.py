"""Breaks of what compares a teacher with another tokenizer: bytes, spans, prompts, and the losses."""

from __future__ import annotations

from breaks import Break

BYTES, TRANSLATED = "llmdistill/data/token_bytes.py", "llmdistill/teacher/translated.py"
LOSSES = "llmdistill/losses/other_tokens.py"
SEEN_BYTES, SEEN = "tests/unit/data/test_token_bytes.py", "tests/unit/teacher/test_translated.py"
SEEN_LOSSES = "tests/unit/losses/test_other_tokens.py"

BREAKS = [
    Break(
        "own-loop-reads-the-students-tokens",
        "llmdistill/run/loss.py",
        'asked = self._translated or self._tapped["teacher"]',
        'asked = self._tapped["teacher"]',
        "tests/unit/run/test_loss.py::test_the_same_tokens_with_other_numbers_change_nothing",
    ),
    Break("spans-behind-a-difference", BYTES, "common[common <= equal]", "common", SEEN_BYTES),
    Break("sentencepiece-without-spaces", BYTES, 'token.replace("▁", " ")', "token", SEEN_BYTES),
    Break("bytes-of-sentencepiece-as-text", BYTES, "bytes.fromhex(token[3:5])", "token.encode()", SEEN_BYTES),
    Break("added-space-in-the-text", BYTES, "parts[0] = parts[0][1:]", "pass", SEEN_BYTES),
    Break(
        "ends-by-their-names",
        BYTES,
        "return found | dict(zip(one.ends, other.ends, strict=True))",
        "return found",
        SEEN_BYTES,
    ),
    Break("first-token-of-a-row-is-a-label", TRANSLATED, "labels_BT[:, 0] = IGNORE_INDEX", "pass", SEEN),
    Break("first-token-without-a-predictor", TRANSLATED, "spans[1 : self._longest]", "spans[: self._longest]", SEEN),
    Break("tokens-beyond-the-teachers-positions", TRANSLATED, "spans[1 : self._longest]", "spans[1:]", SEEN),
    Break("span-begins-at-each-of-its-rows", TRANSLATED, "is_first & ~is_pair", "~is_pair", SEEN),
    Break("spans-of-sequences-share-numbers", TRANSLATED, "num_spans + np.cumsum", "np.cumsum", SEEN),
    Break("answer-cut-within-a-character", TRANSLATED, 'whole[: error.start].decode("utf-8")', "str(whole)", SEEN),
    Break("end-of-the-student-for-the-teacher", TRANSLATED, "found.append(end)", "found.append(index)", SEEN),
    Break(
        "student-asked-for-the-teacher",
        "llmdistill/tasks/instructions.py",
        "kept, self.teachers_tokenizer",
        "kept, self.tokenizer",
        "tests/unit/tasks/test_instruct.py",
    ),
    Break(
        "examples-of-a-cache-by-the-students-tokens",
        TRANSLATED,
        "sample_ids=tuple((sample_id(each.ids, each.spans >= 0),) for each in sequences)",
        "sample_ids=batch.sample_ids",
        SEEN,
    ),
    Break("likelihoods-without-tau", LOSSES, "+ TAU * rest_p", "+ rest_p", SEEN_LOSSES),
    Break(
        "likelihoods-pull-the-wrong-way",
        LOSSES,
        "(rest_p - rest_q) / rest_q",
        "(rest_q - rest_p) / rest_q",
        SEEN_LOSSES,
    ),
    Break(
        "likelihoods-of-a-chunk",
        LOSSES,
        "found.index_add_(0, spans_N[rows_n]",
        "found.index_copy_(0, spans_N[rows_n]",
        SEEN_LOSSES,
    ),
    Break(
        "no-class-for-the-rest", LOSSES, "has_rest = ours.has_rest or theirs.has_rest", "has_rest = False", SEEN_LOSSES
    ),
    Break("rest-has-no-gradient", LOSSES, "share * of_class_nC[:, -1:]", "0 * share", SEEN_LOSSES),
    Break("longer-vocabulary-is-cut", LOSSES, "sorted_p_nV[:, q_nV.shape[1] :].sum()", "0", SEEN_LOSSES),
    Break(
        "labels-not-learned-beside-spans",
        "llmdistill/losses/fused/head_chunk.py",
        "student_NV + gradients if hard",
        "gradients if hard",
        SEEN_LOSSES,
    ),
    Break(
        "ends-that-differ-unsaid",
        "llmdistill/data/chat.py",
        "if their_end != our_end:",
        "if False:",
        "tests/unit/data/test_prompts.py",
    ),
    Break(
        "gaps-not-in-the-plan",
        "llmdistill/run/plan.py",
        "else [note]), *gaps]",
        "else [note])]",
        "tests/unit/run/test_checkup.py",
    ),
]
