"""Settings of fine-tuning on GLUE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmdistill.config.methods import MethodTable, check_names, with_teacher
from llmdistill.config.tasks import GridConfig


@dataclass(frozen=True, kw_only=True)
class GlueConfig(GridConfig):
    """The model to fine-tune, the tasks of GLUE, and the settings of the training."""

    model: str
    """Folder or hub name of the model: an encoder (dense, factorized or of a smaller shape) or a decoder."""
    teacher: str | None = None
    """Fine-tuned teachers to learn from: the folder of an earlier run of this command, a path with {task} in it, or,
    for one task, the folder of a model. Default: no teacher, only the labels."""
    baseline: str | None = None
    """Folder or hub name of a model to compare size and speed with; default: the first task's teacher."""
    tasks: list[str] | None = None
    """Tasks, separated by commas, such as rte,cola,sst2; default: all nine tasks."""
    output_dir: str | None = None
    """Folder for all output; default: runs/glue/MODEL, with the name of the method added if there is a teacher."""
    ds_config: str = "zero1"
    """DeepSpeed configuration: a JSON file, or the name of one that ships with llmdistill."""
    method: str | None = None
    """sft: the labels alone; the other methods learn from the teacher, and their settings are under their names.
    Default: kd with a teacher, sft without. If a method does not use the logits, such as minilm and minilmv2, the
    loss on the labels is added."""
    also: list[str] = field(default_factory=list)
    """Methods whose terms are added to those of `method`; the settings of each are under its name."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of forward and backward pass; auto is bf16 on a GPU that supports it, else fp32."""
    keep_models: bool = False
    """Keep the model of every run; by default only the best model of each task is kept."""
    trials_at_once: int = 1
    """Number of runs at the same time, each in its own process. The runs share the GPUs of the machine evenly (8 at
    once on 8 GPUs: one each), or its CPU cores if it has no GPU. With 1, the runs share this process."""
    speed: bool = True
    """Measure latency and throughput."""
    tsne: list[str] | None = None
    """Draw the outputs of a layer for the dev set of each task (t-SNE, KroneckerBERT Figure 4): for the best model
    of this run and for those of earlier runs, such as the teacher's. Give the folders of the earlier runs, separated
    by commas."""
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of each method that has settings, by its name. Users write them under that name."""

    def methods(self) -> list[str]:
        """All methods of the run, the main method first."""
        default = "sft" if self.teacher is None else "kd"
        return [default if self.method is None else self.method, *self.also]

    def __post_init__(self) -> None:
        """Raise a ValueError if a number is out of its range, or the methods contradict the teacher or each other."""
        super().__post_init__()
        if self.trials_at_once < 1:
            raise ValueError(f"--trials_at_once {self.trials_at_once}: give 1 or more")
        self._check_list("tasks", self.tasks, wanted="such as rte,cola")
        self._check_list("tsne", self.tsne, wanted="such as runs/glue/TEACHER")
        self._check_methods()

    def _check_methods(self) -> None:
        methods = self.methods()
        if "sft" in methods and self.also:
            raise ValueError(f"--also {self.also}: method sft has no teacher; make one of them the method")
        if methods != ["sft"] and self.teacher is None:
            raise ValueError(
                f"method {', '.join(methods)} needs a teacher: name fine-tuned ones with --teacher, or take method sft"
            )
        if self.copy_classifier and self.teacher is None:
            raise ValueError("--copy_classifier true: there is no teacher to copy it from; name one with --teacher")
        if len(set(methods)) < len(methods):
            raise ValueError(f"--also {self.also}, with method {methods[0]}: name each method once")

    def check_methods(self, known: MethodTable) -> None:
        """Check the methods against the table of all methods.

        Raises:
            ValueError: a method does not exist, or its settings do not work with fine-tuning.
        """
        teachers = with_teacher(known)
        check_names("method", self.methods()[:1], ["sft", *teachers])
        check_names("also", self.also, teachers)
        for name in self.methods():
            if known[name].searches_layer and self.method_settings[name].teacher_layer == "auto":
                raise ValueError(
                    f"--{name}.teacher_layer auto searches on a text, and there is none here: name a layer"
                )
