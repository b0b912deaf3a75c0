"""Instructions: a decoder learns answers to instructions, and is scored by the ROUGE-L of its generated answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llmdistill.batch import Batch, Loader
from llmdistill.config import GenerationConfig
from llmdistill.data.collate import Encoded, collate, collate_packed, sample_id
from llmdistill.data.examples import Example
from llmdistill.data.exchange import ALONE, Exchange
from llmdistill.data.held_out import KeptItems, find_learned_files, find_learned_rows, hold_out
from llmdistill.data.instruct import NO_LIMIT, Limits, encode, parts_before
from llmdistill.data.prompts import CHAT, text_around
from llmdistill.data.references import TEACHER, parts_of
from llmdistill.data.rows import describe_left_out
from llmdistill.data.sampler import Mixture, Share, TrainLoader, scoring_batches
from llmdistill.data.sources import check_rows, read_examples
from llmdistill.data.store import JoinedItems, MappedItems
from llmdistill.data.stored_examples import StoredExamples, open_examples, store_examples
from llmdistill.data.stream import ExampleStream, StreamLoader, check_stream
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.files import json_lines
from llmdistill.fingerprints import fingerprint
from llmdistill.generation.response_file import check_teacher
from llmdistill.models.families import is_causal
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import TOKENS, Objective
from llmdistill.runtime.distributed import CONTROL_TIMEOUT, World, on_every, on_main
from llmdistill.runtime.main_first import make_once
from llmdistill.runtime.terminal import warn_main
from llmdistill.tasks.base import VALID, HeldOutQuestion, Models, ScoredModel, ScoreTable, Task, TaskData
from llmdistill.tasks.instruction_scores import encode_sets, score_sets
from llmdistill.tasks.perplexity import mean_perplexity, show_perplexity
from llmdistill.tasks.rouge import measure_chance, reference_words
from llmdistill.tasks.text_windows import TextTests, check_texts, find_text_tests
from llmdistill.tasks.words import Words, describe_words


class Instructions(Task):
    """The task of answering instructions."""

    validates_labels = True
    translates = True
    validation_metric = "ROUGE-L"

    def changing_examples(self, *, causal: bool) -> str | None:
        if self.config.data.streaming:
            return "data.streaming reads the examples while it trains"
        return self.config.data.why_answers_change

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        if not is_causal(config):
            raise UserError(
                f"{key} {reference} is an encoder ({config.model_type}), and instruction data "
                "train decoders only: take a decoder, or learn from text (data.kind=text)"
            )
        self.check_positions(key, reference, config)

    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        return TOKENS

    def check_files(self, *, thorough: bool = True) -> None:
        data = self.config.data
        texts = find_text_tests(data.tests)
        sets = (reference for name, reference in data.tests.items() if name not in texts)
        train = [part.reference for part in parts_of(data.train)] if self.trains else []
        train = [reference for reference in train if reference != TEACHER]  # which is written before it is read
        for reference in (*train, data.valid, *sets):
            if reference is not None:
                check_rows(reference, thorough=thorough)
        check_texts(texts)

    def read(self, models: Models) -> InstructionData:
        """See Task. The examples are only read when they are prepared."""
        teachers_tokenizer = load_tokenizer(models.teacher_path)
        shared = models.tokenizer_path == models.teacher_path
        tokenizer = teachers_tokenizer if shared else load_tokenizer(models.tokenizer_path)
        return InstructionData(
            task=self,
            tokenizer=tokenizer,
            teachers_tokenizer=teachers_tokenizer,
            limits=Limits.of(self.config.data, [teachers_tokenizer, tokenizer]),
            texts=TextTests.of(self.config, models, [tokenizer, teachers_tokenizer]),
            written_by=models.teacher_path if self.teacher_writes else None,
        )


ASKED = 12
"""Rows that are held out and answered: enough to see what a model can do, and quick on a CPU."""
Items: TypeAlias = MappedItems[Encoded] | KeptItems[Encoded] | JoinedItems[Encoded]


@dataclass(frozen=True, kw_only=True, eq=False)
class InstructionData(TaskData):
    """The instructions of a run; they are read once they are `prepare`."""

    task: Instructions
    tokenizer: PreTrainedTokenizerBase
    teachers_tokenizer: PreTrainedTokenizerBase
    limits: Limits
    texts: TextTests
    """The test sets that are texts."""
    written_by: Path | None
    """The teacher, if it must have written the training set."""
    train: Items | None = None
    """The training set; None if it is streamed, the run does not train, or the data are not prepared."""
    held_out: Sequence[Encoded] = ()
    """Rows of the training set that are not learned."""
    mixture: Mixture | None = None
    """How its files are drawn, if they have weights."""
    valid: Sequence[Example] = ()
    """The validation set; may be empty. It is scored only with the first seed, as it serves to choose settings."""
    valid_items: Sequence[Encoded] = ()
    """The validation set, encoded by the student's tokenizer."""
    tests: Mapping[str, Sequence[Example]] = field(default_factory=dict)
    """The test sets of instructions."""
    data_warnings: Sequence[str] = ()
    report: str = ""

    def prepare(self) -> InstructionData:
        """See Task. Rank 0 reads and checks every file; all ranks map the tokens of the training set.

        Raises:
            UserError: a file is missing, malformed or empty, or a prompt exceeds the limit.
        """
        settings, teacher = self.task.config.data, self.task.config.teacher

        def read_scored_sets() -> tuple[list[Example], dict[str, list[Example]], str | None]:
            """Read and check the sets that are scored, with a warning about the origin of the training set."""
            valid = [] if settings.valid is None else read_examples(settings.valid)
            references = {name: path for name, path in settings.tests.items() if name not in self.texts.texts}
            tests = {name: read_examples(path) for name, path in references.items()}
            scored = {**({VALID: valid} if valid else {}), **tests}
            shared = self.tokenizer is self.teachers_tokenizer
            # The teacher is scored on the same sets: a prompt must fit both tokenizers before anything is trained.
            for tokenizer in [self.tokenizer] if shared else [self.tokenizer, self.teachers_tokenizer]:
                encode_sets(scored, tokenizer, self.task.config.scoring, self.limits)
            self.texts.check(self.tokenizer, self.teachers_tokenizer)
            if settings.streaming:
                check_stream(settings.train, self.tokenizer, self.limits)
            warning = None if self.written_by is None else check_teacher(locate(settings.train), self.written_by)
            return valid, tests, warning

        valid, tests, warning = on_main(read_scored_sets)
        valid_items = self._open_stored(settings.valid).items if settings.valid is not None else ()
        train: Items | None = None
        held_out, mixture, report = list[Encoded](), None, "not read, as nothing is trained"
        if settings.streaming:
            report = "streamed while training"
        elif self.task.trains:
            parts = parts_of(settings.train)
            stored = [self._open_stored(part.reference) for part in parts]
            counts, left_out = stored[0].counts, Counter(stored[0].left_out)
            for examples in stored[1:]:
                counts, left_out = counts.plus(examples.counts), left_out + Counter(examples.left_out)
            report = counts.report() + describe_left_out(left_out)
            seed = self.task.config.seed
            items, held_out = hold_out([examples.items for examples in stored], settings.held_out or 0, seed)
            report += f" {len(held_out):,} of them are held out." if held_out else ""
            train = items[0] if len(items) == 1 else JoinedItems(items)
            # Files with weights are drawn by these, and the others row by row.
            weights = [part.weight for part in parts if part.weight is not None]
            if weights:
                mixture = Mixture.of([len(encoded) for encoded in items], weights)
                drawn = zip(mixture.counts, mixture.sizes, parts, strict=True)
                shares = (f"{count:,} examples from the {size:,} of {part.reference}" for count, size, part in drawn)
                report = f"{report} Each epoch has {', '.join(shares)}."
            if teacher.by_rows and not self.task.teacher_writes:  # the answers of SeqKD name no teacher
                teacher.check_names(set(train.distinct("teacher")), f"data.train {settings.train}")
        if settings.valid is not None:
            overlap = None
            if settings.streaming:
                overlap = find_learned_files(settings.train, settings.valid)
            elif train:
                overlap = find_learned_rows(train, valid_items)
            if overlap is not None:
                warn_main(overlap)
        return replace(
            self,
            train=train,
            held_out=held_out,
            mixture=mixture,
            valid=valid,
            valid_items=valid_items,
            tests=tests,
            report=report,
            data_warnings=[] if warning is None else [warning],
        )

    def _open_stored(self, reference: str) -> StoredExamples:
        make = partial(
            store_examples, reference, self.tokenizer, self.limits, cache_dir=self.task.config.data.cache_dir
        )
        folder = make_once(make)
        return on_every(lambda: open_examples(folder))

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        data, sets = self.task.config.data, dict[str, dict[str, Any]]()
        for name, examples in self._scored_examples().items():
            reference = data.valid if name == VALID else data.tests[name]
            # `models` says only which ones are scored, so it is left out of what a score depends on.
            settings = {key: value for key, value in asdict(self._generation_settings(name)).items() if key != "models"}
            # Older versions cut every script into stems of a-z; their scores of other scripts must not be reused.
            words = reference_words([example.outputs for example in examples])
            own_words = {} if words == "stemmed" else {"rouge_words": words}
            sets[name] = {"reference": fingerprint(str(reference)), **settings, **asdict(self.limits), **own_words}
        return {**sets, **self.texts.sets}

    def _scored_examples(self) -> dict[str, Sequence[Example]]:
        return {**({VALID: self.valid} if self.valid else {}), **self.tests}

    def _generation_settings(self, name: str) -> GenerationConfig:
        scoring = self.task.config.scoring
        return replace(scoring, seeds=scoring.seeds[:1]) if name == VALID else scoring

    def teacher_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.teachers_tokenizer

    def teacher_prompts(self) -> dict[int, list[int]]:
        """See Task. If the prompt is that of a chat, each model reads it in its own chat template."""
        sets = [read_examples(part.reference) for part in parts_of(self.task.config.data.train)]
        examples, prompts = [example for examples in sets for example in examples], dict[int, list[int]]()
        # Without limits, so that both tokenizers keep the same examples, whatever their numbers of tokens.
        ours = encode(examples, self.tokenizer, replace(self.limits, max_length=NO_LIMIT))
        limits = replace(self.limits, max_prompt_length=NO_LIMIT - 1, max_length=NO_LIMIT)
        theirs = encode([examples[index] for index in ours.indices], self.teachers_tokenizer, limits)
        for our, their in zip(ours.items, theirs.items, strict=True):
            before_ours, before_theirs = parts_before(our), parts_before(their)
            if len(before_ours) == len(before_theirs):  # else the teacher reads the student's text as it is
                prompts |= dict(zip(before_ours, before_theirs.values(), strict=True))
            # A student that writes answers itself is asked by the prompt of the last one.
            if self.task.config.data.why_answers_change or len(before_ours) == 1:
                prompts[sample_id(our.last_prompt)] = their.last_prompt
        return prompts

    def loader(self, share: Share) -> TrainLoader[Encoded] | StreamLoader:
        data = self.task.config.data
        # Packed rows are full if a micro batch has short and long examples, so steps are not sorted together.
        share = replace(share, bucket_steps=1 if data.packing else data.bucket_steps, spread=data.packing)
        if not data.streaming:
            assert self.train is not None, "the examples are not prepared yet"
            return TrainLoader(self.train, share, self._collate, mixture=self.mixture)
        return StreamLoader(
            ExampleStream(data.train, share.seed, data.shuffle_buffer),
            self.tokenizer,
            self.limits,
            share,
            self._collate,
            exchange=Exchange.of_all_ranks(CONTROL_TIMEOUT) if share.world_size > 1 else ALONE,
        )

    def teacher_examples(self) -> tuple[Sequence[Encoded], Callable[[list[Encoded]], Batch]]:
        """See TaskData: a cache also has the rows that this run holds out, so that it serves others too."""
        items, collate_items = super().teacher_examples()
        return ([*items, *self.held_out] if self.held_out else items), collate_items

    def _collate(self, items: Sequence[Encoded]) -> Batch:
        padding: Any = self.tokenizer.pad_token_id
        if self.task.config.data.packing:
            return collate_packed(items, padding, max_length=self.task.config.data.max_length)
        return collate(items, padding)

    def validation(self, share: Share) -> list[Batch]:
        padding: Any = self.tokenizer.pad_token_id
        one_by_one, rank = partial(collate, pad_token_id=padding), {"rank": share.rank, "world_size": share.world_size}
        batches = scoring_batches(self.valid_items, one_by_one, batch_size=share.micro_batch_size, **rank)
        return [batch for _, batch in batches]

    def comparison_batches(self) -> tuple[list[Batch], str]:
        """See TaskData; rows are not packed here, as each token is compared by its row's next one."""
        sets = {"data.valid": self.valid_items, "held-out rows": self.held_out, "the training set": self.train or ()}
        name, items = next(((name, items) for name, items in sets.items() if len(items)), ("", ()))
        if not name:
            return super().comparison_batches() if self.task.trains else ([], "")
        padding: Any = self.tokenizer.pad_token_id
        first = range(0, min(len(items), 512), 8)
        return [collate(items[start : start + 8], padding) for start in first], name

    def held_out_questions(self) -> list[HeldOutQuestion]:
        """See TaskData: the first of the rows that are held out."""
        decode, questions = partial(self.tokenizer.decode, skip_special_tokens=True), list[HeldOutQuestion]()
        # Rows of messages take the chat template whatever the prompt is.
        prompts = {self.limits.prompt, *([] if self.tokenizer.chat_template is None else [CHAT])}
        arounds = [around for prompt in prompts if all(around := text_around(self.tokenizer, prompt))]
        for item in self.held_out[:ASKED]:
            begin, end = item.borders[-2:]
            whole = str(self.tokenizer.decode(item.last_prompt))
            alone = (
                whole[len(before) : -len(after)]
                for before, after in arounds
                if whole.startswith(before) and whole.endswith(after)
            )
            prompt = next(alone, None) or str(decode(item.last_prompt)).strip()
            reference = str(decode(item.ids[begin:end])).strip()
            questions.append(HeldOutQuestion(prompt_ids=item.last_prompt, prompt=prompt, reference=reference))
        return questions

    def validation_score(self, scored: ScoredModel) -> float:
        return float(self._score(VALID, scored)["rougeL"])

    def score_set(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        """See Task: ROUGE-L of the generated answers, for the validation set also the comparison with chance."""
        if name in self.texts.texts:
            return self.texts.score(name, scored)
        score = self._score(name, scored)
        if name == VALID and World.current().is_main:
            rows = json_lines(scored.predictions / f"{name}.jsonl")
            if len(rows) < 2:  # the answer to one question is compared with the answers to the others
                return {**score, "chance": None, "above_chance": True}
            answers = [next(iter(row["predictions"].values())) for row in rows]
            chance = measure_chance(answers, [row["references"] for row in rows], score["rouge_words"])
            score |= {"chance": chance.other, "above_chance": chance.is_beaten}
        return score

    def _score(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        return score_sets(
            scored,
            {name: self._scored_examples()[name]},
            self._generation_settings(name),
            self.limits,
            predictions_dir=scored.predictions,
        )[name]

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """See Task.

        Returns:
            ``{"rougeL": {SET: 0-100}, "rougeL_std": {SET: …}, "rouge_words": {SET: how texts are cut into words},
            "generation_tokens_per_second"}``, and
            ``"valid": {"rougeL", "chance", "above_chance"}`` if there is a validation set. With test sets also
            ``"perplexity": {SET: of the references}``, if it was measured on all of them, and ``"examples": {SET:
            {"scored", "total"}}``. Texts are added by `TextTests.summary`.
        """
        texts = self.texts.summary(scores)
        scores = {name: score for name, score in scores.items() if name not in self.texts.texts}
        # Time adds up over sets, and rates do not.
        seconds = sum(score["tokens"] / score["tokens_per_second"] for score in scores.values())
        tokens = sum(score["tokens"] for score in scores.values())
        summary: dict[str, Any] = {
            "rougeL": {name: scores[name]["rougeL"] for name in self.tests},
            "rougeL_std": {name: scores[name]["std"] for name in self.tests},
            "rouge_words": {name: scores[name]["rouge_words"] for name in self.tests},
            **({"generation_tokens_per_second": tokens / seconds} if scores else {}),
        }
        tests = {name: scores[name] for name in self.tests}
        if tests and all("perplexity" in score for score in tests.values()):
            summary["perplexity"] = {name: score["perplexity"] for name, score in tests.items()}
        if tests:
            summary["examples"] = {
                name: {"scored": score["examples"], "total": score["total"]} for name, score in tests.items()
            }
        if VALID in scores:
            summary["valid"] = {key: scores[VALID][key] for key in ("rougeL", "chance", "above_chance")}
        return summary | texts

    def sentence(self, model: str, summary: Mapping[str, Any]) -> str:
        shown = "  ".join(f"{name} {value:.1f}" for name, value in summary["rougeL"].items())
        chosen = f"  validation {summary['valid']['rougeL']:.1f}" if VALID in summary else ""
        texts = self.texts.sentence(summary)
        perplexity = f"  perplexity {texts}" if texts else ""
        return f"ROUGE-L of the {model}: {shown + chosen or 'no test sets'}{perplexity}"

    def warnings(self, teacher: Mapping[str, Any] | None) -> list[str]:
        valid = None if teacher is None else teacher.get(VALID)
        if valid is None or valid["above_chance"]:
            return list(self.data_warnings)
        return [
            *self.data_warnings,
            f"the teacher scores at chance on the validation set: ROUGE-L {valid['rougeL']:.1f}, where its answers "
            f"score {valid['chance']:.1f} against the references of other questions. Nothing can be learned from it, "
            "and every comparison with it is meaningless: fine-tune it first (method sft), or check the format of its "
            "prompts",
        ]

    def table(self, results: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
        measured = any("perplexity" in result for result in results.values())
        rows = {name: [f"{result['rougeL'][test]:.1f}" for test in self.tests] for name, result in results.items()}
        if measured:
            for name, result in results.items():
                by_set = result.get("perplexity")
                rows[name].append(show_perplexity(None if by_set is None else mean_perplexity(by_set)))
        counts: Mapping[str, Any] = next(
            (result["examples"] for result in results.values() if "examples" in result), {}
        )
        words: Mapping[str, Words] = next(
            (result["rouge_words"] for result in results.values() if "rouge_words" in result), {}
        )
        numbered = (f"{test} (n = {counts[test]['scored']})" if test in counts else test for test in self.tests)
        table = ScoreTable(
            title="ROUGE-L (0-100) on each set",
            columns=[*self.tests, *(["perplexity"] if measured else [])],
            rows=rows,
            legend=(
                f"ROUGE-L on {', '.join(numbered) or 'no test set'}: {describe_words(words)}, best of the references, "
                f"x 100; decoding: {self.task.config.scoring.decoding}."
                + (" Perplexity: of the first references, by token, geometric mean of the sets." if measured else "")
            ),
        )
        return self.texts.add_columns(table, results)

    def after_training(self, loader: Loader) -> str | None:
        return loader.report() if isinstance(loader, StreamLoader) else None
