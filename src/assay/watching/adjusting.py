"""What is done to the scores of a call before the softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from assay.watching.call import AttentionCall


def adjusted(call: AttentionCall, s: Tensor, rows: slice, columns: slice) -> Tensor:
    """Softcap, ALiBi, bias and masks, of these rows and columns of all; in place where it can be."""
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    keys = torch.arange(columns.start, columns.stop, device=s.device)
    own = torch.arange(rows.start, rows.stop, device=s.device)[:, None] + (call.k.shape[2] - call.q.shape[2])
    if call.slopes is not None:
        s = s - call.slopes[..., None, None].to(s.dtype) * (own - keys).abs()
    if call.bias is not None:
        bias = call.bias if call.bias.shape[-2] == 1 else call.bias[..., rows, :]
        bias = bias if bias.shape[-1] == 1 else bias[..., columns]
        if bias.dtype == torch.bool:
            _hide(s, ~bias)
        else:
            s = s + bias.to(s.dtype)
    ahead = call.k.shape[2] - call.q.shape[2] - columns.start
    if call.right is not None:
        first = min(len(keys), max(0, rows.start + ahead + call.right + 1))  # that a row does not see
        _hide(s[..., first:], keys[first:] > own + call.right)
    if call.left is not None:
        last = max(0, rows.stop - 1 + ahead - call.left)
        _hide(s[..., :last], keys[:last] < own - call.left)
    return s


def unexpanded(bias: Tensor) -> Tensor:
    """As small as it was before it was expanded."""
    return bias[tuple(slice(None) if stride else slice(1) for stride in bias.stride())]


def _hide(s: Tensor, where: Tensor) -> None:
    """In place and unknown to autograd: with a probability of 0 comes a gradient of 0.

    By `data`: a change that `detach` lets it see makes it copy the gradients of all scores, where they are a view.
    """
    if s.numel():
        s.data.masked_fill_(where, -torch.inf)
