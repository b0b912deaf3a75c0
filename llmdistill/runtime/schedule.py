"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from llmdistill.config import TrainConfig


def learning_rate(settings: TrainConfig, step: int) -> float:
    """The learning rate of a step (0-based): linear warm-up, then the chosen decay to the minimum at the last step."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1 - progress
    return settings.min_learning_rate + (settings.learning_rate - settings.min_learning_rate) * share
