"""Autograd and an optimizer of torch in DeepSpeed's clothes, for what needs no ZeRO."""

from typing import Any

import torch


class PlainEngine:
    """As much of a DeepSpeed engine at stage 0 as the package uses; gradients are averaged over accumulation steps.

    `max_grad_norm` clips them; None leaves them as they are.
    """

    monitor = None
    global_steps = global_samples = micro_steps = skipped_steps = 0

    def __init__(
        self,
        module: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        accumulation: int = 1,
        max_grad_norm: float | None = None,
    ) -> None:
        self.module, self.accumulation, self.count, self.max_grad_norm = module, accumulation, 0, max_grad_norm
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
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
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
