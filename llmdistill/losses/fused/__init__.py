"""The fused losses: blocks of attention and relations, chunks of the head, and Triton kernels for both."""
