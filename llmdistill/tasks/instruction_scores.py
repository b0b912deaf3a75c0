"""ROUGE-L of a model's answers to the instructions of some sets."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.config import GenerationConfig
from llmdistill.data.examples import Example, all_empty, no_answer
from llmdistill.data.instruct import EncodedPrompts, Limits, encode_prompts
from llmdistill.data.prompts import answer_ends, describe_prompt, resolve_prompt
from llmdistill.data.sources import read_examples
from llmdistill.data.whole_text import WholeText
from llmdistill.embedded import locate
from llmdistill.files import write_json, write_text
from llmdistill.fingerprints import content_fingerprint, fingerprint
from llmdistill.generation.decode import Decoding, GenerationResult, generate_passes
from llmdistill.generation.kept_answers import KeptAnswers
from llmdistill.generation.response_rows import prompt_row
from llmdistill.models.companions import download
from llmdistill.models.configs import load_config
from llmdistill.models.gguf import origin
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.runtime.distributed import World
from llmdistill.students.counting import count_parameters
from llmdistill.tasks.base import LoadedModel
from llmdistill.tasks.reference_loss import score_references
from llmdistill.tasks.rouge import reference_words, rouge_l
from llmdistill.tasks.text_windows import Windows, read_windows, score_windows


def encode_sets(
    sets: Mapping[str, Sequence[Example]],
    tokenizer: PreTrainedTokenizerBase,
    settings: GenerationConfig,
    limits: Limits,
) -> dict[str, EncodedPrompts]:
    """Tokenize the prompts of the examples that are scored; this also checks them without a model.

    Raises:
        UserError: a prompt exceeds the limit and is neither dropped nor truncated, or no prompt is left; or all answers
            of a set are empty.
    """
    for name, examples in sets.items():
        if all_empty(examples):
            raise no_answer(name, len(examples))
    return {name: encode_prompts(examples[: settings.limit], tokenizer, limits) for name, examples in sets.items()}


def score_sets(
    loaded: LoadedModel,
    sets: Mapping[str, Sequence[Example]],
    settings: GenerationConfig,
    limits: Limits,
    *,
    predictions_dir: Path | None = None,
    kept: Mapping[str, KeptAnswers] | None = None,
    log: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Generate answers to each named set, once per seed (once if greedy), and score them.

    The ranks share the batches of all passes, and rank 0 saves the answers to the set NAME in
    predictions_dir/NAME.jsonl. kept has the answers to each set that outlive a stop. log is called with one line per
    pass.

    Returns:
        The score of each set as plain JSON values: ``rougeL`` (0-100, mean over the passes), ``rouge_words`` (how
        texts were cut into words, see `words_for`), ``per_seed``, ``std``
        (sample standard deviation over the passes; None for a single one), ``tokens_per_second`` and ``tokens``
        (generated in all passes on all ranks), ``examples`` (scored in each pass), ``dropped`` (examples left out
        because their prompt is too long), ``truncated`` (prompts whose start was cut off), ``total`` (examples of the
        set) and what `score_references` returns.

    Raises:
        UserError: as in `encode_sets`, before any answer is generated.
    """
    world, model, tokenizer = World.current(), loaded.model, loaded.tokenizer
    seeds, scores = _list_passes(settings), {}
    decoding = Decoding(
        sample=settings.decoding == "sample",
        max_prompt_length=limits.max_prompt_length,
        max_length=limits.max_length,
        no_repeat_ngram_size=settings.no_repeat_ngram_size,
        batch_size=settings.batch_size,
    )
    for name, prompts in encode_sets(sets, tokenizer, settings, limits).items():
        examples = [sets[name][index] for index in prompts.indices]
        references = [example.outputs for example in examples]
        # Chosen by the complete set, so that models that drop some prompts, and runs with a limit, choose the same.
        words = reference_words([example.outputs for example in sets[name]])
        passes: dict[str, GenerationResult] = {}
        rouges = []
        # Several ranks share all passes, so that few batches keep many ranks busy; one rank can report each in turn.
        for labels in [list(seeds)] if world.size > 1 else [[label] for label in seeds]:
            results = generate_passes(
                model,
                tokenizer,
                prompts.ids,
                decoding,
                seeds=[seeds[label] for label in labels],
                synced=loaded.sharded,
                kept=None if kept is None else kept[name],
            )
            for label, result in zip(labels, results, strict=True):
                passes[label] = result
                rouges.append(rouge_l(result.texts, references, words))
                if log is not None:
                    score = f"ROUGE-L {rouges[-1]:.2f} over {len(examples)} examples"
                    log(f"{name}, {label}: {score}, {result.tokens / result.seconds:.0f} tokens/s")
        if predictions_dir is not None and world.is_main:
            rows = [
                {
                    **prompt_row(example),
                    "references": list(example.outputs),
                    "predictions": {label: result.texts[index] for label, result in passes.items()},
                }
                for index, example in enumerate(examples)
            ]
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_text(predictions_dir / f"{name}.jsonl", "".join(lines))
        # Times add up over passes, and rates do not.
        tokens = sum(result.tokens for result in passes.values())
        scores[name] = {
            "rougeL": statistics.fmean(rouges),
            "rouge_words": words,
            "per_seed": rouges,
            "std": statistics.stdev(rouges) if len(rouges) > 1 else None,
            "tokens_per_second": tokens / sum(result.seconds for result in passes.values()),
            "tokens": tokens,
            "examples": len(prompts.ids),
            "dropped": prompts.dropped,
            "truncated": prompts.truncated,
            "total": len(sets[name]),
            **score_references(model, tokenizer, examples, limits, batch_size=settings.batch_size),
        }
    return scores


def _list_passes(settings: GenerationConfig) -> dict[str, int]:
    """Return the seed of each pass by the name of the pass."""
    # Greedy decoding draws nothing, so that any seed will do.
    return {"greedy": 0} if settings.decoding == "greedy" else {f"seed {seed}": seed for seed in settings.seeds}


@dataclass(frozen=True, kw_only=True)
class ScoringSets:
    """The sets on which a model is scored, as its tokenizer reads them, and how it answers."""

    model: str
    """Folder, hub name or GGUF file of the model, or embedded:NAME."""
    tokenizer: PreTrainedTokenizerBase
    sets: Mapping[str, Sequence[Example]]
    windows: Mapping[str, Windows]
    """The texts whose perplexity is measured."""
    settings: GenerationConfig
    limits: Limits
    """With the resolved prompt."""


def read_sets(
    model: str,
    data: Mapping[str, str | WholeText],
    settings: GenerationConfig,
    limits: Limits,
    prompt: str | None = None,
) -> ScoringSets:
    """Read the sets on which a model is scored: {name: JSONL file, embedded:NAME, or a text for its perplexity}.

    `prompt` is that of the instructions, as in data.prompt; it replaces that of the limits. Only the tokenizer and the
    config of the model are loaded. Raises UserError if a file is missing or malformed, or as in `encode_sets`.
    """
    sets = {name: read_examples(reference) for name, reference in data.items() if isinstance(reference, str)}
    texts = {name: text for name, text in data.items() if isinstance(text, WholeText)}
    folder = locate(model)
    tokenizer = load_tokenizer(folder)
    limits = replace(limits, prompt=resolve_prompt(prompt, [tokenizer]))
    # Only for its errors: they come before the model is loaded, which may take minutes. `score_sets` encodes again.
    encode_sets(sets, tokenizer, settings, limits)
    windows = read_windows(texts, tokenizer, load_config(folder), settings)
    return ScoringSets(model=model, tokenizer=tokenizer, sets=sets, windows=windows, settings=settings, limits=limits)


def score_model(
    scoring: ScoringSets,
    *,
    dtype: torch.dtype = torch.float32,
    output_dir: Path | None = None,
    log: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Load a model and score it on its sets.

    Returns plain JSON values. Rank 0 also writes them to output_dir/metrics.json, next to the predictions. Every rank
    loads the whole model and answers its share of the prompts.
    """
    world, settings, limits = World.current(), scoring.settings, scoring.limits
    if log is not None and any(example.instruction for examples in scoring.sets.values() for example in examples):
        log(f"instructions are asked by {describe_prompt(limits.prompt)}")
    folder = locate(scoring.model)
    model = load_model(folder, dtype=dtype, device=world.device)
    loaded = LoadedModel(model=model, tokenizer=scoring.tokenizer)
    kept = None if output_dir is None else _kept_answers(scoring, model, output_dir)
    scores = score_sets(loaded, scoring.sets, settings, limits, predictions_dir=output_dir, kept=kept, log=log)
    of_texts = {
        name: score_windows(model, cut, batch_size=settings.batch_size, name=name)
        for name, cut in scoring.windows.items()
    }
    made_from = origin(folder)
    result = {
        "model": scoring.model,
        **({} if made_from is None else {"origin": made_from}),
        "params": count_parameters(model),
        "dtype": str(dtype).removeprefix("torch."),
        "decoding": settings.decoding,
        "passes": list(_list_passes(settings)),
        "no_repeat_ngram_size": settings.no_repeat_ngram_size,
        "max_prompt_length": limits.max_prompt_length,
        "max_length": limits.max_length,
        "prompt": limits.prompt,
        "sets": scores,
        "texts": of_texts,
    }
    if output_dir is not None and world.is_main:
        write_json(output_dir / "metrics.json", result)
        for each in (kept or {}).values():
            each.remove()
    return result


def _kept_answers(scoring: ScoringSets, model: PreTrainedModel, folder: Path) -> dict[str, KeptAnswers]:
    """Return the answers that outlive a stop, by the name of their set."""
    settings, tokenizer = asdict(scoring.settings), scoring.tokenizer
    encoded = encode_sets(scoring.sets, tokenizer, scoring.settings, scoring.limits)
    del settings["batch_size"], settings["seeds"]  # an answer depends on its own seed alone
    request = {
        "model": fingerprint(download(locate(scoring.model))),
        "dtype": str(model.dtype),
        "settings": settings,
        "limits": asdict(scoring.limits),
        "ends": answer_ends(tokenizer, model.generation_config),
    }
    # The tokens of the prompts, which also follow from files that the model's fingerprint does not cover.
    return {
        name: KeptAnswers(folder / f"{name}.parts", {**request, "prompts": content_fingerprint(prompts.ids)})
        for name, prompts in encoded.items()
    }
