"""Private names of torch, transformers and DeepSpeed, a file each."""
