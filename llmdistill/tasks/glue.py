"""GLUE tasks: a model with a classifier is fine-tuned on one task and scored on its dev split by GLUE's metrics."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.config import RunConfig
from llmdistill.data.pairs import PAIRS, EncodedPair, PairExample, encode_pairs
from llmdistill.data.store import SplitWriter, in_pieces
from llmdistill.errors import UserError
from llmdistill.files import write_text
from llmdistill.models.heads import CLASSES, SCORES
from llmdistill.objective import Objective
from llmdistill.runtime.distributed import World
from llmdistill.tasks.base import ScoredModel
from llmdistill.tasks.benchmark import Benchmark
from llmdistill.tasks.classification import chance_score, targets_of, task_metrics, write_submission
from llmdistill.tasks.forward import scoring_forward, values_of
from llmdistill.tasks.glue_files import (
    DEV,
    GLUE_TASKS,
    HUB_NAME,
    TEST,
    GlueTask,
    Metric,
    PairSet,
    Split,
    column_of,
    glue_name,
    read_split,
    task_paths,
)
from llmdistill.tasks.out_of_domain import check_set, read_set, sets_of
from llmdistill.tasks.stored import TaskFiles


class Glue(Benchmark):
    """One task of GLUE."""

    head = "sequence"
    usual_length = 128
    schema = PAIRS
    hub = HUB_NAME

    def __init__(self, config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> None:
        """Find the task and its folder; raise UserError if there is none."""
        super().__init__(config, trains=trains, teacher_writes=teacher_writes)
        self.name = glue_name(self.key)
        metrics, asked = self.task.metrics, config.data.task.metric
        if asked is not None and asked not in metrics:
            raise UserError(f"data.task.metric is {asked}: {self.name} has {', '.join(metrics)}; name one of them")

    @classmethod
    def title(cls, key: str) -> str:
        return glue_name(key)

    @classmethod
    def files_in(cls, folder: str, key: str, *, setting: str) -> list[Path]:
        return task_paths(glue_name(key), folder, setting=setting)

    @classmethod
    def check_further(cls, asked: Mapping[str, Mapping[str, Any]], key: str) -> None:
        for name, given in sets_of(asked, glue_name(key)).items():
            check_set(name, given, GLUE_TASKS[glue_name(key)])

    @classmethod
    def check_fine_tuned(cls, config: PreTrainedConfig, key: str, *, named: str) -> None:
        """See Benchmark: the model has as many classes as the task."""
        name = glue_name(key)
        found, wanted = config.num_labels, GLUE_TASKS[name].num_outputs
        if found != wanted:
            raise UserError(
                f"{named}: it tells {found} classes apart, but {name} has {wanted}"
                f"{'' if GLUE_TASKS[name].classes else ' (a score)'}; give one that is fine-tuned on {name}"
            )

    @classmethod
    def fine_tuned(cls, config: PreTrainedConfig, key: str) -> PreTrainedConfig:
        config = copy.deepcopy(config)
        config.num_labels = GLUE_TASKS[glue_name(key)].num_outputs
        return config

    def read_files(self) -> TaskFiles[PairExample, PairSet]:
        settings, number = self.config.data.task, 2 if self.task.has_mismatched else 1
        folder = None if settings.dir is None else Path(settings.dir) / self.name
        has_test = folder is None or any(folder.glob("test*.tsv")) or (folder / "msr_paraphrase_test.txt").is_file()
        splits = [*DEV[:number], *(TEST[:number] if has_test and not self.only_scores else ())]
        train = [] if self.only_scores else read_split(self.name, "train", settings.dir)[: settings.limit]
        sets: dict[str, PairSet] = {split: PairSet(read_split(self.name, split, settings.dir)) for split in splits}
        sets |= {name: read_set(name, given, self.task) for name, given in self._further().items()}
        return TaskFiles(train, sets)

    @property
    def task(self) -> GlueTask:
        return GLUE_TASKS[self.name]

    @property
    def num_outputs(self) -> int:
        return self.task.num_outputs

    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        return Objective(tokens=False, targets=CLASSES if self.task.classes else SCORES)

    def configure(self, model: PreTrainedModel) -> None:
        classes = self.task.classes
        if classes:
            model.config.id2label = dict(enumerate(classes))
            model.config.label2id = {label: index for index, label in enumerate(classes)}
        model.config.problem_type = "single_label_classification" if classes else "regression"

    def paths(self) -> list[Path] | None:
        """See StoredTask: the files of the further sets too."""
        own, further = super().paths(), [Path(str(given["data"])) for given in self._further().values()]
        return None if own is None or not all(path.is_file() for path in further) else [*own, *further]

    def _further(self) -> dict[str, dict[str, Any]]:
        return sets_of(self.config.data.task.out_of_domain, self.name)

    def decides(self) -> dict[str, Any]:
        settings = self.config.data
        return {"limit": settings.task.limit, "max_length": settings.max_length, "further": self._further()}

    def write(
        self, files: TaskFiles[PairExample, PairSet], tokenizer: PreTrainedTokenizerBase, writer: SplitWriter
    ) -> dict[str, Any]:
        sets = {name: each.examples for name, each in files.sets.items()}
        for name, examples in {"train": files.train, **sets}.items():
            if examples:
                pieces = (encode_pairs(piece, tokenizer, self.config.data.max_length) for piece in in_pieces(examples))
                writer.add(name, pieces, PAIRS)
        return {"labels": {name: each.labels for name, each in files.sets.items() if each.labels}}

    @property
    def labels(self) -> Mapping[str, Sequence[int]]:
        """For each further set the label that each class of the task stands for."""
        return self.meta["labels"]

    @property
    def metrics(self) -> tuple[str, ...]:
        first = self.config.data.task.metric or self.task.metrics[0]
        return (first, *(each for each in self.task.metrics if each != first))

    def column(self, name: str) -> str:
        return name if name in self.labels else column_of(self.name, cast(Split, name))

    @property
    def chance(self) -> float:
        return chance_score(self.name, self.encoded["dev"], cast(Metric, self.metrics[0]))

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        scored = [name for name in self.encoded if name in DEV or name in self.labels]
        return {name: {"examples": self.digest} for name in scored}

    @property
    def submissions(self) -> dict[str, str]:
        return {split: f"{column_of(self.name, split)}.tsv" for split in TEST if split in self.encoded}

    def submit(self, split: str, scored: ScoredModel, path: Path) -> None:
        items = self.encoded[split]
        answers = self._answers(scored, items)
        if World.current().is_main:
            write_submission(path, self.task, items, answers)

    def score_set(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        """See Task: the task's metrics on a dev split, the accuracy of the labels on a further set."""
        items, labels = self.encoded[name], self.labels.get(name)
        answers = self._answers(scored, items)
        if labels is not None:
            answers = np.array(labels)[answers]
        if World.current().is_main:
            rows = zip(items, answers.tolist(), strict=True)
            lines = [f"{item.index}\t{answer}\t{item.target}\n" for item, answer in rows]
            write_text(scored.predictions / f"{name}.tsv", "".join(["index\tprediction\ttarget\n", *lines]))
        targets = targets_of(items)
        if labels is not None:
            return {"metrics": {"accuracy": 100 * float(np.mean(answers == targets))}, "examples": len(items)}
        return {"metrics": task_metrics(self.name, answers, targets), "examples": len(items)}

    def _answers(self, scored: ScoredModel, items: Sequence[EncodedPair]) -> np.ndarray:
        """Return the model's class or score of each item: (items,); every rank must call this method."""

        def take(logits: Tensor, _: Sequence[int]) -> list[float]:
            return (logits.argmax(-1) if self.task.classes else logits[:, 0].float()).tolist()

        with scoring_forward(scored.model) as forward:
            found = values_of(forward, items, self.collate, take, batch_size=self.batch_size)
        return np.array(found)

    def warnings(self, teacher: Mapping[str, Any] | None) -> list[str]:
        if teacher is None or teacher["score"] > teacher["chance"]:
            return []
        return [
            f"the teacher {self.config.teacher.model} scores at chance on {self.name}: {self.metrics[0]} "
            f"{teacher['score']:.1f} on dev, where one answer to everything gets {teacher['chance']:.1f}. Nothing can "
            "be learned from it: fine-tune it first, or check that its classes are in GLUE's order"
        ]

    def legend(self) -> str:
        text = f"GLUE's metrics on dev, x 100; {self.sizes['train']:,} training examples."
        if self.labels:
            text += f" Accuracy on {', '.join(self.labels)}, for which nothing was fine-tuned or chosen."
        return text
