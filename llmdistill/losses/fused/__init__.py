"""The fused losses: attention and relations in blocks, the LM head in chunks; and the Triton kernels of all losses."""
