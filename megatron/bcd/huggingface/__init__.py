"""Models in Hugging Face's format: read, converted and written (docs/huggingface.md).

Only safetensors files are read; the libraries for them are imported where they are used.
"""
