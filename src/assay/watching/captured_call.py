"""A saved call read back with all that it had: also softcap and sinks, which plans have no step for."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from assay.cases.attention.checks import check_call, check_scale
from assay.watching.call import AttentionCall

SCORING = ("softcap", "sinks")
"""What changes the scores, or adds to them, beside a mask and a scale."""


def scoring(path: Path) -> tuple[str, ...]:
    """Which of these a file has; none where it cannot be read, which others say better."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            there = {*file.keys(), *(file.metadata() or {})}
    except (SafetensorError, OSError):
        return ()
    return tuple(name for name in SCORING if name in there)


def captured_call(path: Path) -> tuple[AttentionCall, str]:
    """The call, and the layer that made it ("" if the file does not say); a ValueError says what is wrong with it."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        notes = file.metadata() or {}
    try:
        return _call(tensors, notes), notes.get("layer", "")
    except ValueError as error:
        raise ValueError(f"{path} is not a call that can be made again: {error}") from None


def _call(tensors: dict[str, Tensor], notes: dict[str, str]) -> AttentionCall:
    missing = [name for name in ("q", "k", "v") if name not in tensors]
    if missing:
        raise ValueError(f"it must have tensors q, k and v; it has {', '.join(tensors) or 'none'}.")
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    bias, slopes, sinks = (tensors.get(name) for name in ("bias", "alibi_slopes", "sinks"))
    check_call(q, k, v, causal=False, window=None, bias=bias, alibi_slopes=slopes)
    if not all(bool(x.isfinite().all()) for x in (q, k, v)):
        raise ValueError("q, k and v must be finite, but there are NaN or infinities among them.")
    if sinks is not None and not _are_sinks(sinks, q.shape[1]):
        got = f"{sinks.dtype} {tuple(sinks.shape)}"
        raise ValueError(f"sinks must be one finite number for each of the {q.shape[1]} heads, got {got}.")
    softcap = _number(notes, "softcap")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a positive finite number, got {softcap}.")
    left, right = (None if side not in notes else _whole(notes, side) for side in ("left", "right"))
    return AttentionCall(
        q=q, k=k, v=v, scale=check_scale(_number(notes, "scale"), q.shape[-1]), left=left, right=right,
        bias=None if bias is None else bias[(None,) * (4 - bias.dim())], slopes=slopes, softcap=softcap, sinks=sinks,
    )  # fmt: skip


def _are_sinks(x: Tensor, heads: int) -> bool:
    return x.shape == (heads,) and x.dtype.is_floating_point and not bool((x.isnan() | (x == torch.inf)).any())


def _number(notes: dict[str, str], name: str) -> float | None:
    try:
        return float(notes[name]) if name in notes else None
    except ValueError:
        raise ValueError(f"{name} must be a number, got {notes[name]!r}.") from None


def _whole(notes: dict[str, str], name: str) -> int:
    try:
        return int(notes[name])
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {notes[name]!r}.") from None
