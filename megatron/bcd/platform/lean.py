"""What Megatron Core computes on a CPU, the same bit for bit, without what only a GPU or several ranks have a use for.

Its layers pass through autograd functions of its own, and its reductions through collectives, also where one rank is
all there is; on a GPU their time hides behind the kernels, on a CPU it is a tenth of a small model's step. Applied by
`patch_megatron_core` of this room, where there is no GPU.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch


def patch_megatron_core() -> None:
    """To be called once, with Megatron Core imported."""
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import mlp

    mlp.bias_swiglu_impl = _swiglu
    rope_utils._apply_rotary_pos_emb_bshd = _rotary(rope_utils._apply_rotary_pos_emb_bshd)
    for name in ("linear_with_frozen_weight", "linear_with_grad_accumulation_and_async_allreduce"):
        setattr(layers, name, _linear(getattr(layers, name)))
    for name in ("copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"):
        setattr(layers, name, _unless_alone(getattr(layers, name)))
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, name, _unless_in_place(getattr(buffers, name)))


class DistributedForOneRank(types.ModuleType):
    """`torch.distributed` as these modules see it: they reduce over groups of one rank too, and gloo hands even that
    to a thread and waits for it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @staticmethod
    def all_reduce(tensor: torch.Tensor, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op and torch.distributed.get_world_size(group) == 1:
            return None
        return torch.distributed.all_reduce(tensor, *args, group=group, async_op=async_op, **kwargs)


def _linear(megatron_linear: Any) -> Any:
    """What Megatron Core's linear layers compute, bit for bit, without its autograd function where nothing is to be
    communicated: PyTorch's own leaves out the gradient of an input that needs none, as behind a frozen prefix."""

    @functools.wraps(megatron_linear)  # with its attributes: it looks for them under its own name
    def linear(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **kwargs: Any,
    ) -> torch.Tensor:
        if gradient_accumulation_fusion or allreduce_dgrad or sequence_parallel or kwargs.get("grad_output_buffer"):
            flags = (gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
            return megatron_linear(input, weight, bias, *flags, **kwargs)
        output = torch.matmul(input, weight.t())
        return output if bias is None else output + bias

    return linear


def _unless_alone(megatron_region: Any) -> Any:
    """An autograd function around a tensor-parallel group, left out where the group has one rank."""

    def region(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
        return input_ if torch.distributed.get_world_size(group) == 1 else megatron_region(input_, group=group)

    return region


class _SwiGlu(torch.autograd.Function):
    """silu(gate) x up, where gate and up are the halves of one tensor [..., 2 F], bit for bit Megatron Core's without
    fusion: that copies `up` to add an offset of zero, and puts the halves of the gradient together from parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, activated = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        back = torch.empty_like(x)
        of_gate, of_up = back.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        torch.mul(gradient, activated, out=of_up)
        return back


def _swiglu(x: torch.Tensor, bias: torch.Tensor | None, *args: Any) -> torch.Tensor:
    """In place of Megatron Core's `bias_swiglu_impl`, whose compiled functions are for a GPU."""
    x = x if bias is None else x + bias
    if x.requires_grad:
        return _SwiGlu.apply(x)
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


class _Rotary(torch.autograd.Function):
    """Rotary position embedding with halves that rotate: x cos + (-x_high, x_low) sin, bit for bit Megatron Core's.

    Tensor shapes: S sequence length, B micro-batch size, N heads, D head size. Megatron Core makes seven tensors of
    it, five of them whole; this makes one and two halves, and one again in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [S, B, N, D], cos and sin [S, 1, 1, D]."""
        ctx.save_for_backward(cos, sin)
        half = x.size(-1) // 2
        rotated = x * cos
        rotated[..., :half] -= x[..., half:] * sin[..., :half]
        rotated[..., half:] += x[..., :half] * sin[..., half:]
        return rotated

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        half = gradient.size(-1) // 2
        back = gradient * cos
        back[..., :half] += gradient[..., half:] * sin[..., half:]
        back[..., half:] -= gradient[..., :half] * sin[..., :half]
        return back, None, None


def _rotary(megatron_rotary: Any) -> Any:
    """`_Rotary` where it computes the same as Megatron Core's `_apply_rotary_pos_emb_bshd`, which takes cosine and sine
    anew in every layer."""

    def rotate(t: torch.Tensor, freqs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_plain = not any(args) and not kwargs.get("rotary_interleaved") and not kwargs.get("multi_latent_attention")
        if not is_plain or kwargs.get("mscale", 1.0) != 1.0 or freqs.size(-1) != t.size(-1):
            return megatron_rotary(t, freqs, *args, **kwargs)
        if getattr(freqs, "bcd_cos_sin", (None,))[0] != t.dtype:  # Megatron Core makes one tensor per length
            freqs.bcd_cos_sin = (t.dtype, freqs.cos().to(t.dtype), freqs.sin().to(t.dtype))  # type: ignore[attr-defined]
        _, cos, sin = freqs.bcd_cos_sin  # type: ignore[attr-defined]
        return _Rotary.apply(t, cos, sin)

    return rotate


def _unless_in_place(collective: Any) -> Any:
    """A gathering or scattering left out where the group has one rank, whose part is the whole buffer."""

    def gather_or_scatter(
        output: torch.Tensor, input: torch.Tensor, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any
    ) -> Any:
        is_alone = torch.distributed.get_world_size(group) == 1 and output.data_ptr() == input.data_ptr()
        if is_alone and not async_op:
            return None
        return collective(output, input, *args, group=group, async_op=async_op, **kwargs)

    return gather_or_scatter
