"""Export formats: dense, few bits, ONNX, GGUF; and the plugin by which vLLM serves factorized students."""
