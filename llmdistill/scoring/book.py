"""The scores of a run's three models, kept in its folder so that a resumed run does not generate again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.config import DataConfig, GenerationConfig
from llmdistill.data.instruct import Example
from llmdistill.factorize import count_parameters
from llmdistill.files import write_json
from llmdistill.runtime.distributed import World, broadcast_object
from llmdistill.scoring.instruct import score_sets


@dataclass(frozen=True)
class ScoreBook:
    """Scores models on the run's test sets, each once."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    sets: Mapping[str, Sequence[Example]]
    settings: GenerationConfig
    data: DataConfig
    world: World

    def score(
        self, name: str, load: Callable[[], PreTrainedModel], *, sharded: bool = False, params: int | None = None
    ) -> dict[str, Any]:
        """The scores of a model; every rank must call it.

        Args:
            name: its name in the run, such as "teacher".
            load: gives the model; called only where the scores are not there yet.
            sharded: whether the model's forward pass needs every rank (ZeRO-3).
            params: its parameters, where they cannot be counted on the model (a shard).

        Returns:
            ``{"params", "rougeL": {SET: 0-100}, "rougeL_std": {SET: …}, "generation_tokens_per_second"}``.
        """
        file = self.folder / "scores" / f"{name}.json"
        asked = {"scoring": asdict(self.settings), "tests": self.data.tests}
        kept = broadcast_object(self._kept(file, asked))
        if kept is None:
            kept = self._generate(name, load(), sharded, params)
            if self.world.is_main:
                write_json(file, {"asked": asked, "scores": kept})
        if self.world.is_main:
            shown = "  ".join(f"{name} {value:.1f}" for name, value in kept["rougeL"].items())
            print(f"ROUGE-L of the {name}: {shown or 'no test sets'}", flush=True)
        return dict(kept)

    def _kept(self, file: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
        if not self.world.is_main or not file.is_file():
            return None
        old = json.loads(file.read_text(encoding="utf-8"))
        return old["scores"] if old["asked"] == asked else None

    def _generate(self, name: str, model: PreTrainedModel, sharded: bool, params: int | None) -> dict[str, Any]:
        scores = score_sets(
            model,
            self.tokenizer,
            self.sets,
            self.settings,
            max_prompt_length=self.data.max_prompt_length,
            max_length=self.data.max_length,
            long_prompts=self.data.long_prompts,
            predictions_dir=self.folder / "predictions" / name,
            rank=self.world.rank,
            world_size=self.world.size,
            synced=sharded,
        )
        seconds = sum(score.tokens / score.tokens_per_second for score in scores.values())
        tokens = sum(score.tokens for score in scores.values())
        return {
            "params": count_parameters(model) if params is None else params,
            "rougeL": {set_name: score.rouge_l for set_name, score in scores.items()},
            "rougeL_std": {set_name: score.std for set_name, score in scores.items()},
            "generation_tokens_per_second": tokens / seconds if scores else 0.0,
        }
