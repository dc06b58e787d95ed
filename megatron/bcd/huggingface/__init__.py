"""Read, convert and write models in Hugging Face's format (docs/huggingface.md).

Only safetensors files are read. The libraries for them are imported where they are used.
"""
