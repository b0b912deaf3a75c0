"""A task of another package with a head that llmdistill does not have: each word of a sentence gets a tag."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from llmdistill.batch import IGNORE_INDEX, Batch, LossSum
from llmdistill.data.collate import pad_rows, padding_mask
from llmdistill.data.sampler import TrainLoader
from llmdistill.models.heads import HEADS, Head
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Objective, Targets
from llmdistill.tasks.base import ScoreTable, Task, TaskData
from llmdistill.tasks.item_outputs import compute_values, scoring_forward

NAMES = ("nothing", "person", "place")
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"{kind}{number}" for kind in NAMES for number in range(4))]


def label_loss(logits_BTC: Tensor, batch: Batch) -> LossSum:
    is_tagged = batch.labels != IGNORE_INDEX
    loss = functional.cross_entropy(
        logits_BTC.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return LossSum(loss, is_tagged.sum())


TAGS = Targets(
    label_loss=label_loss,
    compare=lambda student, teacher, batch, divergence: divergence(
        student.flatten(0, 1), teacher.flatten(0, 1), (batch.labels != IGNORE_INDEX).flatten()
    ),
    positions="labels",
    prefix="tag_",
    num_classes=lambda config, batch: config.num_labels,
    from_inputs=lambda inputs: (inputs.get("labels"), None),
    of_zeros=lambda zeros_BT: None,
    is_per_token=True,
)

HEADS["tags"] = Head(
    auto_class="AutoModelForTokenClassification",
    decoder_class="AutoModelForTokenClassification",
    endings=("ForTokenClassification",),
    title="classifier of tokens",
    pipeline_tag="token-classification",
    targets=lambda config: TAGS,
)


@dataclass(frozen=True)
class Tagged:
    input_ids: list[int]
    tags: list[int]

    def __len__(self) -> int:
        return len(self.input_ids)


def sentences(count: int) -> list[list[str]]:
    return [[WORDS[4 + (7 * row + 5 * place) % 12] for place in range(1 + row % 6)] for row in range(count)]


class Entities(Task):
    """The tag of a word is its kind."""

    head = "tags"
    num_outputs = len(NAMES)

    def objective(self, teacher, *, uses_output):
        return Objective(tokens=False, targets=TAGS)

    def read(self, models):
        tokenizer = load_tokenizer(models.tokenizer_path)
        items = []
        for words in sentences(20):
            tags = [NAMES.index(word.rstrip("0123456789")) for word in words]
            items.append(Tagged(tokenizer(" ".join(words))["input_ids"], [IGNORE_INDEX, *tags, IGNORE_INDEX]))
        return EntityData(tokenizer, items, f"{len(items)} sentences")


@dataclass(frozen=True)
class EntityData(TaskData):
    tokenizer: Any
    items: list[Tagged]
    report: str

    @property
    def sets(self):
        return {"test": {"version": 1}}

    def collate(self, items: Sequence[Tagged]) -> Batch:
        rows = [item.input_ids for item in items]
        labels = pad_rows([item.tags for item in items], IGNORE_INDEX)
        return Batch(pad_rows(rows, self.tokenizer.pad_token_id), padding_mask(rows), labels)

    def loader(self, share):
        return TrainLoader(self.items, share, self.collate)

    def validation(self, share):
        return []

    def score_set(self, name, scored):
        def count_right(logits_BTC: Tensor, indices: Sequence[int]) -> list[int]:
            labels = pad_rows([self.items[index].tags for index in indices], IGNORE_INDEX)
            return (logits_BTC.argmax(-1).cpu() == labels).sum(1).tolist()

        with scoring_forward(scored.model) as forward:
            right = compute_values(forward, self.items, self.collate, count_right, batch_size=4)
        return {"accuracy": 100 * sum(right) / sum(len(item) - 2 for item in self.items)}

    def summary(self, scores):
        return {"accuracy": scores["test"]["accuracy"]}

    def sentence(self, model, summary):
        return f"Tags of the {model}: {summary['accuracy']:.1f}"

    def table(self, results):
        rows = {model: [f"{result['accuracy']:.1f}"] for model, result in results.items()}
        return ScoreTable(title="Tags", columns=["accuracy"], rows=rows, legend="")
