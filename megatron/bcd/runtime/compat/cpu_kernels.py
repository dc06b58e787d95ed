"""--cpu-kernels fast: replacements of Megatron Core's functions that are slow on a CPU (docs/cpu_kernels.md).

On a GPU the cost of autograd functions and one-rank collectives hides behind kernels, and fused kernels read memory
once. On a CPU both show. The replacements return Megatron Core's values bit for bit, except that RMSNorm's gradient can
differ in the last bit. `cpu.patch_megatron_core` applies them, only where there is no GPU.

Tensor shapes: S sequence length, B micro-batch size, G query groups, Q heads of a group, D head size, V
vocabulary.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch


def patch_megatron_core() -> None:
    """Apply all replacements. Called once per process."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import attention, mlp
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mlp.bias_swiglu_impl = _swiglu
    WrappedTorchNorm.__new__ = _torch_norm(WrappedTorchNorm.__new__)
    tensor_parallel.vocab_parallel_cross_entropy = _cross_entropy(tensor_parallel.vocab_parallel_cross_entropy)
    attention.apply_fused_qkv_rotary_pos_emb, attention.HAVE_FUSED_QKV_ROPE = _rotated_qkv, True
    for name in ("linear_with_frozen_weight", "linear_with_grad_accumulation_and_async_allreduce"):
        setattr(layers, name, _linear(getattr(layers, name)))
    for name in ("copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"):
        setattr(layers, name, _unless_alone(getattr(layers, name)))
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, name, _unless_in_place(getattr(buffers, name)))


class DistributedForOneRank(types.ModuleType):
    """`torch.distributed` for Megatron Core's modules, without all-reduces over groups of one rank: gloo runs even
    those in a thread."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @staticmethod
    def all_reduce(tensor: torch.Tensor, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op and torch.distributed.get_world_size(group) == 1:
            return None
        return torch.distributed.all_reduce(tensor, *args, group=group, async_op=async_op, **kwargs)


def _linear(megatron_linear: Any) -> Any:
    """Megatron Core's linear layer without its autograd function where nothing is communicated. The gradient of an
    input that needs none, as behind a frozen prefix, is not computed."""

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
        accumulates = torch.is_grad_enabled() and _takes_gradient_in_place(weight)
        output = _Linear.apply(input, weight) if accumulates else torch.matmul(input, weight.t())
        if bias is None:
            return output
        return output + (bias if weight.requires_grad else bias.detach())  # see model/bias_gradient.py

    return linear


def _takes_gradient_in_place(weight: torch.Tensor) -> bool:
    """Whether this weight's gradient can be written into Megatron Core's buffer. A tied weight's can't: its parts are
    summed first."""
    main_grad = getattr(weight, "main_grad", None)
    is_whole = main_grad is not None and main_grad.dtype == weight.dtype and not hasattr(weight, "zero_out_wgrad")
    return is_whole and weight.requires_grad


class _Linear(torch.autograd.Function):
    """x W^T, whose weight gradient goes straight into the gradient buffer, as with Megatron Core's
    `gradient_accumulation_fusion` on a GPU: the first of an iteration without a copy and a sum with zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # a saved tensor has no attributes
        return torch.matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:  # type: ignore[override]
        [x], weight = ctx.saved_tensors, ctx.weight
        back = torch.matmul(gradient, weight) if ctx.needs_input_grad[0] else None
        factors = gradient.flatten(0, -2).t(), x.flatten(0, -2)
        # the reduction's hook needs a gradient, but does not read it
        if weight.grad_added_to_main_grad:
            product = torch.mm(*factors)
            weight.main_grad.add_(product)
            return back, product
        torch.mm(*factors, out=weight.main_grad)
        weight.grad_added_to_main_grad = True
        return back, torch.empty_like(weight)


def _unless_alone(megatron_region: Any) -> Any:
    """An autograd function around a tensor-parallel group, skipped where the group has one rank."""

    def region(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
        return input_ if torch.distributed.get_world_size(group) == 1 else megatron_region(input_, group=group)

    return region


class _SwiGlu(torch.autograd.Function):
    """silu(gate) x up, where gate and up are the halves of one tensor [..., 2 F]. Megatron Core's copies `up` to add an
    offset of zero, and concatenates the gradient."""

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


class _RmsNormFunction(torch.autograd.Function):
    """x / sqrt(mean(x^2) + epsilon) w over the last dimension, in float32. PyTorch's composite one saves the normalised
    x and allocates twice as many tensors in backward. The gradient can differ from it in the last bit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        output = x * x
        inverse = output.mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        torch.mul(x, inverse, out=output).mul_(weight)
        ctx.save_for_backward(x, weight, inverse)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        back = gradient * weight
        product = back * x
        of_mean = product.sum(-1, keepdim=True).mul_(-0.5).mul_(inverse.pow(3)).div_(x.size(-1)).mul_(2)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = torch.mul(x, inverse, out=product).mul_(gradient).flatten(0, -2).sum(0)
        back *= inverse
        back += torch.mul(x, of_mean, out=product)
        return back, of_weight, None


class RmsNorm(torch.nn.RMSNorm):
    """PyTorch's module on `_RmsNormFunction`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or self.weight.dtype != torch.float32:
            return super().forward(x)
        assert self.eps is not None, "Megatron Core always gives one"
        return _RmsNormFunction.apply(x, self.weight, self.eps)


def _torch_norm(megatron_new: Any) -> Any:
    """Megatron Core's choice among PyTorch's norms, with `RmsNorm` for PyTorch's."""

    def new(cls: type, *args: Any, **kwargs: Any) -> torch.nn.Module:
        norm: torch.nn.Module = megatron_new(cls, *args, **kwargs)
        if type(norm) is torch.nn.RMSNorm:
            norm.__class__ = RmsNorm
        return norm

    return new


_ROWS_OF_LOGITS = 64
"""Few enough to stay in a core's cache between operations, with a small vocabulary."""


class _CrossEntropy(torch.autograd.Function):
    """Megatron Core's cross-entropy of one tensor-parallel rank in one pass through the logits, instead of one per
    operation. As there, float32 logits become the softmax in place. A label outside the vocabulary raises; Megatron
    Core takes it for another rank's."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """logits [S, B, V], target [S, B]; returns float32 [S, B]."""
        softmax = logits.float()
        rows, labels = softmax.view(-1, logits.size(-1)), target.reshape(-1, 1)
        losses = []
        parts = zip(rows.split(_ROWS_OF_LOGITS), labels.split(_ROWS_OF_LOGITS), strict=True)
        for row, label in parts:
            row -= row.amax(dim=-1, keepdim=True)
            of_label = row.gather(1, label)
            total = torch.exp(row, out=row).sum(dim=-1, keepdim=True)
            losses.append(torch.log(total) - of_label)
            row /= total
        ctx.save_for_backward(softmax, labels)
        return torch.cat(losses).view_as(target)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        softmax, labels = ctx.saved_tensors
        rows = softmax.view(-1, softmax.size(-1))
        rows.scatter_add_(1, labels, rows.new_full((1, 1), -1.0).expand_as(labels))
        rows *= gradient.reshape(-1, 1)
        return softmax, None


def _cross_entropy(megatron_cross_entropy: Any) -> Any:
    """`_CrossEntropy` in place of Megatron Core's `vocab_parallel_cross_entropy` where one rank has all logits."""

    def cross_entropy(logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
        from megatron.core import parallel_state

        if label_smoothing or parallel_state.get_tensor_model_parallel_world_size() > 1:
            return megatron_cross_entropy(logits, target, label_smoothing)
        return _CrossEntropy.apply(logits, target)

    return cross_entropy


class _QueryKeyValue(torch.autograd.Function):
    """Queries and keys in their rotary position embedding with halves that rotate, x cos + (-x_high, x_low) sin, and
    values.

    Megatron Core allocates seven tensors for each, five of them whole; this allocates one and two halves, and writes
    the gradients side by side, as the projection takes them.
    """

    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """mixed [S, B, G, Q + 2, D], Q queries with their key and value; cos and sin [S, 1, 1, 1, D].

        Returns queries [S, B, G Q, D], keys and values [S, B, G, D].
        """
        ctx.save_for_backward(cos, sin)
        half, turned = mixed.size(-1) // 2, []
        for x in (mixed[..., :-2, :], mixed[..., -2:-1, :]):
            rotated = x * cos
            rotated[..., :half] -= x[..., half:] * sin[..., :half]
            rotated[..., half:] += x[..., :half] * sin[..., half:]
            turned.append(rotated.flatten(2, 3))
        return turned[0], turned[1], mixed[..., -1, :]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (cos, sin), (of_queries, of_keys, of_values) = ctx.saved_tensors, gradients
        groups, half = of_keys.size(2), of_keys.size(3) // 2
        queries = of_queries.size(2) // groups
        back = of_keys.new_empty(*of_keys.shape[:3], queries + 2, of_keys.size(3))
        parts = (
            (of_queries.unflatten(2, (groups, queries)), back[..., :-2, :]),
            (of_keys.unsqueeze(3), back[..., -2:-1, :]),
        )
        for gradient, part in parts:
            torch.mul(gradient, cos, out=part)
            part[..., :half] += gradient[..., half:] * sin[..., half:]
            part[..., half:] -= gradient[..., :half] * sin[..., :half]
        back[..., -1, :] = of_values
        return back, None, None


def _rotated_qkv(
    mixed: torch.Tensor, query_freqs: torch.Tensor, key_freqs: torch.Tensor, sizes: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In place of Transformer Engine's function of the same signature, which Megatron Core calls with
    `fused_single_qkv_rope`: mixed [S, B, G, Q D + D + D], freqs [S, 1, 1, D], the same for queries and keys."""
    assert query_freqs is key_freqs and query_freqs.size(-1) == sizes[-1], "see model/transformer_config.py"
    if getattr(query_freqs, "bcd_cos_sin", (None,))[0] != mixed.dtype:  # Megatron Core has one tensor per length
        freqs = query_freqs.unsqueeze(2)
        query_freqs.bcd_cos_sin = (mixed.dtype, freqs.cos().to(mixed.dtype), freqs.sin().to(mixed.dtype))  # type: ignore[attr-defined]
    _, cos, sin = query_freqs.bcd_cos_sin  # type: ignore[attr-defined]
    return _QueryKeyValue.apply(mixed.unflatten(3, (-1, sizes[-1])), cos, sin)


def _unless_in_place(collective: Any) -> Any:
    """A collective skipped where the group has one rank, whose shard is the whole buffer."""

    def gather_or_scatter(
        output: torch.Tensor, input: torch.Tensor, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any
    ) -> Any:
        is_alone = torch.distributed.get_world_size(group) == 1 and output.data_ptr() == input.data_ptr()
        if is_alone and not async_op:
            return None
        return collective(output, input, *args, group=group, async_op=async_op, **kwargs)

    return gather_or_scatter
