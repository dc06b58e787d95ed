"""Models in Hugging Face's format: read, converted and written (docs/huggingface.md).

Only safetensors files are read; transformers is not needed. safetensors and huggingface_hub are imported where used.
"""
