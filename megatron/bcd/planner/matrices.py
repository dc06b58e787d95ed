"""Matrices of layers that are stepped without Megatron Core's optimizer: a rank's share of their state and work.

Mirrors `optim.matrix_optimizer`: each matrix has one of the ranks with the same weights as its owner, which alone holds
momentum and low bits, and computes the update.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron.bcd.blocks.ownership import matrix_owners, matrix_stacks
from megatron.bcd.planner.cost import DTYPE_BYTES, newton_schulz_flops
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.tensors import Tensor, stage_tensors

_WORKING_BYTES, _WORKING_BYTES_COPIED = 12, 17
"""Per element of what is updated at a time: gradient, update and value in fp32; and with copies of weights, low bits
and momentum where several matrices are joined, or of queries, keys and values."""
_STATELESS_PASSES, _MUON_PASSES = 17, 27
"""4-byte elements read or written per parameter in one step, outside the products of the orthogonalisation: norm and
copies of the gradient, scaling, weight decay, update; with a momentum also its update and Nesterov's mean."""


@dataclass(frozen=True, kw_only=True)
class MatrixShare:
    """A rank's share of a stage's matrices in one phase, by default without matrices to step."""

    gradients: int = 0  # bytes, of all matrices that are stepped: also of those that other ranks own
    state: int = 0  # bytes of momenta, and of the 16 bits that bf16 weights lack
    kept: int = 0  # bytes of momenta of other blocks, in host memory
    working: int = 0  # bytes of temporary memory while the largest own stack of matrices is updated
    orthogonalization: int = 0  # operations
    traffic: int = 0  # bytes of element-wise work
    messages: int = 0  # bytes of gradients that go to their owners, and of weights that come back


_shares: dict[tuple[object, ...], list[MatrixShare]] = {}
"""Of all ranks, by what they depend on: a search asks for the same ones again."""


def matrix_share(recipe: Recipe, stage: int, block: int, replica: int) -> MatrixShare:
    """The share of one rank."""
    if not recipe.is_muon and recipe.bcd.bcd_resting_update == "none":
        return MatrixShare()
    key = (recipe.shape, recipe.layer_counts, recipe.num_replicas, recipe.method, recipe.precision, stage, block)
    if key not in _shares:
        tensors = stage_tensors(recipe.shape, recipe.partition, stage, padded_vocabulary=recipe.padded_vocabulary)
        matrices = [tensor for tensor in tensors if tensor.parts]
        owners = matrix_owners([tensor.size for tensor in matrices], recipe.num_replicas)
        ranks = range(recipe.num_replicas)
        _shares[key] = [_share(recipe, matrices, [owner == rank for owner in owners], block) for rank in ranks]
    return _shares[key][replica]


def _share(recipe: Recipe, matrices: list[Tensor], is_own: list[bool], block: int) -> MatrixShare:
    bcd = recipe.bcd
    muon_gradient, stateless_gradient = DTYPE_BYTES[bcd.muon_grad_dtype], DTYPE_BYTES[bcd.bcd_resting_grad_dtype]
    momentum = DTYPE_BYTES[bcd.muon_momentum_dtype] if recipe.is_muon else 0
    low_bits = 2 if recipe.precision == "bf16" else 0
    total, updated = Counter[str](), []
    for tensor, own in zip(matrices, is_own, strict=True):
        is_active = tensor.is_active(block)
        is_stepped = is_active and recipe.is_muon or tensor.is_stateless(block)
        if is_stepped:
            gradient = muon_gradient if is_active else stateless_gradient
            total["gradients"] += gradient * tensor.size
            total["messages"] += (gradient + recipe.bytes_per_element) * tensor.size * (recipe.num_replicas > 1)
        if not own:
            continue
        total["state"] += (low_bits + momentum * is_active) * tensor.size
        if not is_active and recipe.partition.has_active_block and bcd.bcd_optimizer_state == "host":
            total["kept"] += momentum * tensor.size
        if is_stepped:
            updated.append(tensor)
            total["traffic"] += 4 * (_MUON_PASSES if is_active else _STATELESS_PASSES) * tensor.size
            if is_active or bcd.bcd_resting_update == "orthogonal":
                total["orthogonalization"] += sum(newton_schulz_flops(*part) for part in tensor.parts)
    keys = [(tensor.is_active(block), tensor.parts) for tensor in updated]
    for stack in matrix_stacks(keys, [tensor.size for tensor in updated]):
        first = updated[stack[0]]
        is_copied = len(stack) > 1 or len(first.parts) > 1
        working = (_WORKING_BYTES_COPIED if is_copied else _WORKING_BYTES) * len(stack) * first.size
        total["working"] = max(total["working"], working)
    return MatrixShare(**total)
