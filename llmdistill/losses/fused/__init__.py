"""The fused losses: attention and relations in blocks, the LM head in chunks, and Triton kernels for both."""
