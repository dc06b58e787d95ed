"""Which layers form which block, which block is active when, and on which samples. Pure: no torch, no Megatron Core."""
