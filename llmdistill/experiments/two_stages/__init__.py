"""A run's second stage: fine-tunes the student on tasks with fine-tuned teachers (KroneckerBERT §3.7, Table 6)."""
