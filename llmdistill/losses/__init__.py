"""Losses: pure functions of tensors and masks that give a sum and a count. None of them sees a model."""
