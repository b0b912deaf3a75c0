"""What leaves: dense, ONNX, few bits, and the plugin of vLLM."""
