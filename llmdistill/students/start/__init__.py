"""The weights of an untrained factorized student, by the model's inputs and gradients, and its ranks."""
