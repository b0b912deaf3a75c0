"""Question generation and summarization: an encoder is fine-tuned to write texts (UniLM §2.3, MiniLM v1 §5.2)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from llmdistill.config import RunConfig, WritingConfig
from llmdistill.data.columns import SplitWriter, StoredSplits, in_pieces
from llmdistill.data.sampler import SequenceLoader, Share
from llmdistill.data.targets import (
    TARGETS,
    EncodedTarget,
    EncodedTargets,
    Marks,
    MaskedTargets,
    TargetExample,
    encode_targets,
)
from llmdistill.errors import UserError
from llmdistill.files import write_text
from llmdistill.generation.beams import BeamSearch, goes_on, write_targets
from llmdistill.models.families import is_causal
from llmdistill.models.load import build_meta
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Objective
from llmdistill.tasks.base import Models, ScoredModel
from llmdistill.tasks.benchmark import Benchmark, BenchmarkData, skipped_questions
from llmdistill.tasks.text_metrics import NAMES, has_synonyms, text_metrics
from llmdistill.tasks.writing_files import (
    WRITING_TASKS,
    TextSet,
    WritingFiles,
    check_folder,
    read_files,
    read_sets,
    task_paths,
)

_DECODING = ("max_length", "min_length", "beams", "length_penalty", "no_repeat_ngram_size")
"""The settings of writing on which a score depends."""


class Writing(Benchmark):
    """One task in which an encoder writes texts."""

    head = "lm_head"
    usual_length = 512
    has_classes = False

    def __init__(self, config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> None:
        """Find the task and its files; raise UserError if there is none."""
        super().__init__(config, trains=trains, teacher_writes=teacher_writes)
        if self._max_source < 4:
            raise UserError(
                f"data.max_length is {config.data.max_length} and data.task.writing.max_length "
                f"{config.data.task.writing.max_length}: the source needs the rest; raise data.max_length"
            )

    @property
    def _max_source(self) -> int:
        """The largest number of tokens of a source."""
        return self.config.data.max_length - self.config.data.task.writing.max_length

    @classmethod
    def title(cls, key: str) -> str:
        """See Benchmark."""
        return WRITING_TASKS[key].title

    @classmethod
    def check_folder(cls, folder: str | None, key: str, *, setting: str) -> None:
        """See Benchmark."""
        check_folder(folder, key, setting=setting)

    @classmethod
    def check_fine_tuned(cls, config: PreTrainedConfig, key: str, *, named: str) -> None:
        """See Benchmark: the model has an LM head. Whether it learned to write, only its scores tell."""
        name = (config.architectures or [""])[0]
        if not name.endswith(("ForMaskedLM", "ForPreTraining")):
            raise UserError(
                f"{named}: it is a {name or config.model_type} without language-model head; give a model that is "
                f"fine-tuned on {WRITING_TASKS[key].title}"
            )

    @classmethod
    def fine_tuned(cls, config: PreTrainedConfig, key: str) -> PreTrainedConfig:
        """See Benchmark."""
        config = type(config).from_dict(config.to_dict())
        config.architectures = [MODEL_FOR_MASKED_LM_MAPPING_NAMES[config.model_type]]
        return config

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        """See Task. Both models are encoders; the teacher is fine-tuned."""
        if is_causal(config):
            raise UserError(
                f"{key} {reference}: on {WRITING_TASKS[self.key].title} an encoder learns to write; give one, or "
                f"let the {config.model_type} learn the texts as instructions (data.kind instructions)"
            )
        if not goes_on(build_meta(config)):
            raise UserError(
                f"{key} {reference}: a {config.model_type} takes no keys and values of earlier tokens, which writing "
                "needs; give a BERT, RoBERTa or XLM-R"
            )
        if key == "teacher.model":
            self.check_fine_tuned(config, self.key, named=f"{key} {reference}")
        self.check_positions(key, reference, config)

    def changing_examples(self, *, causal: bool) -> str | None:
        """See Task."""
        return f"the targets of {WRITING_TASKS[self.key].title} are masked anew in every epoch"

    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        """See Task: the masked tokens of the targets."""
        return Objective(label_smoothing=self.config.data.task.writing.label_smoothing)

    def read_files(self) -> WritingFiles:
        """See Benchmark."""
        return read_files(self.key, self.config.data.task)

    def paths(self) -> list[Path] | None:
        """See Benchmark."""
        return task_paths(self.key, self.config.data.task)

    def decides(self) -> dict[str, Any]:
        """See Benchmark."""
        task = self.config.data.task
        return {"limit": task.limit, "max_source": self._max_source, "max_target": task.writing.max_length}

    def write(self, files: WritingFiles, tokenizer: PreTrainedTokenizerBase, writer: SplitWriter) -> dict[str, Any]:
        """See Benchmark. The texts of the sets that models are scored on are kept too."""
        cut_sources = cut_targets = 0

        def pieces(examples: Sequence[TargetExample]) -> Iterator[list[EncodedTarget]]:
            nonlocal cut_sources, cut_targets
            for piece in in_pieces(examples):
                found = self._encode(piece, tokenizer)
                cut_sources, cut_targets = cut_sources + found.cut_sources, cut_targets + found.cut_targets
                yield found.items

        writer.add("train", pieces(files.train), TARGETS)
        cuts = {"cut_sources": cut_sources, "cut_targets": cut_targets}
        for name, each in files.sets.items():
            writer.add(name, pieces(each.examples), TARGETS)
            writer.add_text(name, each.to_json())
        return {**cuts, "skipped": files.skipped, "digest": files.digest, "sets": list(files.sets)}

    def _encode(self, examples: Sequence[TargetExample], tokenizer: PreTrainedTokenizerBase) -> EncodedTargets:
        limit = self.config.data.task.writing.max_length
        return encode_targets(examples, tokenizer, max_source=self._max_source, max_target=limit)

    def opened(self, stored: StoredSplits, models: Models) -> WritingData:
        """See Benchmark."""
        meta, train, config = stored.meta, stored.items("train", TARGETS), self.config
        sets = {
            name: _Scored(items=stored.items(name, TARGETS), read=partial(_texts, stored, name))
            for name in meta["sets"]
        }
        return replace(
            self._data(load_tokenizer(models.tokenizer_path), sets, config.scoring.batch_size),
            digest=meta["digest"],
            skipped=meta["skipped"],
            train=train,
            report=f"{len(train):,} examples; {meta['cut_sources']:,} sources are cut at {self._max_source} "
            f"tokens, {meta['cut_targets']:,} targets at {config.data.task.writing.max_length}",
        )

    def dev_data(self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, batch_size: int) -> WritingData:
        """See Benchmark."""
        self.check_model("model", "in memory", config)
        sets = {
            name: _Scored(items=self._encode(each.examples, tokenizer).items, read=partial(TextSet.first, each, None))
            for name, each in read_sets(self.key, self.config.data.task).items()
        }
        return self._data(tokenizer, sets, batch_size)

    def _data(self, tokenizer: PreTrainedTokenizerBase, sets: Mapping[str, _Scored], batch_size: int) -> WritingData:
        return WritingData(
            key=self.key,
            tokenizer=tokenizer,
            settings=self.config.data.task.writing,
            max_source=self._max_source,
            scored=sets,
            limit=self.config.scoring.limit,
            batch_size=batch_size,
            report="",
        )


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """A set that models are scored on."""

    items: Sequence[EncodedTarget]
    read: Callable[[], TextSet]
    """Returns the texts, which are read only to score a model."""


def _texts(stored: StoredSplits, name: str) -> TextSet:
    return TextSet.from_json(stored.text(name))


@dataclass(frozen=True, kw_only=True)
class WritingData(BenchmarkData):
    """The examples of one task."""

    table_title = "Written texts: metrics from 0 to 100"
    decimals = 2

    key: str
    tokenizer: PreTrainedTokenizerBase
    settings: WritingConfig
    max_source: int
    """The largest number of tokens of a source."""
    scored: Mapping[str, _Scored]
    """The sets that models are scored on."""
    limit: int | None
    """The number of examples of each set that are scored; None for all."""
    batch_size: int
    """The number of sources that a rank writes for at once."""
    digest: str | None = None
    """See WritingFiles; None if the data only score."""
    skipped: Sequence[str] = ()
    """See WritingFiles."""
    train: Sequence[EncodedTarget] = ()
    report: str

    @property
    def metrics(self) -> tuple[str, ...]:
        """See BenchmarkData: BLEU-4, METEOR and ROUGE-L of questions; ROUGE-L, ROUGE-1 and ROUGE-2 of summaries."""
        return WRITING_TASKS[self.key].metrics

    @property
    def shown(self) -> tuple[str, ...]:
        """See BenchmarkData: all metrics."""
        return self.metrics

    @property
    def main_column(self) -> str:
        """See BenchmarkData: dev."""
        return self._column("dev")

    def _column(self, split: str) -> str:
        title = WRITING_TASKS[self.key].title
        return title if split == "dev" else f"{title}-{split}"

    @property
    def chance(self) -> float:
        """See BenchmarkData: one text for all sources has next to none of their 4-grams and words in order."""
        return 0.0

    @property
    def sizes(self) -> dict[str, int]:
        """See BenchmarkData: sources, which may have several references."""
        return {"train": len(self.train), **self._num_scored()}

    def _num_scored(self) -> dict[str, int]:
        """Return the number of examples of each set that are scored."""
        return {name: len(range(len(each.items))[: self.limit]) for name, each in self.scored.items()}

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """See TaskData: dev, and test if there is one."""
        asked = {
            "examples": self.digest,
            "max_source": self.max_source,
            **{name: value for name, value in asdict(self.settings).items() if name in _DECODING},
        }
        return {name: {**asked, "sources": count} for name, count in self._num_scored().items()}

    def num_steps(self, epochs: int, global_batch_size: int) -> int:
        """See TaskData. The last step may hold examples of a further epoch."""
        return -(-epochs * len(self.train) // global_batch_size)

    def loader(self, share: Share) -> SequenceLoader:
        return SequenceLoader(MaskedTargets(self.train, self.tokenizer, mask_share=self.settings.mask_share), share)

    def score_set(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        """See TaskData: the metrics; NAME.jsonl has source, answer, references and prediction of each example."""
        found = self.scored[name].read().first(self.limit)
        rows = write_targets(
            scored.model,
            [item.source_ids for item in self.scored[name].items[: self.limit]],
            BeamSearch(**{key: getattr(self.settings, key) for key in _DECODING}),
            marks=Marks.of(self.tokenizer),
            # A text ends with the separator; no other special token is ever a label.
            forbidden=[each for each in self.tokenizer.all_special_ids if each != Marks.of(self.tokenizer).end],
            batch_size=self.batch_size,
            world=scored.world,
            sharded=scored.sharded,
        )
        texts = [text.strip() for text in self.tokenizer.batch_decode(rows, skip_special_tokens=True)]
        if scored.world.is_main:
            lines = [
                {"source": example.source, "answer": example.hint, "references": references, "prediction": text}
                for example, references, text in zip(found.examples, found.references, texts, strict=True)
            ]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            write_text(scored.predictions / f"{name}.jsonl", text)
        metrics = text_metrics(WRITING_TASKS[self.key].metrics, texts, found.references)
        return {"metrics": dict(metrics), "examples": len(found.examples)}

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """See TaskData.

        Returns:
            ``{"dev": {COLUMN: {METRIC: value}}, "score": the metric on dev that chooses settings, "chance": 0}``; the
            columns are the task's dev set and its test set, such as XSum and XSum-test.
        """
        columns = {self._column(split): dict(scores[split]["metrics"]) for split in self.scored}
        return {"dev": columns, "score": columns[self.main_column][self.metrics[0]], "chance": self.chance}

    def metric_name(self, metric: str) -> str:
        """See BenchmarkData: BLEU-4, ROUGE-L and so on."""
        return {str(key): name for key, name in NAMES.items()}[metric]

    def warnings(self, teacher: Mapping[str, Any] | None) -> list[str]:
        """See TaskData: skipped questions, METEOR without synonyms, and a teacher that writes nothing right."""
        found = skipped_questions(self.skipped, "their answer is not in their context")
        if "meteor" in self.metrics and not has_synonyms():
            found.append(
                "METEOR matches equal words and stems only, because nltk finds no WordNet on this machine: such scores "
                "are lower than those with synonyms (python -m nltk.downloader wordnet)"
            )
        if teacher is not None and teacher["score"] <= teacher["chance"]:
            found.append(
                f"the teacher's texts share nothing with the references of {WRITING_TASKS[self.key].title}: "
                f"{self.metric_name(self.metrics[0])} {teacher['score']:.1f} on dev. Fine-tune it on the task first"
            )
        return found

    def legend(self) -> str:
        """See BenchmarkData."""
        settings = self.settings
        return (
            f"{_legend(self.metrics)} {settings.beams} beams, length penalty {settings.length_penalty:g}, "
            f"at most {settings.max_length} tokens; {len(self.train):,} training examples."
        )


def _legend(metrics: Iterable[str]) -> str:
    """What each metric is."""
    synonyms = "with WordNet's synonyms" if has_synonyms() else "without synonyms"
    texts = {
        "bleu4": "BLEU-4 is sacrebleu's, of the corpus, in lower case.",
        "meteor": f"METEOR is nltk's, {synonyms}; the papers' is the Java program, whose scores differ.",
    }
    rouge = "ROUGE is rouge-score's F1 with stemming, each text as one sentence."
    return " ".join([*(texts[each] for each in metrics if each in texts), rouge])
