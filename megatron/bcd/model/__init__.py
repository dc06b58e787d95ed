"""The model of one pipeline stage, on Megatron Core."""
