"""What flash and memory-efficient attention return, computed in fp32; torch chooses between them as on a GPU.

Shapes: B sequences, N heads, S tokens, D head size. Grouped queries have fewer heads of keys and values.
"""

from __future__ import annotations

import torch
from emulated_kernels import _begin, _on_device, _seed, cpu_view


def _probabilities(q, k, bias, is_causal, scale, dropout, seed):
    """Before dropout, the mask that dropout multiplies them with, and their log-sum-exp."""
    scores = q @ k.transpose(-1, -2) * scale
    if is_causal:  # 1: the diagonal begins at the upper left; 2: it ends at the lower right, as flash attention's
        first = 1 + (is_causal == 2) * (scores.size(-1) - scores.size(-2))
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(first), float("-inf"))
    if bias is not None:
        scores = scores + cpu_view(bias).float()
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(scores.shape, generator=generator).ge(dropout) / (1 - dropout) if dropout else 1.0
    return scores.softmax(-1), kept, scores.logsumexp(-1)


def _grouped(q, *others):
    return [other.repeat_interleave(q.size(1) // other.size(1), 1) for other in others]


def _like(result, tensor):
    """In memory as the fused kernels lay it out: [B, S, N, D]."""
    return _on_device(result.to(tensor.dtype).transpose(1, 2).contiguous(), tensor.device).transpose(1, 2)


def _forward(name, q, k, v, bias, dropout, is_causal, scale):
    device = _begin(name, [tensor for tensor in (q, k, v, bias) if tensor is not None])
    seed = _seed(None, device) if dropout else 0
    qf, kf, vf = (cpu_view(tensor).float() for tensor in (q, k, v))
    kf, vf = _grouped(qf, kf, vf)
    scale = q.size(-1) ** -0.5 if scale is None else scale
    probabilities, kept, logsumexp = _probabilities(qf, kf, bias, is_causal, scale, dropout, seed)
    return _like(probabilities * kept @ vf, q), logsumexp, _on_device(torch.tensor(seed), device)


def _backward(name, grad, q, k, v, bias, out, seed, dropout, is_causal, scale):
    _begin(name, [grad, q, k, v, out])
    qf, kf, vf, g, o = (cpu_view(tensor).float() for tensor in (q, k, v, grad, out))
    kf, vf = _grouped(qf, kf, vf)
    scale = q.size(-1) ** -0.5 if scale is None else scale
    p, kept, _ = _probabilities(qf, kf, bias, is_causal, scale, dropout, int(cpu_view(seed)))
    ds = p * ((g @ vf.transpose(-1, -2)) * kept - (g * o).sum(-1, keepdim=True))
    dk, dv = ds.transpose(-1, -2) @ qf * scale, (p * kept).transpose(-1, -2) @ g
    dk, dv = (x.view(x.size(0), k.size(1), -1, *x.shape[2:]).sum(2) for x in (dk, dv))
    return _like(ds @ kf * scale, q), _like(dk, k), _like(dv, v), ds


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse, seed = _forward("_scaled_dot_product_flash_attention", q, k, v, None, dropout_p, 2 * is_causal, scale)
    offset, mask = torch.zeros_like(seed), torch.empty(0, dtype=q.dtype, device=q.device)
    return out, _on_device(lse, q.device), None, None, q.size(2), k.size(2), seed, offset, mask


def _flash_backward(grad, q, k, v, out, lse, cq, ck, mq, mk, dropout_p, is_causal, seed, offset, *, scale=None):
    name = "_scaled_dot_product_flash_attention_backward"
    return _backward(name, grad, q, k, v, None, out, seed, dropout_p, 2 * is_causal, scale)[:3]


def _efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    out, lse, seed = _forward("_scaled_dot_product_efficient_attention", q, k, v, bias, dropout_p, is_causal, scale)
    rows = -(-lse.size(-1) // 32) * 32 if compute_log_sumexp else 0
    lse = torch.nn.functional.pad(lse, (0, rows - lse.size(-1)), value=float("inf"))
    return out, _on_device(lse, q.device), seed, torch.zeros_like(seed)


def _efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None):
    name = "_scaled_dot_product_efficient_attention_backward"
    bias = bias if bias is not None and bias.numel() else None
    dq, dk, dv, ds = _backward(name, grad, q, k, v, bias, out, seed, dropout_p, is_causal, scale)
    return dq, dk, dv, _on_device(ds.to(q.dtype), q.device) if mask[3] else None


def _efficient_of(
    q, k, v, bias, cq, ck, mq, mk, dropout_p, mask_type, compute_log_sumexp=False, *, scale=None, **others
):
    """[B, S, N, D], and the mask as `is_causal` above."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out, *others = _efficient(q, k, v, bias, compute_log_sumexp, dropout_p, mask_type, scale=scale)
    return out.transpose(1, 2), *others, q.size(2), k.size(2)


def _efficient_of_backward(
    grad, q, k, v, bias, out, cq, ck, mq, mk, lse, dropout_p, seed, offset, mask_type, has_bias, *, scale=None, **others
):
    grad, q, k, v, out = (tensor.transpose(1, 2) for tensor in (grad, q, k, v, out))
    mask = (True, True, True, False)
    gradients = _efficient_backward(
        grad, q, k, v, bias, out, lse, seed, offset, dropout_p, mask, mask_type, scale=scale
    )
    return *(gradient.transpose(1, 2) for gradient in gradients[:3]), None


KERNELS = {
    "_efficient_attention_forward": _efficient_of,
    "_efficient_attention_backward": _efficient_of_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
