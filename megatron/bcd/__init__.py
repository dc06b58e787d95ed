"""Block coordinate descent (arXiv 2506.12037) on Megatron Core."""

__version__ = "0.1.0"
