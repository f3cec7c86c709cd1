"""An attention call in plain torch, in its own precision or in FP64, forward and backward.

Plain is what people write by hand: matmul, softmax, matmul, each result in the dtype of its inputs. Rows are taken a
few at a time, so that memory stays bounded; a row's softmax needs only that row. In FP64, where the order of sums does
not matter, keys that none of these rows sees are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from assay.watching.adjusting import adjusted

if TYPE_CHECKING:
    from assay.watching.call import AttentionCall

_SCORES_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 30}
"""Bytes of the scores held at a time."""
_EXACT_ROWS = {"cpu": 64, "cuda": 256}
"""Rows taken at a time in FP64: so few that a causal mask or a window leaves keys out, and a CPU's cache holds all."""
_EXACT_BYTES = {"cuda": 1 << 26}
"""More rows where their scores are fewer bytes than this: a kernel that is over at once costs its launch."""
Look = Callable[[Tensor, Tensor], None]
"""Shown scores and probabilities, some rows of all heads at a time: (B, H, rows, keys). It may overwrite the scores."""


def plain(call: AttentionCall, grad: Tensor | None = None, look: Look | None = None) -> tuple[Tensor, ...]:
    """The output, (B, H, queries, D_v), in q's dtype; given its gradient, also those of q, k and v.

    What several chunks add to the gradients of k and v is summed in FP32 or FP64.
    """
    chunks = _chunks(call)
    if len(chunks) == 1:
        return _chunk(call, *chunks[0], grad, look)
    out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
    dq, wide = torch.empty_like(call.q), torch.promote_types(call.q.dtype, torch.float32)
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (call.k, call.v))
    for rows, keys in chunks:
        found = _chunk(call, rows, keys, grad, look)
        out[:, :, rows] = found[0]
        if grad is not None:
            dq[:, :, rows] = found[1]
            dk[:, :, keys].add_(found[2])
            dv[:, :, keys].add_(found[3])
    return (out,) if grad is None else (out, dq, dk.to(call.k.dtype), dv.to(call.v.dtype))


def _chunks(call: AttentionCall) -> list[tuple[slice, slice]]:
    """Rows, and the keys that they are given; all keys where one chunk has all rows."""
    batch, heads, queries, _ = call.q.shape
    keys, kind = call.k.shape[2], call.q.device.type
    held = _SCORES_AT_ONCE.get(kind, _SCORES_AT_ONCE["cpu"])
    row = max(1, call.q.element_size() * batch * heads * keys)
    step = max(1, held // row)
    windowed = call.left is not None or call.right is not None
    if call.dtype == torch.float64 and (windowed or kind != "cuda"):
        step = min(step, max(_EXACT_ROWS.get(kind, _EXACT_ROWS["cpu"]), _EXACT_BYTES.get(kind, 0) // row))
    rows = [slice(start, min(start + step, queries)) for start in range(0, queries, step)]
    if call.dtype != torch.float64 or len(rows) == 1:
        return [(each, slice(0, keys)) for each in rows]
    return [(each, _seen(call, each)) for each in rows]


def _seen(call: AttentionCall, rows: slice) -> slice:
    """The keys from the first to the last that one of these rows may see, at least one."""
    keys = call.k.shape[2]
    ahead = keys - call.q.shape[2]
    last = keys if call.right is None else max(1, min(keys, rows.stop + ahead + call.right))
    first = 0 if call.left is None else max(0, min(last - 1, rows.start + ahead - call.left))
    return slice(first, last)


def _chunk(call: AttentionCall, rows: slice, keys: slice, grad: Tensor | None, look: Look | None) -> tuple[Tensor, ...]:
    with torch.set_grad_enabled(grad is not None):
        given = (call.q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys])
        q, k, v = (x.detach().requires_grad_(grad is not None) for x in given)
        out = _attend(call, q, k, v, (rows, keys), look)
    if grad is None:
        return (out,)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad[:, :, rows].to(out.dtype))


def _attend(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, chunk: tuple[slice, slice], look: Look | None
) -> Tensor:
    batch, heads, count, _ = q.shape
    scaled = _scales_exactly(call)
    s = _product(q * call.scale if scaled else q, k.transpose(-1, -2))
    s = s if scaled else s * call.scale
    s = adjusted(call, s, *chunk)
    hidden = None if _sees_itself(call) else s.detach().amax(-1, keepdim=True) == -torch.inf
    if call.sinks is not None:
        sink = call.sinks.to(s.dtype).view(1, heads, 1, 1).expand(batch, heads, count, 1)
        p = torch.softmax(torch.cat((s, sink), -1), -1)[..., :-1]
    else:
        p = torch.softmax(s if hidden is None else s.masked_fill(hidden, 0.0), -1)
    if hidden is not None:
        p = p.masked_fill(hidden, 0.0)  # a row that sees no key gives 0
    if look is not None:
        look(s.detach(), p.detach())
    return _product(p, v)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """(B, H, rows, n) @ (B, KV heads, n, m); heads of a group share a y."""
    grouped: Tensor = x.unflatten(1, (y.shape[1], -1))
    if x.dtype != torch.float64:
        return (grouped @ y[:, :, None]).flatten(1, 2)
    # One product for the group. In other formats its gradients would be rounded less often than in what people write.
    found: Tensor = (grouped.flatten(2, 3) @ y).unflatten(2, grouped.shape[2:4]).flatten(1, 2)
    return found


def _scales_exactly(call: AttentionCall) -> bool:
    """Whether q may be multiplied instead of the scores, which are many: in FP64, or by a power of two.

    That changes no bit where exponents have room; in FP16 they have not.
    """
    roomy = call.dtype in (torch.bfloat16, torch.float32) and math.frexp(call.scale)[0] in (0.5, -0.5)
    return call.dtype == torch.float64 or roomy


def _sees_itself(call: AttentionCall) -> bool:
    """Whether it is sure that every row sees a key."""
    inside = all(side is None or side >= 0 for side in (call.left, call.right))
    return call.bias is None and inside and call.k.shape[2] >= call.q.shape[2]
