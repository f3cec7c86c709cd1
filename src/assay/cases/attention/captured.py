"""A captured call as a sweep takes it: what it is, and each of its heads. For what a file may hold: `captured_file`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from assay.cases.attention.captured_file import Three, load
from assay.cases.attention.masking import Masking
from assay.formats.dtypes import format_of


class How(NamedTuple):
    """What attention is given besides q, k, v and causal."""

    scale: float | None = None
    """None: 1/√dim."""
    bias: Tensor | None = None
    """(1, 1, queries, keys), bool or float."""


class Captured(NamedTuple):
    """What a file holds."""

    heads: int
    """Query heads of all batch entries."""
    shape: tuple[int, int, int, int]
    """Of the queries of one head."""
    keys: int
    format: str
    """Of q."""
    causal: bool
    """Whether its mask is the causal one and no other."""
    masked: bool
    """Whether it has another mask, or a bias."""
    told: bool
    """Whether the file says how the call was made."""
    layer: str
    """Where in a model it was made; "" if the file does not say."""


def captured(path: Path) -> Captured:
    """Look at a file; a ValueError says what is wrong with it."""
    file = load(path)
    q, k, _ = file.qkv
    biased = file.masking.bias is not None or file.masking.alibi_slopes is not None
    causal = _is_causal(file.masking)
    masked = not causal and (biased or file.masking.window is not None)
    return Captured(
        heads=q.shape[0] * q.shape[1],
        shape=(1, 1, q.shape[2], q.shape[3]),
        keys=k.shape[2],
        format=str(format_of(q.dtype)),
        causal=causal,
        masked=masked,
        told=causal or masked or file.scale is not None,
        layer=file.layer,
    )


def one_head(path: Path, head: int) -> tuple[Three, How]:
    """q, k and v of one head of one batch entry, in FP64, and how it was called unless that is just causal."""
    file = load(path)
    q, k, v = file.qkv
    heads = q.shape[0] * q.shape[1]
    if head >= heads:
        raise ValueError(f"{path} has {heads} heads; a seed picks one of them, got seed {head}. Use fewer seeds.")
    batch, own = divmod(head, q.shape[1])
    shared = own // (q.shape[1] // k.shape[1])
    one = (q[batch, own], k[batch, shared], v[batch, shared])
    bias = None if _is_causal(file.masking) else _bias(file.masking, batch, own)
    q, k, v = (x[None, None].double() for x in one)
    return (q, k, v), How(file.scale, bias)


def _is_causal(masking: Masking) -> bool:
    """Where the lengths differ, kernels do not agree on what causal means."""
    plain = masking.bias is None and masking.alibi_slopes is None
    return plain and masking.window == (None, 0) and masking.queries == masking.keys


def _bias(masking: Masking, batch: int, head: int) -> Tensor | None:
    """All that hides keys or is added to scores, as one tensor."""
    every = (slice(0, masking.queries), slice(0, masking.keys), torch.device("cpu"))
    bias = None if masking.bias is None else masking.bias[batch, head]
    if masking.alibi_slopes is not None:
        sloping = -masking.alibi_slopes[batch, head].double() * masking.distances(*every)
        if bias is not None and bias.dtype == torch.bool:
            bias = sloping.masked_fill(~bias, -torch.inf)
        else:
            bias = sloping if bias is None else sloping + bias.double()
    hidden = masking.hidden(*every)
    if hidden is not None:
        if bias is None or bias.dtype == torch.bool:
            bias = ~hidden if bias is None else bias & ~hidden
        else:
            bias = bias.masked_fill(hidden, -torch.inf)
    return None if bias is None else bias[None, None]
