"""Walk two tensors side by side in bounded pieces, promoted to FP64.

Every figure of `metrics` is computed in FP64. A full FP64 copy of two large tensors would not fit
beside them, so the promotion happens one piece at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CPU_CHUNK = 2**15 - 1
"""Elements per piece on the CPU: in cache, and just under the size from which torch divides an operation
among threads. The operations are so short that on a busy machine waiting for the other threads would
cost many times more than they save (measured: 20 times)."""
DEVICE_CHUNK = 2**25
"""Elements per piece on an accelerator: large enough that launches and syncs cost nothing."""


def chunk_size(device: torch.device) -> int:
    """How many elements a piece on `device` holds."""
    return CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK


def check_float_tensor(where: str, name: str, value: object) -> Tensor:
    """`value` as a detached tensor, or a ValueError if it is not a non-empty real floating-point tensor."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{where}: {name} must be a torch tensor, got {type(value).__name__}. "
            "Turn a numpy array into one with torch.from_numpy(array)."
        )
    if not value.is_floating_point():
        raise ValueError(
            f"{where}: {name} must have a floating-point dtype, got {value.dtype}. Convert it with .double()."
        )
    if value.numel() == 0:
        raise ValueError(
            f"{where}: {name} must have at least one element, got shape {tuple(value.shape)}. "
            "Leave empty tensors out of the comparison."
        )
    return value.detach()


def check_same_device(where: str, a: Tensor, b: Tensor) -> None:
    """Raise a ValueError unless both tensors are on one device."""
    if a.device != b.device:
        raise ValueError(
            f"{where}: both tensors must be on one device, got {a.device} and {b.device}. "
            "Move one of them with .to(other.device)."
        )


def check_pair(where: str, actual: object, reference: object) -> tuple[Tensor, Tensor]:
    """Both as detached float tensors of one shape and one device, or a ValueError."""
    a = check_float_tensor(where, "actual", actual)
    r = check_float_tensor(where, "reference", reference)
    if a.shape != r.shape:
        raise ValueError(
            f"{where}: both tensors must have one shape, got {tuple(a.shape)} and {tuple(r.shape)}. "
            "Nothing is broadcast here; reshape or expand one of them."
        )
    check_same_device(where, a, r)
    return a, r


def double_pairs(a: Tensor, r: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors in row-major order as flat FP64 pieces of at most `chunk_size` elements."""
    for piece_a, piece_r in _pieces(a, r, chunk_size(a.device)):
        yield piece_a.double(), piece_r.double()


def _pieces(a: Tensor, r: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    if a.is_contiguous() and r.is_contiguous():
        yield from zip(_cut(a.view(-1), size), _cut(r.view(-1), size), strict=True)
    elif a.numel() <= size:
        yield a.reshape(-1), r.reshape(-1)
    else:
        # Other strides: cut along the first dimension, so that reshape copies one piece and never the whole.
        rows = max(1, size // math.prod(a.shape[1:]))
        for rows_a, rows_r in zip(_cut(a, rows), _cut(r, rows), strict=True):
            if rows == 1:
                yield from _pieces(rows_a[0], rows_r[0], size)
            else:
                yield rows_a.reshape(-1), rows_r.reshape(-1)


def _cut(x: Tensor, rows: int) -> Iterator[Tensor]:
    return (x[start : start + rows] for start in range(0, len(x), rows))


def nonfinite_pairs(a: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Two masks: where both are finite, and where they disagree about NaN or an infinity."""
    finite = a.isfinite() & r.isfinite()
    agree = (a == r) | (a.isnan() & r.isnan())
    return finite, ~finite & ~agree


def add_up(values: Sequence[float]) -> float:
    """The sum of `values`, rounded once; unlike math.fsum it may be infinite or NaN."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
