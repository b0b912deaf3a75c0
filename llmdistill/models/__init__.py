"""Models: loading, supported architectures, tokenizers, heads, adapters and few bits."""
