"""Where a factorized student starts: weights by the model's inputs and gradients, and ranks."""
