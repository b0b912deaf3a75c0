"""Autograd and an optimizer of torch in DeepSpeed's clothes, for what needs no ZeRO."""

from __future__ import annotations

from typing import Any

import torch


class PlainEngine:
    """As much of a DeepSpeed engine at stage 0 as the package uses; gradients are averaged over accumulation steps."""

    monitor = None
    global_steps = global_samples = micro_steps = skipped_steps = 0

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer | None = None, *, accumulation: int = 1) -> None:
        self.module, self.accumulation, self.count = module, accumulation, 0
        trained = [each for each in module.parameters() if each.requires_grad]
        self.optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-3)

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulation).backward()

    def step(self) -> None:
        self.count += 1
        if self.count % self.accumulation == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def get_global_grad_norm(self) -> float:
        return 0.0

    def zero_optimization_stage(self) -> int:
        return 0

    def train_batch_size(self) -> int:
        return 8

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation

    def was_step_applied(self) -> bool:
        return True

    def destroy(self) -> None:
        pass
