"""One step: a batch, the taps of both models, their forward passes, and the terms of the loss."""
