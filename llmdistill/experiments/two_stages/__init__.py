"""A run's second stage: fine-tunes the student on tasks with fine-tuned teachers (KroneckerBERT §3.7, Table 6)."""

from __future__ import annotations

from llmdistill.experiments.two_stages.plan import TasksPlan, plan_tasks

__all__ = ["TasksPlan", "plan_tasks"]
