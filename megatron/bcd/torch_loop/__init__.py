"""Block coordinate descent for any PyTorch training loop, without Megatron Core (docs/pytorch.md)."""

from megatron.bcd.torch_loop.block_coordinate import CHOICES, BlockCoordinate
