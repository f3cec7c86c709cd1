"""The attention that a training is given, by name: what pairs of trainings most often differ in.

`standard` is attention as PyTorch computes it operation by operation, in the dtype of its inputs; `flash` is ours;
`sdpa` is torch's; "tiled PLAN FORMAT" rounds every step of tiled attention as that plan says, with a block if one is
named: "tiled uniform bf16", "tiled shipped,row_sum=bf16 bf16 32x64".
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from assay._suggest import did_you_mean
from assay.cases.attention.plans import named_plan
from assay.cases.attention.tiled import tiled_attention
from assay.flash.attention import flash_attention

Attention = Callable[..., Tensor]
"""`attention(q, k, v, causal=...)`, (B, H, N, D); K and V may have fewer heads."""


def standard(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """softmax(Q·Kᵀ/√D)·V, every result in the dtype of the inputs."""
    k, v = _repeated(q, k, v)
    scores = _product(q, k.mT) * q.shape[3] ** -0.5
    if causal:
        queries, keys = scores.shape[2:]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        scores = scores.masked_fill(~seen, -torch.inf)
    return _product(scores.softmax(-1), v)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b. Of FP16 on a CPU in FP32, rounded at the end: torch sums up in FP32 too, and takes far longer."""
    if a.dtype == torch.float16 and a.device.type == "cpu":
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """torch's, whatever backend it takes."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """`assay.flash_attention`."""
    return flash_attention(q, k, v, causal=causal)


_NAMED: dict[str, Attention] = {"standard": standard, "flash": flash, "sdpa": sdpa}
_TILED = re.compile(r"tiled (\S+) (\S+)(?: (\d+)x(\d+))?")


def find_attention(name: str) -> Attention:
    """The attention of that name."""
    if name in _NAMED:
        return _NAMED[name]
    tiled = _TILED.fullmatch(name)
    if tiled is None:
        hint = did_you_mean(name, _NAMED)
        raise ValueError(
            f"Unknown attention {name!r}. {hint}There are: {', '.join(_NAMED)}, and plans with an optional block, "
            "such as 'tiled uniform bf16' or 'tiled shipped bf16 32x64'."
        )
    family, format, rows, columns = tiled.groups()
    plan = named_plan(family, format)
    block = (int(rows), int(columns)) if rows else (64, 64)

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        k, v = _repeated(q, k, v)
        return tiled_attention(q, k, v, plan=plan, block=block, causal=causal)

    return attention


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A head of K and V for every head of Q."""
    group = q.shape[1] // k.shape[1]
    return (k, v) if group == 1 else (k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
