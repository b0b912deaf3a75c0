"""Settings of the training data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from llmdistill.config.generation import WriteConfig
from llmdistill.config.marks import (
    ADDRESS,
    COMMON,
    FREE,
    PATIENCE,
    SHARE,
    SHARE_BELOW_1,
    SHARE_OVER_0,
    at_least,
    distinct,
    earlier_default,
    replaced_by,
    replaces,
    takes,
)
from llmdistill.errors import check_name

LIMITS = ("prompt", "max_prompt_length", "max_length", "long_prompts")
"""The fields of DataConfig that commands outside of a run take too: the prompt of instructions, and lengths."""
NOT_OF_EXAMPLES = (
    "write",
    "train",
    "valid",
    "tests",
    "held_out",
    "on_policy",
    "rollout",
    "cache_dir",
    "pad_to_multiple_of",
)
"""The fields of DataConfig that do not say how the rows of a file become examples."""
STUDENT_WRITES = "data.on_policy"
"""The setting by which the student writes answers during the training."""


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How a corpus is read and which of its tokens are labels."""

    field: str = "text"
    """Key of the text in rows of JSONL, JSON, Parquet, CSV, TSV or a data set on the hub; each row is a document. In a
    plain text file a line is a segment, and an empty line ends a document."""
    mask_share: float = dataclasses.field(
        default=0.15, metadata=takes(lambda value: 0 < value < 1, "give a share between 0 and 1, 0.15 is usual")
    )
    """Share of the tokens that an encoder has to predict; of these 80 % are masked, 10 % are replaced by random
    tokens and 10 % stay as they are."""
    whole_words: bool = False
    """Choose whole words rather than single tokens."""
    pairs: bool | None = dataclasses.field(default=None, metadata=replaces("data.text.next_sentence", by=(False,)))
    """Whether an encoder reads pairs of segments, as in BERT's pre-training, instead of one piece of text: half of the
    second segments follow the first, half are from another document. Without pairs the embedding of the second segment
    learns nothing, and a task on pairs of sentences begins with its initial weights. Default: yes if the student tells
    two segments apart (BERT, not RoBERTa), or next_sentence is learned."""
    next_sentence: bool | None = dataclasses.field(default=None, metadata=replaces("data.text.pairs", by=(True,)))
    """Whether an encoder also predicts whether the second segment follows the first (BERT), which needs pairs. Default:
    yes if the teacher was saved with BERT's next-sentence head (BertForPreTraining) and the method uses it, unless
    pairs is false."""
    fraction: float = dataclasses.field(
        default=1.0, metadata=takes(lambda value: 0 < value <= 1, "give a share over 0 and up to 1, 0.1 for a tenth")
    )
    """Share of the documents of the training text that is used, above 0 and up to 1: one document out of each
    1/fraction successive ones, drawn by seed. Only these documents are tokenized. The validation text is always used
    as a whole."""
    sampling_exponent: float | None = dataclasses.field(
        default=None, metadata=takes(lambda value: 0 <= value <= 1, "give 0 to 1, 0.3 is XLM-R's")
    )
    """Sample the parts of the training text (the files and folders directly in data.train, one for each language) in
    proportion to their size to the power of this number: 0 draws all parts alike, 1 draws them by size, and XLM-R's
    0.3 shows small languages more often. Default: the folder is one text."""
    valid_sequences: int = dataclasses.field(default=512, metadata=at_least(1))
    """Number of sequences of data.valid that are used, from its beginning."""

    def __post_init__(self) -> None:
        if self.next_sentence and self.pairs is False:
            raise ValueError(
                "data.text.next_sentence is true, but data.text.pairs is false: a next sentence needs pairs, leave one "
                "of them out"
            )


@dataclass(frozen=True, kw_only=True)
class WritingConfig:
    """How an encoder learns to write the target of a source (UniLM's fine-tuning), and how it searches a text."""

    mask_share: float = field(default=0.7, metadata=SHARE_OVER_0)
    """Share of the tokens of a target that are predicted, drawn anew in each epoch; the end token may be one of them.
    Of these 80 % are masked, 10 % are replaced by random tokens and 10 % stay as they are."""
    label_smoothing: float = field(default=0.1, metadata=SHARE_BELOW_1)
    """Share of each label that is spread evenly over the vocabulary; 0 switches it off."""
    max_length: int = field(default=48, metadata=at_least(2))
    """Largest number of tokens of a text, end token included; a longer target is cut. The source gets the rest of
    data.max_length, and its end is cut."""
    min_length: int = field(default=0, metadata=at_least(0))
    """Smallest number of tokens that are written before the end token."""
    beams: int = field(default=5, metadata=at_least(1))
    """Number of unfinished texts that the search keeps; 1 is greedy decoding."""
    length_penalty: float = field(default=0.0, metadata=at_least(0))
    """The log-probability of a text is divided by ((5 + length) / 6)^length_penalty (GNMT); 0 prefers short texts."""
    no_repeat_ngram_size: int = field(default=0, metadata=at_least(0))
    """No n-gram of this length occurs twice in a written text; 0 switches this off."""

    def __post_init__(self) -> None:
        if self.min_length >= self.max_length:
            raise ValueError(
                f"data.task.writing.min_length is {self.min_length} and max_length {self.max_length}: the end token "
                "needs a place, give a smaller min_length"
            )


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A task with its own examples, splits and metrics, such as those of GLUE. The student gets a head for it."""

    name: str | None = None
    """The task, such as rte, cola, sst2, squad2, mlqa or xnli."""
    dir: str | None = None
    """Folder of the task's files: the one of the task, or one with a folder for each task (GLUE's own download:
    RTE/train.tsv ...; SQuAD's files: squad2/train-v2.0.json ...); default: the data set on the hub."""
    metric: str | None = None
    """Only for GLUE and XNLI: the metric of the task that chooses settings on dev, such as accuracy for mrpc; default:
    the task's first."""
    limit: int | None = field(default=None, metadata=at_least(1))
    """Number of training examples to train on, from the first one; for a quick test."""
    copy_classifier: bool | None = None
    """Initialize the classifier from the fine-tuned teacher's classifier (KroneckerBERT §3.7) instead of random
    numbers. Default: yes if the method recommends it and both classifiers have the same shape."""
    stride: int = field(default=128, metadata=at_least(1))
    """Question answering: tokens from one window in a long context to the next one; a window has data.max_length."""
    max_question_length: int = field(default=64, metadata=at_least(1))
    """Question answering: tokens of a question; a longer one is cut."""
    max_answer_length: int = field(default=30, metadata=at_least(1))
    """Question answering: largest number of tokens of a predicted answer."""
    languages: list[str] | None = field(default=None, metadata=distinct(wanted=", such as en,de"))
    """Languages of a multilingual task that are scored, separated by commas, such as en,de,zh; default: all for which
    the folder has data, and on the hub all of the task."""
    out_of_domain: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sets of other data on which a classifier is scored too (KroneckerBERT Table 9), by the names of their columns.
    PAWS (for MRPC), IMDb (SST-2) and HANS (RTE) need nothing, {HANS: {}}, or the place of the data, {HANS: {data:
    hans/heuristics_evaluation_set.txt}}. Any other set also needs its task, its columns, and the label of the set that
    each class of the task stands for: {Reviews: {task: sst2, data: reviews.tsv, sentences: [text], label: stars,
    labels: {"0": ["1", "2"], "1": ["4", "5"]}}}. data is a file (TSV with a header, CSV, JSONL, JSON, Parquet) or a
    name on the hub."""
    crossed: bool = False
    """MLQA: also score questions in one language on contexts in another, for each pair of the languages."""
    writing: WritingConfig = field(default_factory=WritingConfig)
    """Settings of tasks in which an encoder writes texts, such as summarization."""

    def __post_init__(self) -> None:
        for name in self.out_of_domain:
            check_name(name, "data.task.out_of_domain")


@dataclass(frozen=True, kw_only=True)
class SentencesConfig:
    """How the embeddings of sentences are made. By default the teacher's files of sentence-transformers decide."""

    pooling: Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"] | None = None
    """How the outputs of the tokens become the embedding; default: as in the teacher's 1_Pooling/config.json, and
    mean without it."""
    triples: bool = False
    """The training set has rows of a query (or anchor), a positive and a negative, which stay together in a batch, for
    embedding.margin. Batches are then counted in triples."""
    normalize: bool | None = None
    """Whether an embedding is divided by its length; default: whether the teacher's modules.json says so."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What writes the answers of the student (data.on_policy)."""

    url: str | None = field(default=None, metadata=FREE | ADDRESS)
    """Address of a vLLM server that writes them, such as http://localhost:8000, and gets the student's weights from the
    run; docs/methods.md says how to start it. Default: the student itself, by transformers' generate."""
    every: int = field(default=1, metadata=at_least(1))
    """Number of steps between two hand-overs of the weights to the server; with more than 1 an older student writes."""
    wait: float = field(default=600.0, metadata=FREE | PATIENCE)
    """Seconds without any answer from the server after which the training saves its last step and ends; until then it
    repeats failed requests."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data: files, folders, or NAME[:SPLIT] on the hub; several as a.jsonl,b.jsonl.

    Instructions are rows of JSONL, JSON, Parquet, CSV or TSV that hold instruction, input (may be empty) and output (a
    string or a list of strings), or prompt and completion, or messages. Text is a plain text file, or such rows with a
    text in them.
    """

    kind: Literal["instructions", "text", "task", "sentences"] = field(
        default="instructions",
        metadata=replaces("data.on_policy", "data.streaming", "data.packing", by=("text", "task", "sentences"))
        | replaces("data.tests", "data.bucket_steps", by=("text", "task"))
        | replaces("data.train", "data.valid", by=("task",))
        | replaces("train.epochs", by=("instructions",)),
    )
    """instructions: a decoder learns the answers; text: a corpus, of which a decoder learns each next token and an
    encoder the masked tokens (settings under data.text); task: a model is fine-tuned on a task with labels, such as
    one of GLUE (settings under data.task); sentences: sentences without labels, of which an encoder learns the
    teacher's embeddings (settings under data.sentences)."""
    train: str = field(default="embedded:train", metadata=COMMON)
    """Training set; if an instruction has several answers, the first one is the label. With a.jsonl=2,b.jsonl=1 two of
    three examples come from a.jsonl; an epoch has as many examples as all files together. "teacher" is what the teacher
    writes itself before the training: chats with data.kind instructions, texts with text."""
    write: WriteConfig = field(default_factory=WriteConfig)
    """What the teacher writes for data.train teacher."""
    valid: str | None = field(default=None, metadata=FREE | COMMON | replaces("train.keep_best", by=(None,)))
    """Validation set, for choosing settings; never trained on. Its loss is logged, and at the end instructions are also
    scored on it by ROUGE-L, sentences by Spearman's correlation."""
    held_out: float | None = field(
        default=None,
        metadata=earlier_default(0) | takes(lambda value: value >= 0, "give a share, a number of rows, or 0"),
    )
    """Rows of the training set that the run neither trains nor calibrates on, and on which it compares the teacher with
    the untrained and the trained student: a share below 1 (8 to 200 rows, at most a quarter of the set), a number, or
    0. Only for instructions that are not streamed. Default: 2 %, or 0 if there is a validation set."""
    tests: dict[str, str] = field(default_factory=dict, metadata=FREE | COMMON)
    """Test sets as {name: path}: instructions, pairs of sentences, or texts (.txt, or rows of text). Every model of
    the final table is scored on each, on a text by its perplexity in windows (scoring.window, scoring.stride). The
    lines of a text named wikitext2 are joined as in the papers on SVD."""
    streaming: bool = False
    """Read the training set while training instead of before it, for sets that do not fit into memory."""
    shuffle_buffer: int = field(default=10_000, metadata=at_least(1, " (1 does not shuffle)"))
    """Number of examples in the buffer that a streamed set is shuffled in."""
    bucket_steps: int = field(default=1, metadata=at_least(1, " (1 sorts each step by itself)"))
    """Number of successive steps whose examples are sorted by length together, so that the examples of each step have
    about the same length. 1: each step keeps its examples, and only its micro batches are sorted, which changes no
    result. A larger number saves padding, and also waiting among ranks if a step has one micro batch per rank, but it
    gives the tokens of short answers a larger weight, because the loss of a step is the mean over its tokens. At most a
    quarter of a training set that is not streamed is sorted together; the setting has no effect with packing."""
    packing: bool = field(default=False, metadata=replaces("data.on_policy", by=(True,)))
    """Put several examples into one row of up to max_length tokens, where no example attends to another: nearly no
    padding, and the same results. A micro batch then holds train.micro_batch_size examples in fewer rows: raise that
    number until the memory is used. Only for decoders on instructions, and not with on_policy."""
    on_policy: float = field(
        default=0.0, metadata=replaces("data.packing", unless=(None, 0)) | replaced_by("method", "sft") | SHARE
    )
    """Share of the steps in which the student generates the answers itself (GKD's lambda), from 0 to 1; for
    methods with a teacher."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Who writes the student's answers (data.on_policy)."""
    prompt: str | None = None
    """The prompt around an instruction: minillm is MiniLLM's, chat the tokenizer's chat template, and any other value a
    text with {instruction} and usually {input} in it. Default: the prompt with which the teacher was trained if an
    earlier run made it, else its chat template, and MiniLLM's prompt if it has none. Rows of messages always take the
    chat template, and rows of prompt and completion none."""
    max_prompt_length: int = 256
    """Largest number of tokens of a prompt, template included."""
    max_length: int = field(default=512, metadata=COMMON | at_least(1))
    """Largest number of tokens of a prompt and its answer together; a longer answer is cut and counted. Text is
    packed into sequences of this length."""
    pad_to_multiple_of: int | None = field(default=None, metadata=FREE | at_least(1))
    """Batches of training are padded to a length that is a multiple of this number, but not beyond max_length, which
    suits the matrix units of a GPU; no result changes. Not with on_policy. Default: 64 on a GPU, 1 on a CPU."""
    long_prompts: Literal["error", "drop", "truncate"] = "error"
    """What to do with prompts that are longer than max_prompt_length: stop with an error, drop them, or keep only
    their end. The log always reports it."""
    turns: Literal["all", "last"] = "all"
    """Which answers of a conversation the student learns: all, or only the last one, with the others in its prompt."""
    cache_dir: str | None = field(default=None, metadata=FREE)
    """Folder of the tokenized texts, instruction sets and tasks, which other runs with the same data and tokenizer use
    again; all ranks map its files into memory. Default: $LLMDISTILL_CACHE, or else ~/.cache/llmdistill."""
    text: TextConfig = field(default_factory=TextConfig)
    """Settings if kind is text."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """Settings if kind is task."""
    sentences: SentencesConfig = field(default_factory=SentencesConfig)
    """Settings if kind is sentences."""

    def __post_init__(self) -> None:
        for name in self.tests:
            check_name(name, "data.tests")
        named = {
            "train": self.train,
            "valid": self.valid,
            **{f"tests.{name}": reference for name, reference in self.tests.items()},
        }
        empty = next((key for key, reference in named.items() if reference == ""), None)
        if empty is not None:
            raise ValueError(f"data.{empty} is empty: name a data set, or leave the setting out")
        if self.kind == "instructions":
            if not 0 < self.max_prompt_length < self.max_length:
                raise ValueError(
                    f"data.max_prompt_length is {self.max_prompt_length} and data.max_length {self.max_length}: "
                    "the prompt's limit must be positive and leave room for an answer"
                )
            return
        if self.kind == "task" and self.task.name is None:
            raise ValueError("data.kind is task, but data.task.name is missing: name a task, such as rte")
        if self.kind == "task" and (self.train != DataConfig.train or self.valid is not None):
            key = "valid" if self.train == DataConfig.train else "train"
            raise ValueError(f"data.{key} names a file, but a task brings its own splits: leave it out")
        if self.kind == "text" and self.max_length < 8:
            raise ValueError(f"data.max_length is {self.max_length}: give 8 or more, the shortest sequence of a text")
        if self.kind != "task" and self.train.startswith("embedded:"):
            what = "text" if self.kind == "text" else "file"
            raise ValueError(f"data.train {self.train} holds instructions, but data.kind is {self.kind}: name a {what}")

    @property
    def why_answers_change(self) -> str | None:
        """Why the answers of a prompt change from step to step, as part of a sentence; None if they are given."""
        share = self.on_policy
        return f"data.on_policy {share:g} has the student write some of the answers" if share > 0 else None
