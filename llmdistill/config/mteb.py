"""Settings of the tasks of sentence embeddings, which MTEB defines and scores."""

from __future__ import annotations

from dataclasses import dataclass

from llmdistill.config.side_by_side import SideBySideConfig
from llmdistill.errors import check_least


@dataclass(frozen=True, kw_only=True)
class MtebConfig(SideBySideConfig):
    """The encoders to score, and the tasks of MTEB."""

    tasks: list[str] | None = None
    """Tasks of MTEB, separated by commas, such as STSBenchmark,Banking77Classification.v2."""
    benchmark: str | None = None
    """A benchmark of MTEB instead, which stands for its tasks, such as "MTEB(eng)" for the English one."""
    languages: list[str] | None = None
    """Score --tasks only in these languages, by their three letters (ISO 639-3), separated by commas: eng,deu."""
    batch_size: int = 32
    """Texts in a forward pass."""
    max_length: int | None = None
    """Largest number of tokens of a text, whose end is cut off; default: as the files of sentence-transformers beside
    the model say, else 512, and never more than the model's positions."""

    def __post_init__(self) -> None:
        """Raise a ValueError if a list is empty, a name occurs twice, or a number is out of its range."""
        super().__post_init__()
        check_least(self, 1, "batch_size", "max_length", prefix="--")
        if (self.tasks is None) == (self.benchmark is None):
            raise ValueError("--tasks or --benchmark: give one of them, names of tasks or the name of a benchmark")
        if self.benchmark is not None and self.languages is not None:
            raise ValueError("--languages: a benchmark has its own languages; leave it out, or give --tasks")
        for key in ("tasks", "languages"):
            if getattr(self, key) is not None:
                self._check_list(key)
