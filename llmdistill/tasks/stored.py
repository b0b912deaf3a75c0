"""Tasks whose examples are read and tokenized once, stored on disk and mapped into memory by every rank."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.data.pairs import collate_pairs
from llmdistill.data.store import MappedItems, Schema, SplitWriter, StoredSplits, store, tokenizer_fingerprint
from llmdistill.errors import UserError
from llmdistill.fingerprints import file_sha256
from llmdistill.models.families import max_positions
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.runtime.distributed import on_every
from llmdistill.runtime.main_first import make_once
from llmdistill.tasks.base import Models, Task, TaskData

_FORMAT = 2
"""Version of the files' format. Increase it with every change of the files' contents or of the tokenization."""

Example = TypeVar("Example")
Scored = TypeVar("Scored")


@dataclass(frozen=True)
class TaskFiles(Generic[Example, Scored]):
    """The examples of a task as text, whose `repr` shows all that identifies them."""

    train: Sequence[Example]
    """The examples to learn, without the skipped ones; none if only the sets that score are read."""
    sets: Mapping[str, Scored]
    """The other sets by name: those that models are scored on, and test splits without targets."""
    skipped: Sequence[str] = ()
    """The ids or places of training examples that cannot be learned."""

    @property
    def digest(self) -> str:
        hashed = hashlib.sha256()
        for part in chain(self.train, self.sets.items(), [self.skipped]):
            hashed.update(repr(part).encode() + b"\n")
        return hashed.hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredData(TaskData):
    """The examples of a StoredTask, whose tokens every rank maps."""

    task: StoredTask[Any]
    tokenizer: PreTrainedTokenizerBase
    encoded: Mapping[str, MappedItems[Any]]
    """The tokens of the training set (if it is read), and of the other sets."""
    meta: Mapping[str, Any]
    """What `StoredTask.write` has returned."""
    text: Callable[[str], Any]
    """Reads what `StoredTask.write` has written of a split beside its tokens."""
    digest: str
    """Identifies the examples and their tokens."""
    report: str = ""

    def collate(self, items: Sequence[Any]) -> Batch:
        padding: Any = self.tokenizer.pad_token_id
        return collate_pairs(items, padding)

    def describe_training(self) -> str:
        """Return one sentence about the training set."""
        return f"{len(self.train):,} examples"

    @property
    def batch_size(self) -> int:
        """The number of sequences per rank in a forward pass of scoring."""
        train = self.task.config.train
        return train.micro_batch_size or train.global_batch_size

    @property
    def train(self) -> Any:
        """The tokens of the training set; none if it is not read."""
        return self.encoded.get("train", ())


Data = TypeVar("Data", bound=StoredData)


class StoredTask(Task, Generic[Data]):
    """A task whose tokens are stored in the folder ``tasks`` of data.cache_dir, where the next run finds them."""

    key: str
    """The key of the task in `tasks.TASKS`."""
    schema: ClassVar[Schema[Any]]
    """How its encoded examples are stored."""
    only_scores: bool = False
    """Whether neither a training set nor a test split without targets is read, because a model is scored in memory."""
    data_class: type[Data]
    """The class of what `read` returns."""

    @abstractmethod
    def read_files(self) -> TaskFiles[Any, Any]:
        """Read every file of the task, or its data set on the hub, without a model.

        Raises:
            UserError: a file is missing or malformed.
        """

    @abstractmethod
    def paths(self) -> Sequence[Path] | None:
        """Return the files that `read_files` reads; None if it reads a data set of the hub.

        Raises:
            UserError: a file is missing.
        """

    @abstractmethod
    def token_settings(self) -> Mapping[str, Any]:
        """Return the settings on which the examples and their tokens depend, beside the task and its files."""

    @abstractmethod
    def write(self, files: Any, tokenizer: PreTrainedTokenizerBase, writer: SplitWriter) -> dict[str, Any]:
        """Tokenize the result of `read_files`, and write it; return everything else that the data need as plain JSON.

        Raises:
            UserError: the examples cannot be tokenized.
        """

    def read(self, models: Models) -> Data:
        tokenizer = load_tokenizer(models.tokenizer_path)
        return self.open_data(self.store_tokens(tokenizer), tokenizer, models.student, models.teacher)

    def read_on_all(self, models: Models) -> Data:
        """See Task. Rank 0 reads and tokenizes the examples if that is not done yet; all ranks map their tokens."""
        tokenizer = load_tokenizer(models.tokenizer_path)
        folder = make_once(lambda: self.store_tokens(tokenizer))
        return on_every(lambda: self.open_data(folder, tokenizer, models.student, models.teacher))

    def store_tokens(self, tokenizer: PreTrainedTokenizerBase) -> Path:
        """Read and tokenize the examples into a folder; reuse that of the same data, tokenizer and settings.

        Local files are identified by their paths and content, data sets of the hub by their examples.

        Raises:
            UserError: as in `read_files` and `write`, or the cache has no room.
        """
        hashes: list[list[str]] | None = None
        # A score needs no training files, which `paths` would miss.
        paths = None if self.only_scores else self.paths()
        if paths is not None:
            with suppress(OSError):  # `read_files` says which file cannot be read, and why
                hashes = [[str(path), file_sha256(path)] for path in paths]
        # Reading and parsing takes longer than hashing, so local files are only read if their tokens are not stored
        # yet.
        files = self.read_files() if hashes is None else None
        # These shape the tokens too, and the backend of a fast tokenizer does not know them.
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        splits_by = [tokenizer_fingerprint(tokenizer), tokenizer.model_input_names, tokenizer.truncation_side, special]
        request = {
            "format": _FORMAT,
            "task": self.key,
            "examples": hashes if files is None else files.digest,
            "tokenizer": splits_by,
            **self.token_settings(),
        }

        def write(folder: Path) -> dict[str, Any]:
            writer = SplitWriter(folder, tokenizer)
            meta = self.write(self.read_files() if files is None else files, tokenizer, writer)
            return {**meta, "splits": writer.splits}

        return store(self.config.data.cache_dir, "tasks", request, write)

    def open_data(self, folder: Path, tokenizer: PreTrainedTokenizerBase, *configs: PreTrainedConfig) -> Data:
        """Return the examples of a folder of `store_tokens`, for models of these configs.

        Raises:
            UserError: an example has more tokens than a model has positions.
        """
        stored, limit = StoredSplits(folder), self.config.data.max_length
        encoded = {split: stored.items(split, self.schema) for split in stored.meta["splits"]}
        positions = min(max_positions(config, limit) for config in configs)
        # The lengths are read only if a model may lack a position.
        if positions < limit and (longest := max(items.longest for items in encoded.values())) > positions:
            raise UserError(
                f"data.max_length is {limit}: an example of {self.key} has {longest} tokens, but a model has "
                f"positions for {positions}; give {positions} or less"
            )
        data = self.data_class(
            task=self, tokenizer=tokenizer, encoded=encoded, meta=stored.meta, text=stored.text, digest=folder.name
        )
        return replace(data, report=data.describe_training())
