"""One attention call as it was caught, and the same in plain torch, in its own precision or in FP64.

Plain is what people write by hand: matmul, softmax, matmul, each result in the dtype of its inputs. Rows are taken a
few at a time, so that memory stays bounded; a row's softmax needs only that row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from assay.watching.scores import Scores

_SCORES_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Elements of the scores held at a time."""
Look = Callable[[Tensor, Tensor], None]
"""Shown scores and probabilities, some rows of all heads at a time: (B, H, rows, keys)."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class AttentionCall:
    """What went in, in one layout whatever was called: q (B, H, queries, D), k and v (B, KV heads, keys, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    left: int | None = None
    """Keys seen before a row's position, at most; the last row stands beside the last key."""
    right: int | None = None
    """And after it: 0 is causal."""
    bias: Tensor | None = None
    """Bool (False hides) or float (added), broadcast to (B, H, queries, keys)."""
    slopes: Tensor | None = None
    """ALiBi's, (H,) or (B, H)."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """(H,): one more key for each head, without a value."""

    def detached(self) -> AttentionCall:
        """Without gradients."""
        return replace(self, q=self.q.detach(), k=self.k.detach(), v=self.v.detach())

    def in_double(self) -> AttentionCall:
        """The same numbers in FP64."""
        return replace(self, q=self.q.double(), k=self.k.double(), v=self.v.double())

    @property
    def dtype(self) -> torch.dtype:
        """Of q, k and v."""
        return self.q.dtype

    def plain(self) -> Tensor:
        """See `plain`."""
        return plain(self)

    def plain_gradients(self, grad: Tensor) -> Sequence[Tensor]:
        """See `plain_gradients`."""
        return plain_gradients(self, grad)

    def golden(self) -> tuple[Tensor, dict[str, list[float]]]:
        """The output in FP64, and what the scores are like."""
        scores = Scores(self.q.shape[1], self.q.dtype, self.q.device)
        return plain(self.in_double(), scores), scores.figures()

    def columns(self) -> dict[str, Any]:
        """What rows say of it."""
        batch, heads, queries, dim = self.q.shape
        return {
            "batch": batch, "heads": heads, "kv_heads": self.k.shape[1], "queries": queries, "keys": self.k.shape[2],
            "dim": dim, "causal": self.right is not None, "masked": self.bias is not None,
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """What it takes to replay it, with `notes`."""
        bias = self.bias
        if bias is not None:  # as small as it was before it was expanded
            bias = bias[tuple(slice(None) if stride else slice(1) for stride in bias.stride())]
        found = {"q": self.q, "k": self.k, "v": self.v, "bias": bias, "alibi_slopes": self.slopes, "sinks": self.sinks}
        return {name: x for name, x in found.items() if x is not None}

    def notes(self) -> dict[str, str]:
        """The numbers among its arguments."""
        found = {"scale": self.scale, "left": self.left, "right": self.right, "softcap": self.softcap}
        return {name: repr(value) for name, value in found.items() if value is not None}


@torch.no_grad()
def plain(call: AttentionCall, look: Look | None = None) -> Tensor:
    """The output, (B, H, queries, D_v), in q's dtype."""
    out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
    for rows in _chunks(call):
        out[:, :, rows] = _attend(call, call.q[:, :, rows], call.k, call.v, rows, look)
    return out


def plain_gradients(call: AttentionCall, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v, for the output's gradient; what several chunks add to k and v is summed in FP32 or FP64."""
    grad = grad.to(call.q.dtype)
    wide = torch.promote_types(call.q.dtype, torch.float32)
    dq = torch.empty_like(call.q)
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (call.k, call.v))
    for rows in _chunks(call):
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (call.q[:, :, rows], call.k, call.v))
            out = _attend(call, q, k, v, rows, None)
        found = torch.autograd.grad(out, (q, k, v), grad[:, :, rows])
        dq[:, :, rows] = found[0]
        dk += found[1]
        dv += found[2]
    return dq, dk.to(call.k.dtype), dv.to(call.v.dtype)


def _chunks(call: AttentionCall) -> Iterator[slice]:
    batch, heads, queries, _ = call.q.shape
    scores = _SCORES_AT_ONCE.get(call.q.device.type, _SCORES_AT_ONCE["cpu"])
    step = max(1, scores // max(1, batch * heads * call.k.shape[2]))
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))


def _attend(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, rows: slice, look: Look | None) -> Tensor:
    batch, heads, count, _ = q.shape
    grouped = q.unflatten(1, (k.shape[1], -1))
    s = (grouped @ k[:, :, None].transpose(-1, -2)).flatten(1, 2) * call.scale
    s = _adjusted(call, s, rows)
    hidden = s.amax(-1, keepdim=True) == -torch.inf
    if call.sinks is not None:
        sink = call.sinks.to(s.dtype).view(1, heads, 1, 1).expand(batch, heads, count, 1)
        p = torch.softmax(torch.cat((s, sink), -1), -1)[..., :-1]
    else:
        p = torch.softmax(s.masked_fill(hidden, 0.0), -1)
    p = p.masked_fill(hidden, 0.0)  # a row that sees no key gives 0
    if look is not None:
        look(s, p)
    out: Tensor = p.unflatten(1, (k.shape[1], -1)) @ v[:, :, None]
    return out.flatten(1, 2)


def _adjusted(call: AttentionCall, s: Tensor, rows: slice) -> Tensor:
    """Softcap, ALiBi, bias and masks."""
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    keys = torch.arange(s.shape[-1], device=s.device)
    own = torch.arange(rows.start, rows.stop, device=s.device)[:, None] + (s.shape[-1] - call.q.shape[2])
    if call.slopes is not None:
        s = s - call.slopes[..., None, None].to(s.dtype) * (own - keys).abs()
    if call.bias is not None:
        bias = call.bias if call.bias.shape[-2] == 1 else call.bias[..., rows, :]
        s = s.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else s + bias.to(s.dtype)
    for beyond in (
        None if call.right is None else keys > own + call.right,
        None if call.left is None else keys < own - call.left,
    ):
        if beyond is not None:
            s = s.masked_fill(beyond, -torch.inf)
    return s
