"""Tasks of sentence embeddings, which MTEB (the package mteb) defines and scores."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.data.pairs import PairExample, encode_pairs
from llmdistill.data.readers import first_line
from llmdistill.errors import UserError, install_command
from llmdistill.models.pooling import SentenceSettings
from llmdistill.runtime.distributed import World
from llmdistill.tasks.sentences import embed_sentences

_DOCUMENTS = ("document", "passage", "corpus")
"""The names that models of sentence-transformers give the prompt of a document."""


class SentenceEncoder:
    """An encoder of sentences in the form that MTEB asks of a model, its EncoderProtocol."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: SentenceSettings) -> None:
        """Take an encoder without a head, in evaluation mode; `settings` must have a max_length."""
        assert settings.max_length is not None
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings

    @property
    def mteb_model_meta(self) -> Any:
        """MTEB's record of a model, which is empty, because we file results by the content of the model."""
        from mteb.models.model_meta import ModelMeta

        return ModelMeta.create_empty()

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        prompt_type: Any = None,
        batch_size: int = 32,
        **_: Any,
    ) -> Tensor:
        """Return the embeddings of the texts under "text" in MTEB's batches, (texts, W), in fp32 on the CPU.

        The name and the type of the task, and "query" or "document" where it has these, choose the prompt.
        """
        # The names by which a model may define the prompt of a task, the most specific first, in MTEB's order.
        names = [str(task_metadata.name), str(task_metadata.type)]
        if prompt_type is not None:
            kind = str(prompt_type.value)
            names = [key for name in names for key in (f"{name}-{kind}", name)]
            names += _DOCUMENTS if kind == "document" else [kind]
        prompts = self._settings.prompts
        prompt = next((prompts[name] for name in names if name in prompts), self._settings.prompt)
        settings = replace(self._settings, prompt=prompt)
        texts = chain.from_iterable(batch["text"] for batch in inputs)
        rows = [PairExample(settings.text(text), None, 0, number) for number, text in enumerate(texts)]
        items = encode_pairs(rows, self._tokenizer, int(settings.max_length or 0))
        with World(rank=0, size=1, device=self._model.device).entered():
            return embed_sentences(self._model, items, self._tokenizer, settings.pooling, batch_size=batch_size)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosine of each embedding of (N, W) with each of (M, W), as (N, M)."""
        first, second = (functional.normalize(_to_rows(side), dim=-1) for side in (embeddings1, embeddings2))
        return first @ second.T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return the cosine of each embedding of (N, W) with its neighbor of (N, W), as (N,)."""
        return functional.cosine_similarity(_to_rows(embeddings1), _to_rows(embeddings2), dim=-1)


def _to_rows(embeddings: Any) -> Tensor:
    rows = torch.as_tensor(embeddings).float()
    return rows[None] if rows.dim() == 1 else rows


@dataclass(frozen=True, kw_only=True)
class MtebTask:
    """A task of MTEB as its library made it, before its data are loaded."""

    task: Any
    """The library's AbsTask."""

    @property
    def name(self) -> str:
        return str(self.task.metadata.name)

    def score_settings(self) -> dict[str, Any]:
        """Return what the scores of the task depend on, beside the model."""
        import mteb

        parts = [
            [str(part.metadata.name), str(part.metadata.revision), list(part.eval_splits), list(part.hf_subsets)]
            for part in _list_parts(self.task)
        ]
        return {"task": self.name, "data": parts, "mteb": str(mteb.__version__)}

    def check_data(self) -> None:
        """Load the data into the cache of the datasets library; raise UserError if that fails."""
        # The library loads data through others that raise any exception of the network and of their readers.
        try:
            for part in _list_parts(copy.deepcopy(self.task)):
                part.load_data()
        except Exception as error:
            raise UserError(
                f"--tasks {self.name}: the data are not loaded ({first_line(error)}); check the network, or leave the "
                "task out"
            ) from error

    def score(self, encoder: SentenceEncoder, *, batch_size: int) -> dict[str, Any]:
        """Score an encoder in this process alone.

        Returns:
            Plain JSON values: ``score``, the mean of the task's main score over its splits and subsets, -1 to 1;
            ``type``, ``metric`` and ``revision`` of the task; and ``scores``, for each split and subset
            ``{"split": ..., "subset": ..., "main_score": ..., METRIC: value}``. A score that is no number, such as the
            correlation of embeddings that are all the same, is 0.
        """
        import mteb

        # A task draws examples from its own generators. A copy starts them anew, so that all models see the same draws.
        task = copy.deepcopy(self.task)
        encoding = {"batch_size": batch_size, "show_progress_bar": False}
        # Without its cache: the library keeps results under the name of a model, and not its content.
        results = mteb.evaluate(
            encoder, task, cache=None, co2_tracker=False, show_progress_bar=False, encode_kwargs=encoding
        )
        (result,) = results.task_results
        return {
            "type": str(task.metadata.type),
            "metric": str(task.metadata.main_score),
            "revision": str(task.metadata.revision),
            "score": _finite_or_zero(result.get_score()),
            "scores": [_make_entry(split, values) for split, subsets in result.scores.items() for values in subsets],
        }


def _list_parts(task: Any) -> list[Any]:
    """List the tasks that have data: an aggregate, such as CQADupstackRetrieval, is the mean of others."""
    return [part for subtask in getattr(task, "tasks", None) or [] for part in _list_parts(subtask)] or [task]


def _make_entry(split: str, values: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {key: _finite_or_zero(value) for key, value in values.items() if isinstance(value, int | float)}
    return {"split": split, "subset": str(values["hf_subset"]), **numbers}


def _finite_or_zero(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0


def find_mteb(
    names: Sequence[str] | None, benchmark: str | None, languages: Sequence[str] | None = None
) -> list[MtebTask]:
    """Find tasks by name, or those of a benchmark, without reading data.

    Raises:
        UserError: the library is not installed, a task or benchmark does not exist, a task is not scored in the
            languages, or is not of text alone.
    """
    try:
        import mteb
    except ImportError as error:
        raise UserError(f"tasks of MTEB need its library ({error}): {install_command('mteb')}") from error
    logging.getLogger("mteb").setLevel(logging.ERROR)
    if benchmark is not None:
        tasks = list(_find_known(mteb.get_benchmark, "--benchmark", benchmark).tasks)
    else:
        tasks = [_find_task(name, languages) for name in names or []]
    for task in tasks:
        others = sorted({str(modality) for modality in task.metadata.modalities} - {"text"})
        if others:
            raise UserError(
                f"{task.metadata.name} is a task of {', '.join(others)}, and an encoder of sentences reads text alone: "
                "name tasks of text"
            )
    return [MtebTask(task=task) for task in tasks]


def _find_task(name: str, languages: Sequence[str] | None) -> Any:
    import mteb

    def find(name: str) -> Any:
        try:
            return mteb.get_task(name, languages=languages, exclusive_language_filter=languages is not None)
        except ValueError as error:
            named = ",".join(languages or [])
            raise UserError(f"--languages {named}: {name} is not scored in them ({error}); name others") from error

    return _find_known(find, "--tasks", name)


def _find_known(find: Callable[[str], Any], key: str, name: str) -> Any:
    try:
        return find(name)
    except KeyError as error:
        # The message of mteb ends with its own suggestion, which knows more names than we do.
        near = str(error.args[0]).partition("Did you mean: ")[2].strip("'?")
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(f"{key}: MTEB has no {name!r}{hint} (mteb available-tasks lists its tasks)") from error
