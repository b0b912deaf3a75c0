"""Generates answers with vLLM, which is optional and many times faster than transformers on GPUs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llmdistill.errors import UserError
from llmdistill.generation.decode import Decoding
from llmdistill.models.adapters import is_adapter
from llmdistill.models.configs import load_config

EngineName = Literal["hf", "vllm"]


def choose_engine(
    wanted: Literal["auto", "hf", "vllm"], model: str | Path, *, no_repeat_ngram_size: int, world_size: int
) -> EngineName:
    """Return the engine for a request: "auto" means vLLM if vLLM can run the request, else transformers.

    Raises UserError if vLLM is requested but cannot run this request; the message gives the reason.
    """
    if wanted == "hf":
        return "hf"
    reason = _obstacle(model, no_repeat_ngram_size, world_size)
    if reason is not None and wanted == "vllm":
        raise UserError(f"--engine vllm: {reason}")
    return "hf" if reason is not None else "vllm"


def _obstacle(model: str | Path, no_repeat_ngram_size: int, world_size: int) -> str | None:
    """Return why vLLM cannot run this request and what the user can do, or None if vLLM can run it."""
    if world_size > 1:
        return "vLLM drives all GPUs from one process; start the command without --num_gpus, or take --engine hf"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here; pip install vllm, or take --engine hf"
    if not torch.cuda.is_available():
        return "there is no GPU that torch can use; take --engine hf"
    if no_repeat_ngram_size > 0:
        return f"vLLM has no no_repeat_ngram_size (it is {no_repeat_ngram_size}); set it to 0, or take --engine hf"
    if is_adapter(model):
        return f"{model} is an adapter, which vLLM does not merge into its base; take --engine hf"
    if _quantization(load_config(model)) == "llmdistill":
        return (
            f"{model} is factorized, which vLLM does not know; make it dense with `llmdistill export --dense`, "
            "or take --engine hf"
        )
    return None


def _quantization(config: PreTrainedConfig) -> str | None:
    entry: Any = getattr(config, "quantization_config", None)
    return entry.get("quant_method") if isinstance(entry, dict) else getattr(entry, "quant_method", None)


class VllmEngine:
    """Generates answers with vLLM's offline `LLM` on all GPUs of this machine."""

    def __init__(
        self,
        model: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        settings: Decoding,
        *,
        max_new_tokens: int,
        max_length: int,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        """Load a dense model from a folder or hub name. Of the tokenizer only the end token is used."""
        import vllm

        assert settings.no_repeat_ngram_size == 0
        self._sampling_params = vllm.SamplingParams
        self._common = {
            "temperature": settings.temperature if settings.sample else 0.0,
            "top_p": settings.top_p if settings.sample else 1.0,
            "top_k": (settings.top_k or -1) if settings.sample else -1,
            "max_tokens": max_new_tokens,
            # Only the tokenizer's end token ends an answer, not the end tokens that vLLM finds in the model's folder.
            "stop_token_ids": [tokenizer.eos_token_id],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "detokenize": False,
        }
        self._llm = vllm.LLM(
            model=str(model),
            tokenizer=str(model),
            dtype=str(dtype).removeprefix("torch."),
            tensor_parallel_size=shares(load_config(model), torch.cuda.device_count()),
            seed=seed,
            max_model_len=max_length,
            generation_config="vllm",  # nothing from the model's generation_config.json
            trust_remote_code=False,
        )

    def answer(self, prompt_ids: list[list[int]], seeds: list[int]) -> list[list[int]]:
        """See Engine; each prompt has its own random stream."""
        results = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in prompt_ids],
            sampling_params=[self._sampling_params(**self._common, seed=seed) for seed in seeds],
            use_tqdm=False,
        )
        return [list(result.outputs[0].token_ids) for result in results]


def shares(config: PreTrainedConfig, gpus: int) -> int:
    """Return the number of GPUs over which a model's heads can be split evenly (vLLM's tensor parallelism)."""
    heads = getattr(config, "num_attention_heads", 1)
    groups = getattr(config, "num_key_value_heads", None) or heads
    fitting = [n for n in range(1, gpus + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
    return max(fitting, default=1)
