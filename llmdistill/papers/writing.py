"""Question generation and summarization: an encoder is fine-tuned to write texts (UniLM §2.3, MiniLM v1 §4.5)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from llmdistill.config import RunConfig, WritingConfig
from llmdistill.data.sampler import SequenceLoader, Share
from llmdistill.data.store import SplitWriter, in_pieces
from llmdistill.data.targets import TARGETS, EncodedTarget, Marks, MaskedTargets, TargetExample, encode_targets
from llmdistill.errors import UserError
from llmdistill.files import write_text
from llmdistill.generation.beams import write_targets
from llmdistill.models.families import is_causal
from llmdistill.models.general import cache_argument
from llmdistill.models.load import build_meta
from llmdistill.objective import Objective
from llmdistill.papers.writing_files import WRITING_TASKS, TextSet, read_files, task_paths
from llmdistill.runtime.distributed import World
from llmdistill.tasks.base import ScoredModel
from llmdistill.tasks.benchmark import Benchmark, BenchmarkData, describe_skipped_questions
from llmdistill.tasks.rouge import reference_words
from llmdistill.tasks.stored import TaskFiles
from llmdistill.tasks.text_metrics import NAMES, TextMetric, has_synonyms, text_metrics
from llmdistill.tasks.words import describe_words

_DECODING = ("max_length", "min_length", "beams", "length_penalty", "no_repeat_ngram_size")
"""The settings of writing on which a score depends."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WritingData(BenchmarkData):
    """The sources and targets of a task, and the scores of what models write."""

    task: Writing
    table_title = "Written texts: metrics from 0 to 100"
    decimals = 2
    chance = 0.0
    """One text for all sources has next to none of their 4-grams and words in order."""

    def describe_training(self) -> str:
        meta = self.meta
        return (
            f"{len(self.train):,} examples; {meta['cut_sources']:,} sources are cut at {self.task.max_source} tokens, "
            f"{meta['cut_targets']:,} targets at {self.task.settings.max_length}"
        )

    @property
    def batch_size(self) -> int:
        return self.task.config.scoring.batch_size

    def column(self, name: str) -> str:
        title = WRITING_TASKS[self.task.key].title
        return title if name == "dev" else f"{title}-{name}"

    @property
    def sizes(self) -> dict[str, int]:
        """See Benchmark: sources, which may have several references."""
        return {"train": len(self.train), **{name: of_set["sources"] for name, of_set in self.sets.items()}}

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        identity = {"examples": self.digest, **{name: getattr(self.task.settings, name) for name in _DECODING}}
        limit = self.task.config.scoring.limit
        counts = {name: len(range(len(self.encoded[name]))[:limit]) for name in self.meta["sets"]}
        return {name: {**identity, "sources": count} for name, count in counts.items()}

    def num_steps(self, epochs: int, global_batch_size: int) -> int:
        return -(-epochs * len(self.train) // global_batch_size)

    def loader(self, share: Share) -> SequenceLoader:
        return SequenceLoader(
            MaskedTargets(self.train, self.tokenizer, mask_share=self.task.settings.mask_share), share
        )

    def score_set(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        """See Task: the metrics; NAME.jsonl has source, answer, references and prediction of each example."""
        limit, texts_of_set = self.task.config.scoring.limit, TextSet.from_json(self.text(name))
        examples, references = texts_of_set.examples[:limit], texts_of_set.references[:limit]
        rows = write_targets(
            scored.model,
            [item.source_ids for item in self.encoded[name][:limit]],
            self.task.settings,
            marks=Marks.of(self.tokenizer),
            batch_size=self.batch_size,
            sharded=scored.sharded,
        )
        texts = [text.strip() for text in self.tokenizer.batch_decode(rows, skip_special_tokens=True)]
        if World.current().is_main:
            lines = [
                {"source": example.source, "answer": example.hint, "references": several, "prediction": text}
                for example, several, text in zip(examples, references, texts, strict=True)
            ]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            write_text(scored.predictions / f"{name}.jsonl", text)
        return {"metrics": text_metrics(self.task.metrics, texts, references), "examples": len(examples)}

    def warnings(self, teacher: Mapping[str, Any] | None) -> list[str]:
        """See Task: skipped questions, METEOR without synonyms, and a teacher that writes nothing right."""
        warnings = describe_skipped_questions(self.meta["skipped"], "their answer is not in their context")
        if "meteor" in self.task.metrics and not has_synonyms():
            warnings.append(
                "METEOR matches equal words and stems only, because nltk finds no WordNet on this machine: such scores "
                "are lower than those with synonyms (python -m nltk.downloader wordnet)"
            )
        if teacher is not None and teacher["score"] <= teacher["chance"]:
            warnings.append(
                f"the teacher's texts share nothing with the references of {WRITING_TASKS[self.task.key].title}: "
                f"{NAMES[self.task.metrics[0]]} {teacher['score']:.1f} on dev. Fine-tune it on the task first"
            )
        return warnings

    def legend(self) -> str:
        settings, synonyms = self.task.settings, "with WordNet's synonyms" if has_synonyms() else "without synonyms"
        texts = {
            "bleu4": "BLEU-4 is sacrebleu's, of the corpus, in lower case. ",
            "meteor": f"METEOR is nltk's, {synonyms}; the papers' is the Java program, whose scores differ. ",
        }
        references = {name: TextSet.from_json(self.text(name)).references for name in self.meta["sets"]}
        words = describe_words({name: reference_words(of_set) for name, of_set in references.items()})
        return "".join(texts.get(metric, "") for metric in self.task.metrics) + (
            f"ROUGE is rouge-score's {words}, each text as one sentence. "
            f"{settings.beams} beams, length penalty {settings.length_penalty:g}, "
            f"at most {settings.max_length} tokens; {len(self.train):,} training examples."
        )


class Writing(Benchmark):
    """One task in which an encoder writes texts."""

    data_class = WritingData
    head = "lm_head"
    usual_length = 512
    schema = TARGETS
    has_classes = False

    def __init__(self, config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> None:
        """Find the task and its files; raise UserError if there is none."""
        super().__init__(config, trains=trains, teacher_writes=teacher_writes)
        if self.max_source < 4:
            raise UserError(
                f"data.max_length is {config.data.max_length} and data.task.writing.max_length "
                f"{config.data.task.writing.max_length}: the source needs the rest; raise data.max_length"
            )

    @property
    def max_source(self) -> int:
        """The largest number of tokens of a source."""
        return self.config.data.max_length - self.settings.max_length

    @classmethod
    def title(cls, key: str) -> str:
        return WRITING_TASKS[key].title

    @classmethod
    def check_folder(cls, folder: str | None, key: str, *, setting: str) -> None:
        """See Benchmark; some tasks have no data set on the hub."""
        if folder is None and WRITING_TASKS[key].hub is None:
            raise UserError(
                f"{setting} is missing: {key} reads files of yours: give a folder with train.jsonl and dev.jsonl, or "
                "take xsum or cnn_dailymail"
            )
        if folder is not None and not Path(folder).is_dir():
            raise UserError(f"{setting} {folder}: no such folder; give one with train.jsonl and dev.jsonl")
        super().check_folder(folder, key, setting=setting)

    @classmethod
    def files_in(cls, folder: str, key: str, *, setting: str) -> list[Path]:
        return task_paths(folder, key, setting=setting)

    @classmethod
    def fine_tuned(cls, config: PreTrainedConfig, key: str) -> PreTrainedConfig:
        config = type(config).from_dict(config.to_dict())
        config.architectures = [MODEL_FOR_MASKED_LM_MAPPING_NAMES[config.model_type]]
        return config

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        if is_causal(config):
            raise UserError(
                f"{key} {reference}: on {WRITING_TASKS[self.key].title} an encoder learns to write; give one, or "
                f"let the {config.model_type} learn the texts as instructions (data.kind instructions)"
            )
        if cache_argument(build_meta(config)) is None:
            raise UserError(
                f"{key} {reference}: a {config.model_type} takes no keys and values of earlier tokens, which writing "
                "needs; give a BERT, RoBERTa or XLM-R"
            )
        super().check_model(key, reference, config)
        self.check_positions(key, reference, config)

    def changing_examples(self, *, causal: bool) -> str | None:
        return f"the targets of {WRITING_TASKS[self.key].title} are masked anew in every epoch"

    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        return Objective(label_smoothing=self.settings.label_smoothing)

    def read_files(self) -> TaskFiles[TargetExample, TextSet]:
        return read_files(self.key, self.config.data.task, only_scores=self.only_scores)

    def token_settings(self) -> dict[str, Any]:
        task = self.config.data.task
        return {"limit": task.limit, "max_source": self.max_source, "max_target": task.writing.max_length}

    def write(
        self, files: TaskFiles[TargetExample, TextSet], tokenizer: PreTrainedTokenizerBase, writer: SplitWriter
    ) -> dict[str, Any]:
        """See StoredTask. The texts of the scored sets are kept too."""
        limits = {"max_source": self.max_source, "max_target": self.settings.max_length}
        cut_sources = cut_targets = 0

        def pieces(examples: Sequence[TargetExample]) -> Iterator[list[EncodedTarget]]:
            nonlocal cut_sources, cut_targets
            for piece in in_pieces(examples):
                encoded = encode_targets(piece, tokenizer, **limits)
                cut_sources, cut_targets = cut_sources + encoded.cut_sources, cut_targets + encoded.cut_targets
                yield encoded.items

        if files.train:
            writer.add("train", pieces(files.train), TARGETS)
        # Taken here, because the report is of the training set, and the sets below count on.
        cuts = {"cut_sources": cut_sources, "cut_targets": cut_targets}
        for name, texts in files.sets.items():
            writer.add(name, pieces(texts.examples), TARGETS)
            writer.add_text(name, texts.to_json())
        return {**cuts, "skipped": files.skipped, "sets": list(files.sets)}

    @property
    def hub(self) -> str | None:
        name = WRITING_TASKS[self.key].hub
        return name and name.split(":")[0]  # without its configuration

    @property
    def settings(self) -> WritingConfig:
        return self.config.data.task.writing

    @property
    def metrics(self) -> tuple[TextMetric, ...]:
        return WRITING_TASKS[self.key].metrics

    @property
    def shown(self) -> tuple[TextMetric, ...]:
        return self.metrics
