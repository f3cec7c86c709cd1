"""`flash_attention` and the drop-in beside SDPA on the CPU, in turns; the median of the rounds' ratios.

The order turns from round to round; a round of short calls is several of them. Run it as `bench_flash.py cpu` or by
itself, with words if only lines that have one of them are wanted. Exits with 1 if the goal is missed; lines in brackets
have no goal, as they say.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from assay import flash_attention, scaled_dot_product_attention

CPU_GOAL = 1.05
"""Time over SDPA's."""
HEADS = 4
Call = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One line of the table."""

    name: str
    length: int
    batch: int = 1
    causal: bool = True
    kv_heads: int = HEADS
    dims: tuple[int, int] = (64, 64)
    bias: str | None = None
    """A "mask", a "bias", or a "trained bias"."""
    dropout: float = 0.0
    queries: int | None = None
    """The last ones, if not as many as keys: SDPA is given the mask, which is none for one query."""
    window: int | None = None
    """Keys before the query's own that it sees: SDPA is given the mask."""
    ours: dict[str, Any] = field(default_factory=dict)
    """What only `flash_attention` takes."""


def shapes() -> Iterator[Shape]:
    for length in (64, 256, 1024, 4096):
        yield Shape(name="causal", length=length)
    yield Shape(name="full", length=1024, causal=False)
    yield Shape(name="GQA causal", length=1024, kv_heads=1)
    yield Shape(name="mask", length=1024, causal=False, bias="mask")
    for length in (256, 1024, 4096):
        yield Shape(name="64 queries, causal", length=length, queries=64)
    for length in (1024, 4096):
        yield Shape(name="one query, causal", length=length, queries=1)
    for length in (64, 128, 256, 512, 1024):
        yield Shape(name="window of 64", length=length, window=63)
    for length in (256, 1024):
        yield Shape(name="bias with gradient", length=length, causal=False, bias="trained bias")
        yield Shape(name="D 64, V 32", length=length, dims=(64, 32))
        yield Shape(name="D 128, V 64, full", length=length, dims=(128, 64), causal=False)
        yield Shape(name="dropout, full", length=length, causal=False, dropout=0.1)
    # Many heads of short sequences: in all, more scores than a cache holds.
    for batch, length, causal in ((2, 512, True), (8, 384, False), (4, 512, True), (16, 512, False), (4, 1024, True)):
        mask = "" if causal else ", full"
        yield Shape(name=f"D 128, V 64{mask} × {batch}", length=length, dims=(128, 64), causal=causal, batch=batch)
    for batch, length in ((16, 300), (4, 1024)):
        name = f"bias with gradient × {batch}"
        yield Shape(name=name, length=length, causal=False, bias="trained bias", batch=batch)
    for batch, length, causal in ((16, 512, False), (4, 1024, False), (4, 1024, True)):
        mask = "" if causal else ", full"
        yield Shape(name=f"dropout{mask} × {batch}", length=length, causal=causal, dropout=0.1, batch=batch)
    # Seeded, the mask is the one that CUDA makes, for which SDPA has no name.
    yield Shape(name="(seeded dropout)", length=1024, dropout=0.1, ours={"dropout_seed": 1})
    yield Shape(name="(seeded dropout, full)", length=1024, dropout=0.1, ours={"dropout_seed": 1}, causal=False)
    # Here the call from Python shows, whose two microseconds are no arithmetic.
    for length in (1, 8, 16):
        yield Shape(name="(short)", length=length)
    yield Shape(name="(one query, causal)", length=256, queries=1)


def bench_cpu(rounds: int, *words: str) -> bool:
    good = True
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("CPU, time over SDPA's: flash_attention, the drop-in (forward); flash_attention, the drop-in (and backward)")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in (each for each in shapes() if not words or any(word in each.name for word in words)):
            ratios = [ratio for backward in (False, True) for ratio in _ratios(shape, dtype, backward, rounds)]
            fine = max(ratios) <= CPU_GOAL or shape.name.startswith("(")
            good &= fine
            kind = str(dtype).removeprefix("torch.")
            figures = "; ".join(", ".join(f"{x:.3f}" for x in pair) for pair in (ratios[:2], ratios[2:]))
            print(f"{kind:8} N {shape.length:4} {shape.name:22}: {figures}{'' if fine else '  MISSED'}", flush=True)
    return good


def _ratios(shape: Shape, dtype: torch.dtype, backward: bool, rounds: int) -> list[float]:
    calls, leaves, dout = _calls(shape, dtype, backward)
    repeats = max(1, 2**18 // (shape.batch * shape.length * (shape.queries or shape.length)) // 4)
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for call, found in list(zip(calls, times, strict=True))[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            for _ in range(repeats):
                out = call()
                if backward:
                    torch.autograd.grad(out, leaves, dout)
            if turn:
                found.append(time.perf_counter() - start)
    return [statistics.median(a / b for a, b in zip(ours, times[2], strict=True)) for ours in times[:2]]


def _calls(shape: Shape, dtype: torch.dtype, backward: bool) -> tuple[list[Call], list[torch.Tensor], torch.Tensor]:
    dim, of_v = shape.dims
    sizes = ((HEADS, dim), (shape.kv_heads, dim), (shape.kv_heads, of_v))
    q, k, v = (torch.randn(shape.batch, n, shape.length, d, dtype=dtype, requires_grad=backward) for n, d in sizes)
    if shape.queries is not None:
        q = q.detach()[:, :, -shape.queries :].clone().requires_grad_(backward)
    leaves, square, bias = [q, k, v], (q.shape[2], shape.length), None
    if shape.bias == "mask":
        bias = torch.rand(square) < 0.9
    elif shape.bias is not None:
        bias = torch.randn(square, dtype=dtype, requires_grad=backward)
        leaves.append(bias)
    ours = {"causal": shape.causal, "bias": bias, "dropout_p": shape.dropout, **shape.ours}
    theirs: dict[str, Any] = {"is_causal": shape.causal, "attn_mask": bias, "dropout_p": shape.dropout}
    theirs["enable_gqa"] = shape.kv_heads != HEADS
    if shape.window is not None:
        ours["window"] = (shape.window, 0)
        theirs |= {"is_causal": False, "attn_mask": torch.ones(square, dtype=torch.bool).tril().triu(-shape.window)}
    if shape.queries is not None:
        mask = torch.ones(square, dtype=torch.bool).tril(shape.length - shape.queries)
        theirs |= {"is_causal": False, "attn_mask": None if shape.queries == 1 else mask}
    return (
        [
            lambda: flash_attention(q, k, v, **ours),
            lambda: scaled_dot_product_attention(q, k, v, **theirs),
            lambda: F.scaled_dot_product_attention(q, k, v, **theirs),
        ],
        leaves,
        torch.randn(shape.batch, HEADS, q.shape[2], of_v, dtype=dtype),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(0 if bench_cpu(21, *sys.argv[1:]) else 1)
