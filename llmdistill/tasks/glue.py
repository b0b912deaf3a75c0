"""GLUE (Wang et al. 2019): a classifier is fine-tuned on one task and scored on its dev split by GLUE's metrics.

The examples come from GLUE's own files or from the hub.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import yaml
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.config import RunConfig
from llmdistill.data.pairs import PAIRS, EncodedPair, PairExample, encode_pairs, parse_number
from llmdistill.data.readers import Rows, by_lower_case, read_benchmark_tsv, with_names
from llmdistill.data.sources import benchmark_rows
from llmdistill.data.store import SplitWriter, in_pieces
from llmdistill.errors import UserError
from llmdistill.files import write_text
from llmdistill.models.heads import CLASSES, SCORES
from llmdistill.objective import Objective
from llmdistill.runtime.distributed import World
from llmdistill.tasks.base import ScoredModel
from llmdistill.tasks.benchmark import Benchmark, BenchmarkData
from llmdistill.tasks.classification import Metric, compute_metric, list_targets
from llmdistill.tasks.item_outputs import compute_values, scoring_forward
from llmdistill.tasks.out_of_domain import check_set, complete_sets, read_set
from llmdistill.tasks.stored import TaskFiles

Split = Literal["train", "dev", "dev_mismatched", "test", "test_mismatched"]
"""Only MNLI has mismatched splits; its dev and test are the matched splits."""

DEV: tuple[Split, ...] = ("dev", "dev_mismatched")
TEST: tuple[Split, ...] = ("test", "test_mismatched")
"""Of these splits, and of those of DEV, most tasks have only the first."""

HUB_NAME = "nyu-mll/glue"


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """The properties of one task and its files; the name of a task is the name of its folder in GLUE's download."""

    hub: str
    """The configuration name of the task in the data set on the Hub."""
    sentences: tuple[str, ...]
    """The column of the sentence, or the columns of the two sentences."""
    hub_sentences: tuple[str, ...] | None = None
    """The names of these columns on the Hub, if they differ."""
    label: str = "label"
    """The column of the label; on the Hub it is always `label`."""
    headerless: tuple[str, ...] = ()
    """The columns of the training and dev files, if these files have no header line."""
    index: str = "index"
    """The column of the example number in the test files."""
    classes: tuple[str, ...] = ("0", "1")
    """The labels in the files, in the order of the class numbers on the Hub; empty if the label is a score."""
    metrics: tuple[Metric, ...] = ("accuracy",)
    """The metrics that GLUE reports; settings are chosen by the first metric on dev."""
    has_mismatched: bool = False
    """Whether there are separate dev and test splits for the genres of the training set and for other genres."""
    has_torn_lines: bool = False
    """Whether the published training file has lines that are broken in two; such lines are left out, as usual."""

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the classifier: the number of classes, or 1 for a score."""
        return len(self.classes) or 1


_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("glue.yaml").read_text(encoding="utf-8"))
"""The published tasks, and others on sentences and pairs of sentences."""

GLUE: tuple[str, ...] = tuple(_TABLES["tasks"])
"""The names of the tasks of GLUE."""

GLUE_TASKS: dict[str, GlueTask] = {
    name: GlueTask(
        **cast("Any", {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})
    )
    for name, fields in {**_TABLES["tasks"], **_TABLES["others"]}.items()
}
"""The tasks on sentences and pairs of sentences by name: those of GLUE, and others."""

BEST_SCORE = 5.0
"""The maximum score of STS-B; the minimum is 0."""


@dataclass(frozen=True)
class PairSet:
    """A split of a task, or a set of other data on which models are scored."""

    examples: list[PairExample]
    labels: tuple[int, ...] = ()
    """The label that each class of the task stands for, if the targets are numbers of the set's own labels."""


def glue_name(task: str) -> str:
    """Return the name in GLUE_TASKS of a task in `tasks.TASKS`, such as SST-2 for sst2."""
    return next(name for name, glue in GLUE_TASKS.items() if glue.hub == task)


def further_sets(settings_by_name: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """Return the complete settings of the out-of-domain sets of a task; a task without classes has none."""
    return complete_sets(settings_by_name, name) if GLUE_TASKS[name].classes else {}


def column_of(name: str, split: Split) -> str:
    """Return the column name of a split in papers and on the GLUE server: MNLI-m, MNLI-mm, or the task's name."""
    if not GLUE_TASKS[name].has_mismatched:
        return name
    return f"{name}-mm" if split.endswith("_mismatched") else f"{name}-m"


@dataclass(frozen=True, kw_only=True, eq=False)
class GlueData(BenchmarkData):
    """The examples of a task of GLUE, and the scores of models on them."""

    task: Glue

    @property
    def labels(self) -> Mapping[str, Sequence[int]]:
        """For each further set the label that each class of the task stands for."""
        return self.meta["labels"]

    def column(self, name: str) -> str:
        return name if name in self.labels else column_of(self.task.name, cast(Split, name))

    @property
    def chance(self) -> float:
        return chance_score(self.task.name, self.encoded["dev"], cast(Metric, self.task.metrics[0]))

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        scored = [name for name in self.encoded if name in DEV or name in self.labels]
        return {name: {"examples": self.digest} for name in scored}

    @property
    def submissions(self) -> dict[str, str]:
        return {split: f"{column_of(self.task.name, split)}.tsv" for split in TEST if split in self.encoded}

    def submit(self, split: str, scored: ScoredModel, path: Path) -> None:
        items = self.encoded[split]
        answers = self._answers(scored, items)
        if World.current().is_main:
            write_submission(path, self.task.entry, items, answers)

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
        targets = list_targets(items)
        if labels is not None:
            return {"metrics": {"accuracy": 100 * float(np.mean(answers == targets))}, "examples": len(items)}
        return {"metrics": task_metrics(self.task.name, answers, targets), "examples": len(items)}

    def _answers(self, scored: ScoredModel, items: Sequence[EncodedPair]) -> np.ndarray:
        """Return the model's class or score of each item: (items,); every rank must call this method."""

        def read_values(logits: Tensor, _: Sequence[int]) -> list[float]:
            return (logits.argmax(-1) if self.task.entry.classes else logits[:, 0].float()).tolist()

        with scoring_forward(scored.model) as forward:
            answers = compute_values(forward, items, self.collate, read_values, batch_size=self.batch_size)
        return np.array(answers)

    def warnings(self, teacher: Mapping[str, Any] | None) -> list[str]:
        if teacher is None or teacher["score"] > teacher["chance"]:
            return []
        return [
            f"the teacher {self.task.config.teacher.model} scores at chance on {self.task.name}: "
            f"{self.task.metrics[0]} {teacher['score']:.1f} on dev, where one answer to everything gets "
            f"{teacher['chance']:.1f}. Nothing can be learned from it: fine-tune it first, or check that its classes "
            "are in GLUE's order"
        ]

    def legend(self) -> str:
        text = f"GLUE's metrics on dev, x 100; {self.sizes['train']:,} training examples."
        if self.labels:
            text += f" Accuracy on {', '.join(self.labels)}, for which nothing was fine-tuned or chosen."
        return text


class Glue(Benchmark):
    """One task of GLUE."""

    data_class: type[GlueData] = GlueData
    head = "sequence"
    usual_length = 128
    schema = PAIRS
    hub = HUB_NAME

    def __init__(self, config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> None:
        """Find the task and its folder; raise UserError if there is none."""
        super().__init__(config, trains=trains, teacher_writes=teacher_writes)
        self.name = glue_name(self.key)
        metrics, asked = self.entry.metrics, config.data.task.metric
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
        task = GLUE_TASKS[glue_name(key)]
        for name, settings in further_sets(asked, glue_name(key)).items():
            check_set(name, settings, task.classes, len(task.sentences))

    @classmethod
    def check_fine_tuned(cls, config: PreTrainedConfig, key: str, *, named: str) -> None:
        """See Benchmark: the model has as many classes as the task."""
        name = glue_name(key)
        num_classes, wanted = config.num_labels, GLUE_TASKS[name].num_outputs
        if num_classes != wanted:
            raise UserError(
                f"{named}: it tells {num_classes} classes apart, but {name} has {wanted}"
                f"{'' if GLUE_TASKS[name].classes else ' (a score)'}; give one that is fine-tuned on {name}"
            )

    @classmethod
    def fine_tuned(cls, config: PreTrainedConfig, key: str) -> PreTrainedConfig:
        config = copy.deepcopy(config)
        config.num_labels = GLUE_TASKS[glue_name(key)].num_outputs
        return config

    def read_files(self) -> TaskFiles[PairExample, PairSet]:
        settings, number = self.config.data.task, 2 if self.entry.has_mismatched else 1
        folder = None if settings.dir is None else Path(settings.dir) / self.name
        has_test = folder is None or any(folder.glob("test*.tsv")) or (folder / "msr_paraphrase_test.txt").is_file()
        splits = [*DEV[:number], *(TEST[:number] if has_test and not self.only_scores else ())]
        train = [] if self.only_scores else read_split(self.name, "train", settings.dir)[: settings.limit]
        sets: dict[str, PairSet] = {split: PairSet(read_split(self.name, split, settings.dir)) for split in splits}
        sets |= {
            name: PairSet(*read_set(name, given, self.entry.classes, len(self.entry.sentences)))
            for name, given in self._further().items()
        }
        return TaskFiles(train, sets)

    @property
    def entry(self) -> GlueTask:
        return GLUE_TASKS[self.name]

    @property
    def num_outputs(self) -> int:
        return self.entry.num_outputs

    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        return Objective(tokens=False, targets=CLASSES if self.entry.classes else SCORES)

    def configure(self, model: PreTrainedModel) -> None:
        classes = self.entry.classes
        if classes:
            model.config.id2label = dict(enumerate(classes))
            model.config.label2id = {label: index for index, label in enumerate(classes)}
        model.config.problem_type = "single_label_classification" if classes else "regression"

    def paths(self) -> list[Path] | None:
        """See StoredTask: the files of the further sets too."""
        own, further = super().paths(), [Path(str(given["data"])) for given in self._further().values()]
        # A set of the hub has no file to hash: then all examples are read, and identify themselves.
        return None if own is None or not all(path.is_file() for path in further) else [*own, *further]

    def _further(self) -> dict[str, dict[str, Any]]:
        return further_sets(self.config.data.task.out_of_domain, self.name)

    def token_settings(self) -> dict[str, Any]:
        settings = self.config.data
        return {"limit": settings.task.limit, "max_length": settings.max_length, "further": self._further()}

    def write(
        self, files: TaskFiles[PairExample, PairSet], tokenizer: PreTrainedTokenizerBase, writer: SplitWriter
    ) -> dict[str, Any]:
        sets = {name: pairs.examples for name, pairs in files.sets.items()}
        for name, examples in {"train": files.train, **sets}.items():
            if examples:
                pieces = (encode_pairs(piece, tokenizer, self.config.data.max_length) for piece in in_pieces(examples))
                writer.add(name, pieces, PAIRS)
        return {"labels": {name: pairs.labels for name, pairs in files.sets.items() if pairs.labels}}

    @property
    def metrics(self) -> tuple[str, ...]:
        first = self.config.data.task.metric or self.entry.metrics[0]
        return (first, *(metric for metric in self.entry.metrics if metric != first))


def task_paths(name: str, data_dir: str, *, setting: str) -> list[Path]:
    """Return the files of a task's folder, some of which are read; raise UserError if there is no folder."""
    folder = Path(data_dir) / name
    if not folder.is_dir():
        there = [name for name in GLUE if (Path(data_dir) / name).is_dir()]
        raise UserError(
            f"{setting} {data_dir}: it has no folder {name} (of GLUE's tasks it has {', '.join(there) or 'none'}); add "
            "it, or name a task that is there"
        )
    return sorted(path for path in folder.iterdir() if path.suffix in (".tsv", ".txt"))


def read_split(task: str, split: Split, data_dir: str | Path | None) -> list[PairExample]:
    """Read the examples of a split of a task in GLUE_TASKS, in order.

    data_dir is the folder of GLUE's download, with one subfolder per task, which contains train.tsv and so on (for MRPC
    also the original msr_paraphrase_train.txt and _test.txt, with dev_ids.tsv). Without it the examples are loaded from
    the Hub.

    Raises:
        UserError: the file does not exist, there are no examples, a column is missing, or a line is malformed; the
            message names the line.
    """
    named = GLUE_TASKS[task]
    rows = _hub_rows(named, split) if data_dir is None else _file_rows(named, split, Path(data_dir) / task)
    examples = list[PairExample]()
    for number, (row, place) in enumerate(rows):
        first, second = row[named.sentences[0]], row[named.sentences[1]] if len(named.sentences) > 1 else None
        target: int | float | None = None
        index = number
        if split.startswith("test"):
            text = row.get(named.index, str(number))  # the lines of MRPC's original file have no numbers
            if not text.isdecimal() or len(text) > 18:  # what fits into 64 bits
                raise UserError(
                    f"{place}: {named.index} {text[:40]!r}, expected a whole number; take GLUE's own test file"
                )
            index = int(text)
        elif named.classes:
            # pandas writes whole numbers as 1.0 where a column has an empty cell.
            label = row[named.label].strip()
            label = label if label in named.classes else label.removesuffix(".0")
            if label not in named.classes:
                raise UserError(f"{place}: label {label!r}, expected one of {', '.join(named.classes)}; fix the line")
            target = named.classes.index(label)
        else:
            label = row[named.label]
            target = parse_number(label)
            if target is None or not 0 <= target <= BEST_SCORE:
                raise UserError(f"{place}: label {label!r}, expected a score from 0 to {BEST_SCORE:g}; fix the line")
        examples.append(PairExample(first, second, target, index))
    if not examples:
        where = f"{HUB_NAME}, {named.hub}" if data_dir is None else Path(data_dir) / task
        raise UserError(f"{where}: {split} holds no example; take GLUE's own download, whole")
    return examples


def _file_rows(task: GlueTask, split: Split, folder: Path) -> Rows:
    names = {"dev": "dev_matched", "test": "test_matched"} if task.has_mismatched else {}
    path = folder / f"{names.get(split, split)}.tsv"
    original = folder / f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt"
    if path.is_file() or task.hub != "mrpc" or not original.is_file():
        return _tsv_rows(task, split, path)
    rows, ids = _tsv_rows(task, split, original), ("#1 ID", "#2 ID")
    if split == "test":
        return rows
    # In MRPC's original files GLUE's dev split is a part of the training set, given by a list of pairs. Whether this
    # list has a header does not matter: that is no pair.
    listed = read_benchmark_tsv(_check_file(original.with_name("dev_ids.tsv")), header=ids)
    dev = {tuple(row.values()) for row, _ in listed}
    return (
        (row, place) for row, place in rows if (tuple(row.get(column) for column in ids) in dev) == (split == "dev")
    )


def _tsv_rows(task: GlueTask, split: Split, path: Path) -> Rows:
    is_test = split.startswith("test")
    needed = [*task.sentences, *([] if is_test else [task.label])]
    names = by_lower_case([*needed, task.index])
    for given, place in read_benchmark_tsv(_check_file(path), header=None if is_test else task.headerless or None):
        row = dict(with_names(given, names, place))
        missing = [name for name in needed if name not in row]
        if not missing:
            yield row, place
        elif is_test or not task.has_torn_lines:
            raise UserError(
                f"{place}: has no column {', '.join(missing)}, only {', '.join(row)}; expected {', '.join(needed)}, "
                "with tabs between them, as in GLUE's own download"
            )


def _check_file(path: Path) -> Path:
    """Return the path of a file; raise UserError if it does not exist."""
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; give the folder of GLUE's own download as the data folder, or none for the hub's"
        )
    return path


def _hub_rows(task: GlueTask, split: Split) -> Rows:
    """Read rows from the Hub and convert them to the column names and labels of the files."""
    name = split.replace("dev", "validation")  # validation_matched, test_mismatched ...
    if task.has_mismatched and name in ("validation", "test"):
        name += "_matched"
    rows = benchmark_rows(HUB_NAME, task.hub, name, files="the folder of GLUE's own download")
    sentences = dict(zip(task.hub_sentences or task.sentences, task.sentences, strict=True))
    for row, place in rows:
        if not row.keys() >= {*sentences, "label", "idx"} or not all(isinstance(row[key], str) for key in sentences):
            raise UserError(
                f"{place}: has {', '.join(row)}, expected {', '.join(sentences)} as text, label and idx; "
                "give the folder of GLUE's own download as the data folder"
            )
        label = row["label"]
        # The hub has the label -1 in test splits.
        if task.classes and isinstance(label, int) and 0 <= label < len(task.classes):
            label = task.classes[label]
        texts = {column: row[key] for key, column in sentences.items()}
        yield {**texts, task.label: str(label), task.index: str(row["idx"])}, place


def write_submission(
    path: Path, task: GlueTask, examples: Sequence[PairExample | EncodedPair], predictions: np.ndarray
) -> None:
    """Write one file of a submission to the GLUE server, such as MNLI-mm.tsv; the server takes a zip of all files.

    Each line contains the number of the example and the prediction: the text of the label, or a score with three
    decimals within the range of STS-B.

    Raises:
        UserError: a score is not finite.
    """
    texts = {}
    for example, value in zip(examples, map(float, predictions), strict=True):
        place = f"{path.stem}: example {example.index}"
        if task.classes:
            assert value in range(len(task.classes)), f"{place}: {value} is no class of {', '.join(task.classes)}"
            texts[example.index] = task.classes[int(value)]
        elif np.isfinite(value):
            texts[example.index] = f"{min(max(value, 0.0), BEST_SCORE):.3f}"
        else:
            raise UserError(f"{place}: the predicted score is {value}; the model is broken, train it anew")
    assert len(texts) == len(examples), "two examples have the same number"
    lines = [f"{index}\t{text}\n" for index, text in sorted(texts.items())]
    write_text(path, "".join(["index\tprediction\n", *lines]))


def task_metrics(task_name: str, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Compute the metrics that GLUE reports for a task, times 100.

    Predictions and targets are classes or, for STS-B, scores: (examples,). F1 is that of class 1. A correlation,
    including Matthews's, is undefined if the predictions or the targets are constant or not finite; F1 is undefined if
    class 1 is neither predicted nor a target. An undefined metric is 0, without a warning.
    """
    return {name: 100 * compute_metric(name, predictions, targets) for name in GLUE_TASKS[task_name].metrics}


def chance_score(task: str, examples: Sequence[PairExample | EncodedPair], metric: Metric) -> float:
    """Return the metric of the best constant prediction."""
    glue_task, targets = GLUE_TASKS[task], list_targets(examples)
    # Of scores any constant will do: its correlation is 0.
    constants = range(len(glue_task.classes)) if glue_task.classes else [0.0]
    return max(task_metrics(task, np.full_like(targets, value), targets)[metric] for value in constants)
