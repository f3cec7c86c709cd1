"""Random inputs, in more sets than the cache holds: a model does not find its activations in the cache either."""

from __future__ import annotations

from itertools import cycle

import torch

from assay.bench.contenders import Contender
from assay.bench.shapes import Pass, Shape
from assay.bench.timing import Work

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Q, K, V and the gradient of the output."""

_CPU_CACHE = 32 * 2**20
"""Of a CPU, where nothing tells: about what one job finds free for itself."""
_MOST_SETS = 64


def sets_needed(shape: Shape, itemsize: int, cache: int) -> int:
    """Sets such that between two uses of one, at least a whole cache of others is read."""
    one = shape.input_elements * itemsize
    return min(_MOST_SETS, 1 + max(1, -(-cache // one)))


def cache_bytes(device: torch.device) -> int:
    """The last cache before memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _CPU_CACHE


def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Inputs]:
    """N(0, 1), never zeros: a chip that multiplies zeros draws less power and runs faster."""
    generator = torch.Generator(device).manual_seed(0)
    outer = (shape.batch, shape.heads, shape.queries, shape.dim)
    inner = (shape.batch, shape.kv_heads, shape.keys, shape.dim)

    def one(size: tuple[int, ...], leaf: bool) -> torch.Tensor:
        drawn = torch.randn(size, dtype=dtype, device=device, generator=generator)
        return drawn.requires_grad_(leaf)

    count = sets_needed(shape, dtype.itemsize, cache_bytes(device))
    return [(one(outer, True), one(inner, True), one(inner, True), one(outer, False)) for _ in range(count)]


def work_on(contender: Contender, which: Pass, causal: bool, sets: list[Inputs]) -> Work:
    """A call of the contender that takes the next set of inputs each time."""
    turn = cycle(sets)

    def forward() -> None:
        q, k, v, _ = next(turn)
        with torch.no_grad():
            contender.run(q, k, v, causal)

    def both() -> None:
        q, k, v, gradient = next(turn)
        torch.autograd.grad(contender.run(q, k, v, causal), (q, k, v), gradient)

    return forward if which == "forward" else both
