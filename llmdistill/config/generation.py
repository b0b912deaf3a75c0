"""Settings of generating answers: those of a model that is scored, and a teacher's that become training data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse import ArgumentParser

from llmdistill.config.marks import FREE, OVER_0, SHARE_OVER_0, at_least, distinct, takes


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How answers and texts are scored, as in MiniLLM and in the papers on SVD.

    Unlike in MiniLLM, decoding is greedy by default; MiniLLM's sets (--suite) and the papers' recipes use its five
    sampling passes.
    """

    decoding: Literal["sample", "greedy"] = "greedy"
    """greedy: one pass. sample: MiniLLM's temperature 1, top_p 1, no top_k, and one pass per seed, the default of
    `evaluate --suite dolly` and MiniLLM's other sets."""
    seeds: list[int] = field(default_factory=lambda: [10, 20, 30, 40, 50], metadata=distinct(0, ", none below 0"))
    """Seeds of the sampling passes; the reported ROUGE-L is their mean."""
    no_repeat_ngram_size: int = field(default=6, metadata=at_least(0))
    """No n-gram of this length occurs twice in an answer; 0 switches this off."""
    batch_size: int = field(default=32, metadata=at_least(1))
    """Number of prompts answered at once on each rank, on a GPU up to 512 if half of its free memory holds them; when
    an answer ends, the next prompt takes its place. Answers depend on this number only by rounding."""
    limit: int | None = field(default=None, metadata=at_least(1))
    """Score only the first examples of each set, and the first windows of a text, up to this number."""
    window: int | None = field(default=None, metadata=at_least(2))
    """Tokens of a window for the perplexity of a text, including the begin token if the tokenizer writes one. An
    incomplete last window is left out. Default: 2048, as in the papers on SVD, or the model's positions if these are
    fewer."""
    stride: int | None = field(default=None, metadata=at_least(1))
    """Tokens from the start of one window of a text to the next. Tokens that a window shares with the one before are
    only context. Default: no overlap."""
    models: list[Literal["teacher", "untrained", "student"]] = field(
        default_factory=lambda: ["teacher", "untrained", "student"]
    )
    """The models of a run to score."""


@dataclass(frozen=True, kw_only=True)
class ResponseConfig:
    """The prompts that a teacher answers, and how it generates the answers."""

    decoding: Literal["sample", "greedy"] = "sample"
    """sample: sample from the teacher's distribution; greedy: take the most likely token at each position."""
    temperature: float = field(
        default=1.0, metadata=takes(lambda value: value > 0, "give a number over 0 (or decode greedily)")
    )
    """The logits are divided by this temperature before a token is sampled."""
    top_p: float = field(default=1.0, metadata=SHARE_OVER_0)
    """Sample from the smallest set of tokens whose total probability is at least top_p; 1 keeps all tokens."""
    top_k: int = field(default=0, metadata=at_least(0))
    """Sample from the top_k most likely tokens; 0 keeps all tokens."""
    seed: int = field(default=0, metadata=at_least(0))
    """Seed of the samples; these depend on the batches and on the number of ranks only by rounding."""
    no_repeat_ngram_size: int = field(default=0, metadata=at_least(0))
    """No n-gram of this length occurs twice in prompt and answer together; 0 switches this off."""
    batch_size: int | None = field(default=None, metadata=at_least(1))
    """Number of prompts answered at once on each rank and saved together; an interruption loses only unfinished
    batches. On a GPU transformers answers up to 512 at once if half of its free memory holds them. Default: 32, or 1024
    with vLLM."""
    limit: int | None = field(default=None, metadata=at_least(1))
    """Answer only the first prompts, up to this number."""
    prompt: str | None = None
    """The prompt around an instruction, as data.prompt of a run."""
    max_prompt_length: int = 256
    """Maximum number of tokens of a prompt, including the template."""
    max_length: int = 512
    """An answer has at most max_length - max_prompt_length tokens."""
    long_prompts: Literal["error", "drop", "truncate"] = "error"
    """What happens to prompts longer than max_prompt_length: stop with an error, drop them, or keep only their end.
    The number of these prompts is always reported."""
    reasoning: Literal["keep", "drop"] = "keep"
    """keep: write a chat's reasoning and its special tokens too, so that the student learns all of the teacher's
    tokens; drop: write only the final answer."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the teacher; auto: bf16 on a GPU that supports it, else fp32."""
    engine: Literal["auto", "hf", "vllm"] = "auto"
    """hf: transformers' generate, on one or several ranks; vllm: vLLM, one process for all GPUs; auto: vLLM if it is
    installed and can run this request, else hf."""


@dataclass(frozen=True, kw_only=True)
class WriteConfig:
    """What a teacher writes as its own training data, and how it samples it.

    An instruct model writes chats: from its chat template up to the user's text it samples the user's turn, and then
    the answer (Magpie, Xu et al. 2024). A base model writes texts from their begin token on.
    """

    rows: int | None = field(default=None, metadata=at_least(1))
    """Number of rows; default: 1,000, or as many as `tokens` says."""
    tokens: int | None = field(default=None, metadata=at_least(1))
    """Number of tokens after which no further row is written; with `rows` too, whichever comes first ends the
    writing."""
    prompt_temperature: float = field(default=1.0, metadata=OVER_0)
    """Temperature of the user's turn, or of a text."""
    prompt_top_p: float = field(default=0.98, metadata=SHARE_OVER_0)
    """Top-p of the same: tokens are sampled from the smallest set with this total probability."""
    temperature: float = field(default=0.9, metadata=OVER_0)
    """Temperature of the answer."""
    top_p: float = field(default=0.95, metadata=SHARE_OVER_0)
    """Top-p of the answer."""
    max_prompt_tokens: int = field(default=80, metadata=at_least(1))
    """Largest number of tokens of a user's turn; a longer one is dropped."""
    max_answer_tokens: int = field(default=320, metadata=at_least(1))
    """Largest number of tokens of an answer; `unfinished` says what happens to a longer one."""
    max_text_tokens: int | None = field(default=None, metadata=at_least(1))
    """Largest number of tokens of a text; default: 512, or as many as a smaller model reads."""
    unfinished: Literal["drop", "keep"] | None = None
    """drop: rows whose answer or text did not end within its limit are dropped; keep: they are rows, cut at the limit.
    Default: drop for chats, keep for texts."""
    similarity: float = field(default=0.5, metadata=SHARE_OVER_0)
    """Drop a user's turn or a text that shares at least this part of its three-token pieces with an earlier one
    (Jaccard index). 1 drops only equal ones."""
    seed: int = field(default=0, metadata=at_least(0))
    """Seed of the samples. Each row has random numbers of its own, so its tokens depend on the batch and on the number
    of ranks only where rounding does."""
    batch_size: int | None = field(default=None, metadata=FREE | at_least(1))
    """Rows sampled at once on each rank, on a GPU at most as many as half of its free memory holds; an interruption
    loses at most these. Default: 32 on a CPU, 512 on a GPU, or 1024 with vLLM."""
    dtype: Literal["auto", "fp32", "bf16"] = field(default="auto", metadata=FREE)
    """Number format of the teacher; auto: bf16 on a GPU that supports it, else fp32."""
    engine: Literal["auto", "hf", "vllm"] = field(default="auto", metadata=FREE)
    """hf: transformers' generate, on one or several ranks; vllm: vLLM, one process for all GPUs; auto: vLLM if it is
    installed and can run the teacher, else hf."""


def add_limits(parser: ArgumentParser, *, long_prompts: str | None, hint: str = "") -> None:
    """Add how prompts are put and cut to a parser, also under a run's keys, which error messages name.

    `hint` ends the help of long_prompts, whose default is the value of the argument.
    """
    for name, text in (
        ("max_prompt_length", "Largest number of tokens of a prompt, template included."),
        ("max_length", "An answer has at most max_length - max_prompt_length tokens."),
    ):
        parser.add_argument(f"--{name}", f"--data.{name}", type=int, default=getattr(ResponseConfig, name), help=text)
    text = f"What to do with prompts over max_prompt_length{hint}."
    kinds = Literal["error", "drop", "truncate"]
    parser.add_argument("--long_prompts", "--data.long_prompts", type=kinds, default=long_prompts, help=text)
    text = "The prompt around an instruction: minillm (MiniLLM's), chat (the tokenizer's chat template), or a text "
    text += "with {instruction} and usually {input} in it. Default: the prompt with which an earlier run trained the "
    text += "model, else its chat template, and MiniLLM's prompt if it has none."
    parser.add_argument("--prompt", "--data.prompt", type=str, help=text)
