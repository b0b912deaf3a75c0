"""The scores of a run's models, kept in its folder so that a resumed run does not generate again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.artifacts import differences, read_record
from llmdistill.config import DataConfig, GenerationConfig
from llmdistill.data.instruct import Example
from llmdistill.files import write_json
from llmdistill.fingerprints import fingerprint
from llmdistill.runtime.distributed import World, broadcast_object
from llmdistill.tasks.answers import SetScore, score_sets
from llmdistill.tasks.chance import measure_chance

VALID = "valid"
"""Name of the validation set among the scores and predictions of a run."""


@dataclass(frozen=True)
class ScoreBook:
    """Scores models on the run's sets, each once."""

    folder: Path
    tests: Mapping[str, Sequence[Example]]
    valid: Sequence[Example]
    """Scored in one pass (the first seed's), as it only serves to choose settings; may be empty."""
    settings: GenerationConfig
    data: DataConfig
    world: World

    def score(
        self,
        name: str,
        load: Callable[[], PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        *,
        params: int,
        sharded: bool = False,
    ) -> dict[str, Any]:
        """The scores of a model on every set; every rank must call it.

        Args:
            name: its name in the run, such as "teacher".
            load: gives the model; called only where scores are missing.
            tokenizer: of the model.
            params: its parameters.
            sharded: whether the model's forward pass needs every rank (ZeRO-3).

        Returns:
            ``{"params", "rougeL": {SET: 0-100}, "rougeL_std": {SET: …}, "generation_tokens_per_second"}``, and
            ``"valid": {"rougeL", "chance", "above_chance"}`` where there is a validation set.
        """
        file = self.folder / "scores" / f"{name}.json"
        kept = broadcast_object(self._read(file) if self.world.is_main else None)
        model = cache(load)
        for set_name, examples in self._sets().items():
            if set_name in kept and not differences(kept[set_name]["asked"], self._asked(set_name)):
                continue
            score = self._score(name, set_name, examples, model(), tokenizer, sharded)
            kept[set_name] = {"asked": self._asked(set_name), "score": score.to_dict()}
            if self.world.is_main:
                if set_name == VALID:
                    kept[set_name]["chance"] = self._chance(name)
                write_json(file, kept)
        summary = self._summary(broadcast_object(kept), params)
        if self.world.is_main:
            shown = "  ".join(f"{name} {value:.1f}" for name, value in summary["rougeL"].items())
            chosen = f"  validation {summary['valid']['rougeL']:.1f}" if "valid" in summary else ""
            print(f"ROUGE-L of the {name}: {shown + chosen or 'no test sets'}", flush=True)
        return summary

    def _sets(self) -> dict[str, Sequence[Example]]:
        return {**({VALID: self.valid} if self.valid else {}), **self.tests}

    def _generation(self, set_name: str) -> GenerationConfig:
        return replace(self.settings, seeds=self.settings.seeds[:1]) if set_name == VALID else self.settings

    def _asked(self, set_name: str) -> dict[str, Any]:
        """What a score depends on beside the model."""
        reference = self.data.valid if set_name == VALID else self.data.tests[set_name]
        settings = {key: value for key, value in asdict(self._generation(set_name)).items() if key != "models"}
        limits = {key: getattr(self.data, key) for key in ("max_prompt_length", "max_length", "long_prompts")}
        return {"reference": fingerprint(str(reference)), **settings, **limits}

    def _read(self, file: Path) -> dict[str, Any]:
        return read_record(file, remedy="remove the file, and the model is scored again") or {}

    def _predictions(self, name: str) -> Path:
        return self.folder / "predictions" / name

    def _score(
        self,
        name: str,
        set_name: str,
        examples: Sequence[Example],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sharded: bool,
    ) -> SetScore:
        return score_sets(
            model,
            tokenizer,
            {set_name: examples},
            self._generation(set_name),
            max_prompt_length=self.data.max_prompt_length,
            max_length=self.data.max_length,
            long_prompts=self.data.long_prompts,
            predictions_dir=self._predictions(name),
            rank=self.world.rank,
            world_size=self.world.size,
            synced=sharded,
        )[set_name]

    def _chance(self, name: str) -> dict[str, Any]:
        """Whether the validation answers just written fit their own questions; one question alone cannot tell."""
        lines = (self._predictions(name) / f"{VALID}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        if len(rows) < 2:
            return {"chance": None, "above_chance": True}
        answers = [next(iter(row["predictions"].values())) for row in rows]
        chance = measure_chance(answers, [row["references"] for row in rows])
        return {"chance": chance.other, "above_chance": chance.is_beaten}

    def _summary(self, kept: dict[str, Any], params: int) -> dict[str, Any]:
        scores = {set_name: kept[set_name]["score"] for set_name in self._sets()}
        seconds = sum(score["tokens"] / score["tokens_per_second"] for score in scores.values())
        tokens = sum(score["tokens"] for score in scores.values())
        summary = {
            "params": params,
            "rougeL": {set_name: scores[set_name]["rougeL"] for set_name in self.tests},
            "rougeL_std": {set_name: scores[set_name]["std"] for set_name in self.tests},
            "generation_tokens_per_second": tokens / seconds if scores else 0.0,
        }
        if VALID in scores:
            summary["valid"] = {"rougeL": scores[VALID]["rougeL"], **kept[VALID]["chance"]}
        return summary
