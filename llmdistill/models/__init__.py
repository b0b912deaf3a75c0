"""Models: loading, supported architectures, adapters, and taps of inner tensors."""
