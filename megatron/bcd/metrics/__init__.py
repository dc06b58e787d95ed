"""Output of a run: console, metrics file, TensorBoard, Weights & Biases. Only rank 0 has a Reporter."""
