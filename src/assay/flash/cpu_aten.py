"""PyTorch's own flash attention for CPUs, where it can do what is asked: which calls it takes, and what it needs.

Its output and LSE are right for any lengths, heads (GQA too) and masks, but for these: it divides by zero when a
length is 0; it takes no strides in the last dimension and one head dimension only (zeros make two of them one); its
causal mask begins at the top left, and is −inf times the scale, which has to be positive; a row that sees nothing has
the LSE 0, and so has a row of NaN over fewer keys than a vector holds, whose output it makes 0; in bf16 so is that of a
row with a score of +inf; −inf in its mask does not hide a NaN; its backward sums dK and dV up in the dtype of K, block
by block over the queries and over a group's heads.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.nn.functional import pad

from assay.flash.call import Call, Gradients
from assay.flash.layout import as_gradient, empty_gradient, empty_output

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

ROWS = 2048
"""Rows that a bf16 backward may take at once: summed up in bf16, a gradient loses more the more blocks it is of."""
KEYS = 8192
"""The same of keys, over which dQ is summed up."""
VECTOR = 16
"""Numbers that a vector of the CPU holds at most: over fewer keys the kernel takes a row of NaN for a hidden one."""
PADDED_SCORES = 1 << 19
"""Scores of a head above which two head dimensions are made one: up to N 512 SDPA, which writes them out, is faster."""
LEAST_SCALE = 2.0**-126
"""Of a causal call: times 0, as FP32 may have it, or a negative number −inf hides nothing."""


def takes(call: Call) -> bool:
    """Whether PyTorch's kernel computes this call."""
    special = (call.softcap, call.slopes, call.sinks, call.cu_seqlens_q)
    lengths = (call.q.numel(), call.k.numel())
    if call.dropout or any(x is not None for x in special) or not all(lengths):
        return False
    band = _band(call)
    if not _has_one_dim(call) or band is None or (band == "causal" and call.scale < LEAST_SCALE):
        return False
    return call.k.shape[2] >= VECTOR or is_finite(call.q, call.k)


def _has_one_dim(call: Call) -> bool:
    """Whether q's head dimension is v's, or it pays to fill the shorter one up with zeros: more work, done faster.

    In bf16 0.6–0.8 of the time that our blocks take, forward and backward; in FP32 0.7–0.9 where V is the shorter one,
    but as much or more from D 128 on.
    """
    dim, dim_v = call.q.shape[-1], call.v.shape[-1]
    if dim == dim_v:
        return True
    if max(dim, dim_v) > 2 * min(dim, dim_v) or call.q.shape[2] * call.k.shape[2] <= PADDED_SCORES:
        return False
    return call.q.dtype == torch.bfloat16 or (call.q.dtype != torch.float64 and dim_v < dim <= 64)


def is_finite(*tensors: torch.Tensor) -> bool:
    """Whether there is no NaN and no infinity; an overflow of the sum is taken for one."""
    return math.isfinite(sum(x.detach().sum().item() for x in tensors))


def lost_a_row(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float | None, bias: torch.Tensor | None = None
) -> bool:
    """Whether a row of 0 may be one of NaN: over few keys, or in bf16 where a score is +inf. Called for such alone."""
    first = out.select(3, 0)
    if first.count_nonzero().item() == first.numel():
        return False
    of_q, of_k = (x.detach().abs().amax().item() for x in (q, k))
    largest = q.shape[3] * of_q * of_k * max(1.0, abs(scale or 1.0))
    if bias is not None and bias.dtype != torch.bool:
        largest += bias.detach().max().item()
    return not largest < torch.finfo(torch.float32).max


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the LSE."""
    given, call = call, _prepared(call)
    out, lse = _forward(call.q, call.k, call.v, 0.0, _is_causal(call), attn_mask=call.bias, scale=call.scale)
    lse = lse.contiguous()
    if call.q.dtype == torch.bfloat16 and (lse == torch.inf).any():
        out.masked_fill_((lse == torch.inf)[..., None], torch.nan)
    if given.bias is not None and (lse == 0).any():
        lse = lse.masked_fill(_empty(given.bias, call.q.shape[2] if _is_causal(call) else None), -torch.inf)
    dim_v = given.v.shape[-1]
    if given.q.stride(-1) != 1 or given.q.shape[-1] != dim_v:  # a copy was attended to, whose order the kernel followed
        return empty_output(given.q, dim_v).copy_(out[..., :dim_v]), lse
    return out.to(given.q.dtype), lse


def backward(call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor) -> Gradients:
    """The gradients of q, k and v, for an LSE that has none."""
    given, call = call, _prepared(call)
    out, dout = (_dense(x, call.q.dtype, call.q.shape[-1]) for x in (out, dout))
    if given.bias is not None:
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
    repeats = call.group > 1 and (call.q.dtype == torch.bfloat16 or call.k.shape[1] == 1)
    if repeats:
        # The kernel sums a group up in bf16, and on one thread: with a K for every query head the sum is ours.
        call = replace(call, k=_repeated(call.k, call.group), v=_repeated(call.v, call.group))
    if call.q.dtype == torch.bfloat16 and (call.q.shape[2] > ROWS or call.k.shape[2] > KEYS):
        grads = _by_rows(call, out, lse, dout)
    else:
        grads = _grads(call, out, lse, dout, _is_causal(call))
    dq, dk, dv = grads
    if repeats:
        dk, dv = (x.unflatten(1, (-1, given.group)).sum(2, dtype=_sum_dtype(x)) for x in (dk, dv))
    dims = (x.shape[-1] for x in (given.q, given.k, given.v))
    dq, dk, dv = (as_gradient(x[..., :dim].to(given.q.dtype)) for x, dim in zip((dq, dk, dv), dims, strict=True))
    return Gradients(dq, dk, dv, None, None)


def _grads(
    call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = _backward(dout, call.q, call.k, call.v, out, lse, 0.0, causal, attn_mask=call.bias, scale=call.scale)
    return dq, dk, dv


def _by_rows(
    call: Call, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients from `ROWS` rows and `KEYS` keys at a time, summed up in FP32.

    Given the LSE, the share of each part of the keys stands alone: causal rows take the keys before them whole, then
    their own square.
    """
    queries, keys, causal = call.q.shape[2], call.k.shape[2], _is_causal(call)
    dq, dk, dv = (empty_gradient(x, torch.float32).zero_() for x in (call.q, call.k, call.v))
    for first in range(0, queries, ROWS):
        rows = slice(first, min(first + ROWS, queries))
        whole = first if causal else keys
        parts = [(slice(at, min(at + KEYS, whole)), False) for at in range(0, whole, KEYS)]
        if causal:
            parts.append((rows, True))
        for of_keys, square in parts:
            bias = None if call.bias is None else _cut(call.bias, rows, of_keys)
            part = replace(
                call, q=call.q[:, :, rows], k=call.k[:, :, of_keys], v=call.v[:, :, of_keys], bias=bias, right=None
            )
            shares = _grads(part, out[:, :, rows], lse[:, :, rows], dout[:, :, rows], square)
            for total, share, where in zip((dq, dk, dv), shares, (rows, of_keys, of_keys), strict=True):
                total[:, :, where] += share
    return dq, dk, dv


def _prepared(call: Call) -> Call:
    """The call as the kernel can take it: one head dimension, which is dense, a float mask, FP16 as FP32.

    In FP16 PyTorch's kernel takes up to ten times as long as in FP32, on CPUs that do not multiply FP16 themselves.
    """
    dtype = torch.float32 if call.q.dtype == torch.float16 else call.q.dtype
    inputs = (call.q, call.k, call.v)
    dim = max(call.q.shape[-1], call.v.shape[-1])
    if call.bias is None and all(x.dtype == dtype and x.stride(-1) == 1 and x.shape[-1] == dim for x in inputs):
        return call
    q, k, v = (_dense(x, dtype, dim) for x in inputs)
    bias = call.bias
    if bias is not None and bias.dtype == torch.bool:
        k, v = _without_unseen(k, v, bias.tril() if _is_causal(call) and bias.shape[-2] > 1 else bias)
        bias = torch.zeros((), dtype=dtype, device=q.device).where(bias, -torch.inf)
    elif bias is not None and bias.dtype != dtype:
        bias = bias.to(_sum_dtype(q))
    return replace(call, q=q, k=k, v=v, bias=bias)


def _repeated(x: torch.Tensor, group: int) -> torch.Tensor:
    """K or V for every query head; one head is not even copied."""
    return x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)


def _without_unseen(k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with 0 for keys that no row sees, whose NaN would reach every row."""
    if (k.sum() + v.sum()).isfinite():
        return k, v
    seen = _any(mask, -2)
    if seen.shape[1] > 1:
        seen = seen.unflatten(1, (k.shape[1], -1)).any(2)
    unseen = ~seen[..., None]
    return k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)


def _empty(bias: torch.Tensor, causal_rows: int | None) -> torch.Tensor:
    """Rows that see no key. Causal rows see nothing either if the first key left to them comes after them."""
    visible = bias if bias.dtype == torch.bool else bias != -torch.inf
    empty = ~_any(visible, -1)
    if causal_rows is None:
        return empty
    return empty | (visible.to(torch.uint8).argmax(-1) > torch.arange(causal_rows, device=bias.device))


def _any(mask: torch.Tensor, dim: int) -> torch.Tensor:
    return mask.view(torch.uint8).amax(dim).bool()  # `any` takes forty times as long


def _band(call: Call) -> str | None:
    """What positions hide: nothing ("all"), later keys ("causal"), or something the kernel has no name for (None)."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    if call.left is not None and call.left < keys - 1:
        return None
    if call.right is None or call.right >= queries - 1:
        return "all"
    return "causal" if call.right == 0 and queries == keys else None


def _is_causal(call: Call) -> bool:
    return _band(call) == "causal"


def _cut(bias: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
    bias = bias[..., rows, :] if bias.shape[-2] > 1 else bias
    return bias[..., keys] if bias.shape[-1] > 1 else bias


def _dense(x: torch.Tensor, dtype: torch.dtype, dim: int) -> torch.Tensor:
    """x in this dtype, its last dimension dense, and `dim` long by zeros."""
    x = x.to(dtype)
    if x.shape[-1] != dim:
        x = pad(x, (0, dim - x.shape[-1]))  # in x's order, which may have another dimension last
    return x if x.stride(-1) == 1 else x.contiguous()


def _sum_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
