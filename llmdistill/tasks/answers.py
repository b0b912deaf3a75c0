"""ROUGE-L of a model's answers to the instructions of a set."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.config import GenerationConfig
from llmdistill.data.examples import Example
from llmdistill.data.instruct import EncodedPrompts, LongPrompts, check_lengths, encode_example_prompts
from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate
from llmdistill.factorize.counting import count_parameters
from llmdistill.files import write_json, write_text
from llmdistill.generation.answers_file import prompt_row
from llmdistill.generation.decode import Decoding, GenerationResult, generate
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.tasks.rouge import rouge_l

Log = Callable[[str], None]


@dataclass(frozen=True)
class SetScore:
    """The score of a model on one set."""

    rouge_l: float
    """0-100, mean over the passes."""
    per_seed: list[float]
    std: float
    """Sample standard deviation over the passes; 0 for a single one."""
    tokens_per_second: float
    """The speed of generation, over all passes and ranks."""
    tokens: int
    """The number of generated tokens, over all passes and ranks."""
    examples: int
    """The number of examples scored in each pass."""
    dropped: int
    """The number of examples left out because their prompt is too long."""
    truncated: int
    """The number of prompts whose start was cut off."""

    def to_dict(self) -> dict[str, Any]:
        """Return the score as plain JSON values; the key of ROUGE-L is rougeL, as usual in the field."""
        values = dict(vars(self))
        return {"rougeL": values.pop("rouge_l"), **values}


def score_set(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    settings: GenerationConfig,
    *,
    max_prompt_length: int,
    max_length: int,
    long_prompts: LongPrompts = "error",
    predictions_path: Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    synced: bool = False,
    log: Log | None = None,
) -> SetScore:
    """Generate answers once per seed (once if greedy), save the predictions as JSONL (rank 0), and score them.

    Raises:
        UserError: a prompt exceeds max_prompt_length, and long_prompts neither drops nor truncates it.
    """
    prompts = _encode(examples, tokenizer, settings, max_prompt_length, long_prompts)
    kept = [examples[index] for index in prompts.kept]
    passes: dict[str, GenerationResult] = {}
    scores: list[float] = []
    for name, seed in _passes(settings).items():
        passes[name] = generate(
            model,
            tokenizer,
            prompts.ids,
            decoding_of(settings),
            max_prompt_length=max_prompt_length,
            max_length=max_length,
            seed=seed,
            rank=rank,
            world_size=world_size,
            synced=synced,
        )
        scores.append(rouge_l(passes[name].texts, [example.outputs for example in kept]))
        if log is not None:
            speed = passes[name].tokens / passes[name].seconds
            log(f"{name}: ROUGE-L {scores[-1]:.2f} over {len(kept)} examples, {speed:.0f} tokens/s")
    if predictions_path is not None and rank == 0:
        _write_predictions(predictions_path, kept, {name: result.texts for name, result in passes.items()})
    return _summary(list(passes.values()), scores, prompts)


def decoding_of(settings: GenerationConfig) -> Decoding:
    """Return the decoding of the scored answers."""
    return Decoding(
        sample=settings.decoding == "sample",
        no_repeat_ngram_size=settings.no_repeat_ngram_size,
        batch_size=settings.batch_size,
    )


def _encode(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    settings: GenerationConfig,
    max_prompt_length: int,
    long_prompts: LongPrompts,
) -> EncodedPrompts:
    return encode_example_prompts(
        examples[: settings.limit], tokenizer, max_prompt_length=max_prompt_length, long_prompts=long_prompts
    )


def _summary(passes: Sequence[GenerationResult], scores: list[float], prompts: EncodedPrompts) -> SetScore:
    tokens = sum(result.tokens for result in passes)
    return SetScore(
        rouge_l=statistics.fmean(scores),
        per_seed=scores,
        std=statistics.stdev(scores) if len(scores) > 1 else 0.0,
        tokens_per_second=tokens / sum(result.seconds for result in passes),
        tokens=tokens,
        examples=len(prompts.ids),
        dropped=prompts.dropped,
        truncated=prompts.truncated,
    )


def _passes(settings: GenerationConfig) -> dict[str, int]:
    if settings.decoding == "greedy":
        return {"greedy": 0}
    return {f"seed {seed}": seed for seed in settings.seeds}


def _write_predictions(path: Path, examples: Sequence[Example], texts: Mapping[str, Sequence[str]]) -> None:
    rows = [
        {
            **prompt_row(example),
            "references": list(example.outputs),
            "predictions": {name: answers[index] for name, answers in texts.items()},
        }
        for index, example in enumerate(examples)
    ]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def check_sets(
    sets: Mapping[str, Sequence[Example]],
    tokenizer: PreTrainedTokenizerBase,
    settings: GenerationConfig,
    *,
    max_prompt_length: int,
    max_length: int,
    long_prompts: LongPrompts = "error",
) -> None:
    """Check limits and prompts without a model.

    Raises:
        UserError: for the same limits and prompts as `score_sets`.
    """
    check_lengths(max_prompt_length, max_length)
    for examples in sets.values():
        _encode(examples, tokenizer, settings, max_prompt_length, long_prompts)


def score_sets(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sets: Mapping[str, Sequence[Example]],
    settings: GenerationConfig,
    *,
    max_prompt_length: int,
    max_length: int,
    long_prompts: LongPrompts = "error",
    predictions_dir: Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    synced: bool = False,
    log: Log | None = None,
) -> dict[str, SetScore]:
    """Call `score_set` for each named set; the predictions of NAME are saved to predictions_dir/NAME.jsonl."""
    lengths: dict[str, Any] = {"max_prompt_length": max_prompt_length, "max_length": max_length}
    check_sets(sets, tokenizer, settings, long_prompts=long_prompts, **lengths)
    scores = {}
    for name, examples in sets.items():
        scores[name] = score_set(
            model,
            tokenizer,
            examples,
            settings,
            **lengths,
            long_prompts=long_prompts,
            predictions_path=None if predictions_dir is None else predictions_dir / f"{name}.jsonl",
            rank=rank,
            world_size=world_size,
            synced=synced,
            log=None if log is None else _prefixed(log, name),
        )
    return scores


def _prefixed(log: Log, name: str) -> Log:
    return lambda line: log(f"{name}, {line}")


def evaluate_model(
    model_path: str,
    data: Mapping[str, str],
    settings: GenerationConfig,
    *,
    max_prompt_length: int = 256,
    max_length: int = 512,
    long_prompts: LongPrompts = "error",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    output_dir: Path | None = None,
    rank: int = 0,
    world_size: int = 1,
    log: Log | None = None,
) -> dict[str, Any]:
    """Load a model and score it on sets given as {name: JSONL file or embedded:NAME}.

    Returns plain JSON values. Rank 0 also writes them to output_dir/metrics.json, next to the predictions. Every rank
    loads the whole model and answers its share of the prompts.

    Raises:
        UserError: a file is missing or malformed; this is raised before the model is loaded.
    """
    sets = {name: read_examples(locate(path)) for name, path in data.items()}
    folder = locate(model_path)
    tokenizer = load_tokenizer(folder)
    limits: dict[str, Any] = {
        "max_prompt_length": max_prompt_length,
        "max_length": max_length,
        "long_prompts": long_prompts,
    }
    check_sets(sets, tokenizer, settings, **limits)
    model = load_model(folder, dtype=dtype, device=device)
    scores = score_sets(
        model,
        tokenizer,
        sets,
        settings,
        **limits,
        predictions_dir=output_dir,
        rank=rank,
        world_size=world_size,
        log=log,
    )
    result = {
        "model": model_path,
        "params": count_parameters(model),
        "dtype": str(dtype).removeprefix("torch."),
        "decoding": settings.decoding,
        "passes": list(_passes(settings)),
        "no_repeat_ngram_size": settings.no_repeat_ngram_size,
        "max_prompt_length": max_prompt_length,
        "max_length": max_length,
        "sets": {name: score.to_dict() for name, score in scores.items()},
    }
    if output_dir is not None and rank == 0:
        write_json(output_dir / "metrics.json", result)
    return result
