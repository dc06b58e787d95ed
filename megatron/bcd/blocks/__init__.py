"""Which layers form which block, when each block is active, and on which samples. Pure: no torch, no Megatron Core."""
