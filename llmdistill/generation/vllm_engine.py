"""Generates answers, and finds likely tokens, with vLLM, which is optional and faster than transformers on GPUs."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedConfig

from llmdistill.batch import TopK
from llmdistill.errors import UserError
from llmdistill.generation.decode import Decoding
from llmdistill.models.adapters import is_adapter
from llmdistill.models.configs import load_config
from llmdistill.models.general import layer_values

EngineName = Literal["hf", "vllm"]


def choose_engine(
    wanted: Literal["auto", "hf", "vllm"],
    model: str | Path,
    *,
    no_repeat_ngram_size: int,
    world_size: int,
    key: str = "--engine",
    obstacle: str | None = None,
) -> EngineName:
    """Return the engine for a request: "auto" means vLLM if vLLM can run the request, else transformers.

    `key` is the setting of the engine, and `obstacle` what else keeps vLLM from running the request.

    Raises UserError with the reason if vLLM is requested but cannot run this request.
    """
    if wanted == "hf":
        return "hf"
    reason = obstacle or _find_obstacle(model, no_repeat_ngram_size, world_size, key)
    if reason is not None and wanted == "vllm":
        raise UserError(f"{key} vllm: {reason}")
    return "hf" if reason is not None else "vllm"


def _find_obstacle(model: str | Path, no_repeat_ngram_size: int, world_size: int, key: str) -> str | None:
    """Return why vLLM cannot run this request and what the user can do, or None if vLLM can run it."""
    if world_size > 1:
        return f"vLLM drives all GPUs from one process; start the command without --num_gpus, or take {key} hf"
    if importlib.util.find_spec("vllm") is None:  # looked up only, because its import takes seconds
        return f"vLLM is not installed here; pip install vllm, or take {key} hf"
    if not torch.cuda.is_available():
        return f"there is no GPU that torch can use; take {key} hf"
    if no_repeat_ngram_size > 0:
        return f"vLLM has no no_repeat_ngram_size (it is {no_repeat_ngram_size}); set it to 0, or take {key} hf"
    if is_adapter(model):
        return f"{model} is an adapter, which vLLM does not merge into its base; take {key} hf"
    quantization: Any = getattr(load_config(model), "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    if method == "llmdistill":
        return (
            f"{model} is factorized, which is not tried with vLLM here; make it dense with "
            f"`llmdistill export --to dense`, or take {key} hf"
        )
    if method == "torchao":
        return f"{model} has weights of few bits, which are not tried with vLLM here; take {key} hf"
    return None


class VllmEngine:
    """Generates answers with vLLM's offline `LLM` on all GPUs of this machine."""

    def __init__(
        self,
        model: str | Path,
        ends: Sequence[int],
        settings: Decoding,
        *,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        """Load a dense model from a folder or hub name. `ends` are the tokens that end an answer."""
        self._llm = _load_llm(model, dtype, max_length=settings.max_length, seed=seed)
        self._ends, self._settings = list(ends), settings

    def with_decoding(self, ends: Sequence[int], settings: Decoding) -> VllmEngine:
        """Return an engine of the same loaded model that decodes in another way."""
        other = copy.copy(self)
        other._ends, other._settings = list(ends), settings
        return other

    def answer(
        self, prompt_ids: Sequence[list[int]], seeds: Sequence[int], batch_size: int
    ) -> Iterator[tuple[int, list[int]]]:
        """See Engine; the prompts are given to vLLM batch by batch, in their order."""
        for start in range(0, len(prompt_ids), batch_size):
            part = slice(start, start + batch_size)
            for row, output in enumerate(self._generate(prompt_ids[part], seeds[part]), start=start):
                yield row, list(output.token_ids)

    def sample(self, prompt_ids: list[list[int]], seeds: list[int]) -> list[tuple[list[int], float]]:
        """Return the same with the sum of the tokens' negative log-probabilities, which vLLM gives at temperature 1."""
        outputs = self._generate(prompt_ids, seeds, logprobs=0)
        return [(list(output.token_ids), -float(output.cumulative_logprob)) for output in outputs]

    def _generate(self, prompt_ids: Sequence[list[int]], seeds: Sequence[int], **more: int) -> list[Any]:
        import vllm

        settings = self._settings
        assert settings.no_repeat_ngram_size == 0
        common = {
            "temperature": settings.temperature if settings.sample else 0.0,  # 0 is greedy
            "top_p": settings.top_p if settings.sample else 1.0,
            "top_k": (settings.top_k or -1) if settings.sample else -1,  # vLLM switches it off by -1, transformers by 0
            "max_tokens": settings.max_new_tokens,
            # These stop an answer, instead of the end tokens that vLLM reads from the model's folder.
            "stop_token_ids": self._ends,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "detokenize": False,
            **more,
        }
        results = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in prompt_ids],
            sampling_params=[vllm.SamplingParams(**common, seed=seed) for seed in seeds],
            use_tqdm=False,
        )
        return [result.outputs[0] for result in results]


class VllmScorer:
    """Gives the most likely tokens after each token of given texts, by vLLM's offline `LLM` on all GPUs here.

    It uses `SamplingParams.prompt_logprobs`, which gives the k most likely tokens and the token that is there, and
    `logprobs` for the token after the text, because vLLM generates at least one.
    """

    def __init__(self, model: str | Path, *, k: int, max_length: int, dtype: torch.dtype) -> None:
        """Load a dense model from a folder or hub name, for texts of up to max_length tokens."""
        import vllm

        self._k = k
        self._params = vllm.SamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=k, logprobs=k, ignore_eos=True, detokenize=False
        )
        # One more token for the one that is generated. By default vLLM gives at most 20 log-probabilities, and cached
        # prefixes have none.
        self._llm = _load_llm(
            model, dtype, max_length=max_length + 1, seed=0, max_logprobs=k, enable_prefix_caching=False
        )

    def score(self, token_ids: list[list[int]]) -> list[TopK]:
        """Return the k most likely tokens after each of the T tokens of each text, (T, k), and the rest at 1.

        Raises UserError if vLLM gives something else than documented.
        """
        results = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in token_ids],
            sampling_params=[self._params] * len(token_ids),
            use_tqdm=False,
        )
        tops = []
        for ids, result in zip(token_ids, results, strict=True):
            # vLLM's entry of a token is the distribution from which it came: the one after the token before it.
            # The first entry is None, because nothing is before the first token.
            entries = [*(result.prompt_logprobs or [])[1:], *(result.outputs[0].logprobs or [])]
            log_probs = [{token: value.logprob for token, value in (entry or {}).items()} for entry in entries]
            top = to_top_k(log_probs, self._k) if len(entries) == len(ids) else None
            if top is None:
                raise UserError(
                    f"--cache.engine vllm: this vLLM does not give the {self._k} most likely tokens after each of "
                    f"{len(ids)} tokens; take --cache.engine hf"
                )
            tops.append(top)
        return tops


def to_top_k(entries: Sequence[Mapping[int, float]], k: int) -> TopK | None:
    """Return the k most likely tokens of vLLM's log-probabilities, (N, k), and the rest at temperature 1.

    Each of the N entries has the log-probabilities of at least k tokens, the most likely ones and any others, in any
    order. None if an entry has fewer.
    """
    lengths = np.array([len(entry) for entry in entries])
    if not len(lengths) or lengths.min() < k:
        return None
    # Entries differ in length, because vLLM adds the actual token to the k most likely ones unless it is among them.
    is_filled = np.arange(lengths.max()) < lengths[:, None]
    values, ids = np.full(is_filled.shape, -np.inf), np.full(is_filled.shape, -1)
    values[is_filled] = [value for entry in entries for value in entry.values()]
    ids[is_filled] = [token for entry in entries for token in entry]
    # By value, and tokens of equal value by id, whatever their order in the entry.
    order = np.lexsort((ids, values))[:, ::-1][:, :k]
    log_probs = torch.from_numpy(np.take_along_axis(values, order, axis=1))
    tokens = torch.from_numpy(np.take_along_axis(ids, order, axis=1))
    # If the k tokens have nearly all of the mass, rounding may make the rest zero or negative.
    rest = (1 - log_probs.exp().sum(1)).clamp(min=torch.finfo(torch.float32).eps).log()
    return TopK(tokens, log_probs.float(), {1.0: rest.float()})


def _load_llm(model: str | Path, dtype: torch.dtype, *, max_length: int, seed: int, **options: Any) -> Any:
    import vllm

    return vllm.LLM(
        model=str(model),
        tokenizer=str(model),
        dtype=str(dtype).removeprefix("torch."),
        tensor_parallel_size=tensor_parallel_size(load_config(model), torch.cuda.device_count()),
        seed=seed,
        max_model_len=max_length,
        generation_config="vllm",  # nothing from the model's generation_config.json
        trust_remote_code=False,
        **options,
    )


def tensor_parallel_size(config: PreTrainedConfig, gpus: int) -> int:
    """Return the number of GPUs over which a model's heads can be split evenly (vLLM's tensor parallelism)."""
    head_counts = [count or 1 for count in layer_values(config, "num_attention_heads")]
    # Without grouped-query attention each head has keys and values of its own.
    group_counts = [count for count in layer_values(config, "num_key_value_heads") if count] or head_counts
    # vLLM copies key-value heads where there are fewer of them than GPUs.
    fitting = [
        n
        for n in range(1, gpus + 1)
        if all(heads % n == 0 for heads in head_counts)
        and all(groups % n == 0 or n % groups == 0 for groups in group_counts)
    ]
    return max(fitting, default=1)
