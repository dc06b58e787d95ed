"""Emulate flash and memory-efficient attention in fp32; torch chooses between them as on a GPU.

Shapes: queries, keys, values and outputs [B, S, N, D]: B sequences, S tokens, N heads, D head size; internally [B, N,
S, D]. With grouped queries, keys and values have fewer heads. Of texts of variable length they are [T, N, D], T tokens.
"""

from __future__ import annotations

import itertools

import torch
from emulated_kernels import begin, cpu_view, on_device, seed_of


def _inside(q, *others):
    """Convert to fp32 with one head per query head."""
    views = [cpu_view(tensor).float().transpose(1, 2) for tensor in (q, *others)]
    return [view.repeat_interleave(q.size(2) // view.size(1), 1) for view in views]


def _like(result, tensor):
    """Convert back: sum the heads that a group shares."""
    result = result.view(result.size(0), tensor.size(2), -1, *result.shape[2:]).sum(2)
    return on_device(tensor.device, result.transpose(1, 2).contiguous().to(tensor.dtype))


def _probabilities(q, k, bias, causal, scale, dropout, seed):
    """Return the probabilities before dropout, the dropout mask that multiplies them, and their log-sum-exp.

    `causal` is 1 if the diagonal begins at the upper left, 2 if it ends at the lower right.
    """
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        first = 1 + (causal == 2) * (scores.size(-1) - scores.size(-2))
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(first), float("-inf"))
    if bias is not None:
        scores = scores + cpu_view(bias).float()
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(scores.shape, generator=generator).ge(dropout) / (1 - dropout) if dropout else 1.0
    return scores.softmax(-1), kept, scores.logsumexp(-1)


def _forward(name, q, k, v, bias, dropout, causal, scale):
    device = begin(name, [q, k, v] if bias is None else [q, k, v, bias])
    seed = seed_of(None, device) if dropout else 0
    qf, kf, vf = _inside(q, k, v)
    probabilities, kept, logsumexp = _probabilities(qf, kf, bias, causal, scale or q.size(-1) ** -0.5, dropout, seed)
    return _like(probabilities * kept @ vf, q), logsumexp, on_device(device, torch.tensor(seed))


def _backward(name, grad, q, k, v, bias, out, seed, dropout, causal, scale):
    begin(name, [grad, q, k, v, out])
    qf, kf, vf, g, o = _inside(q, k, v, grad, out)
    scale = scale or q.size(-1) ** -0.5
    p, kept, _ = _probabilities(qf, kf, bias, causal, scale, dropout, int(cpu_view(seed)))
    ds = p * ((g @ vf.transpose(-1, -2)) * kept - (g * o).sum(-1, keepdim=True))
    dk, dv = ds.transpose(-1, -2) @ qf * scale, (p * kept).transpose(-1, -2) @ g
    return _like(ds @ kf * scale, q), _like(dk, k), _like(dv, v), ds


def _each_text(bounds, *tensors):
    """Yield the tensors of each text as sequences [1, S, N, D]."""
    begin("_text_bounds", [bounds])  # which may still be on their way
    for start, end in itertools.pairwise(cpu_view(bounds).tolist()):
        yield [tensor[None, start:end] for tensor in tensors]


def _window(q, is_causal, *, window_size_left=None, window_size_right=None, **others):
    """Return whether attention is causal, and the bias [S, S] of its window or None."""
    if window_size_left in (None, -1):
        return is_causal, None
    outside = torch.ones(q.size(1), q.size(1), dtype=torch.bool).tril(-window_size_left - 1)
    return is_causal or window_size_right == 0, torch.zeros(outside.shape).masked_fill(outside, float("-inf"))


def _flash(q, k, v, cq, ck, mq, mk, dropout, is_causal, return_debug_mask, *, scale=None, **others):
    if cq is not None:
        rest = (None, None, mq, mk, dropout, is_causal, False)
        texts = [_flash(*text, *rest, scale=scale, **others) for text in _each_text(cq, q, k, v)]
        outs, lses, seeds, offsets, masks = zip(*texts, strict=True)
        return torch.cat(outs, 1)[0], torch.cat(lses, 2)[0], seeds[0], offsets[0], masks[0]
    is_causal, bias = _window(q, is_causal, **others)
    out, lse, seed = _forward("_flash_attention_forward", q, k, v, bias, dropout, 2 * is_causal, scale)
    return out, on_device(q.device, lse), seed, torch.empty_like(seed), q.new_empty(0)


def _flash_backward(grad, q, k, v, out, lse, cq, ck, mq, mk, dropout, is_causal, seed, unused, *, scale=None, **others):
    if cq is not None:
        rest = (None, None, None, mq, mk, dropout, is_causal, torch.tensor(0), unused)  # there is no dropout
        texts = [_flash_backward(*text, *rest, scale=scale, **others) for text in _each_text(cq, grad, q, k, v, out)]
        return tuple(torch.cat(parts, 1)[0] for parts in zip(*texts, strict=True))
    is_causal, bias = _window(q, is_causal, **others)
    return _backward("_flash_attention_backward", grad, q, k, v, bias, out, seed, dropout, 2 * is_causal, scale)[:3]


def _efficient(q, k, v, bias, cq, ck, mq, mk, dropout, causal, has_lse=False, *, scale=None, **others):
    out, lse, seed = _forward("_efficient_attention_forward", q, k, v, bias, dropout, causal, scale)
    rows = -(-lse.size(-1) // 32) * 32 if has_lse else 0
    lse = torch.nn.functional.pad(lse, (0, rows - lse.size(-1)), value=float("inf"))
    return out, on_device(q.device, lse), seed, torch.zeros_like(seed), q.size(1), k.size(1)


def _efficient_backward(
    grad, q, k, v, bias, out, cq, ck, mq, mk, lse, dropout, seed, offset, causal, has_bias, *, scale=None, **others
):
    inputs = grad, q, k, v, bias, out, seed
    *gradients, ds = _backward("_efficient_attention_backward", *inputs, dropout, causal, scale)
    return *gradients, on_device(q.device, ds.to(q.dtype)) if has_bias else None


KERNELS = {
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_efficient_attention_forward": _efficient,
    "_efficient_attention_backward": _efficient_backward,
}
