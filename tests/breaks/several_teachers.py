"""Breaks of what makes one teacher of several: averages, the rows that ask for one, and the caches of each."""

from __future__ import annotations

from breaks import Break

LOSSES, TEACHERS = "llmdistill/losses/several.py", "llmdistill/teacher/several.py"
SEEN_LOSSES, SEEN = "tests/unit/losses/test_several.py", "tests/unit/teacher/test_several.py"
SEEN_RUNS = "tests/dist/test_several_teachers.py"

BREAKS = [
    Break("weights-of-teachers-left-out", LOSSES, "log_p_nV.add_(math.log(weight))", "log_p_nV", SEEN_LOSSES),
    Break("geometric-mean-without-weights", LOSSES, "log_p_nV.mul_(weight)", "log_p_nV", SEEN_LOSSES),
    Break(
        "averages-of-logits",
        LOSSES,
        "exact_logits(head, here).log_softmax(-1)",
        "exact_logits(head, here)",
        SEEN_LOSSES,
    ),
    Break(
        "own-rows-in-the-order-of-teachers",
        LOSSES,
        "np.argsort(np.concatenate(order))",
        "np.concatenate(order)",
        SEEN_LOSSES,
    ),
    Break(
        "padding-of-one-teacher-is-compared",
        "llmdistill/losses/head.py",
        "cut(head, vocabulary) for head in",
        "head for head in",
        SEEN_LOSSES,
    ),
    Break("weights-are-not-scaled", TEACHERS, "weight / total for", "weight for", SEEN),
    Break(
        "idle-sharded-teacher-does-not-run", TEACHERS, "if not own and name not in self.together", "if not own", SEEN
    ),
    Break(
        "rows-of-an-idle-teacher-count", TEACHERS, "head if own else head._replace(rows=head.rows[:0])", "head", SEEN
    ),
    Break(
        "packed-rows-mix-teachers",
        "llmdistill/data/collate.py",
        "if item.teacher == teacher]",
        "if teacher == items[0].teacher]",
        SEEN,
    ),
    Break(
        "answers-forget-their-teacher",
        "llmdistill/generation/rollout.py",
        "Encoded(item.prompt_ids, row.ids, item.teacher)",
        "Encoded(item.prompt_ids, row.ids)",
        "tests/unit/generation/test_rollout.py",
    ),
    Break(
        "stored-rows-forget-their-teacher",
        "llmdistill/data/instruct.py",
        "response_ids[:room], examples[index].teacher",
        "response_ids[:room]",
        SEEN_RUNS,
    ),
    Break(
        "cache-of-another-of-several-teachers",
        "llmdistill/run/cache.py",
        "path, dtype = models.others[name].path, models.others[name].dtype",
        "pass",
        SEEN_RUNS,
    ),
    Break(
        "teachers-cache-has-all-rows",
        "llmdistill/run/cache.py",
        "if item.teacher == name]",
        "]",
        SEEN_RUNS,
    ),
]
