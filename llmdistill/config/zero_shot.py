"""Settings of the zero-shot tasks, which lm-evaluation-harness defines and scores."""

from __future__ import annotations

from dataclasses import dataclass

from llmdistill.config.side_by_side import SideBySideConfig
from llmdistill.errors import check_least


@dataclass(frozen=True, kw_only=True)
class ZeroShotConfig(SideBySideConfig):
    """The decoders to score, and the tasks of lm-evaluation-harness."""

    tasks: list[str]
    """Tasks, groups or tags of lm-evaluation-harness, separated by commas, such as arc_easy,hellaswag,piqa."""
    task_dir: str | None = None
    """Folder with tasks of your own, in the harness's YAML; they are added to those that come with it."""
    num_fewshot: int | None = None
    """Number of solved examples before each question; default: as the task says, mostly 0."""
    limit: int | None = None
    """Score only the first so many examples of each task, for a quick test."""
    batch_size: int = 16
    """Sequences in a forward pass."""
    max_length: int | None = None
    """Largest number of tokens of a question and its answer, whose start is cut off; default: the model's positions."""

    def __post_init__(self) -> None:
        """Raise a ValueError if a list is empty, a name occurs twice, or a number is out of its range."""
        super().__post_init__()
        check_least(self, 1, "limit", "batch_size", "max_length", prefix="--")
        check_least(self, 0, "num_fewshot", prefix="--")
        self._check_list("tasks")
