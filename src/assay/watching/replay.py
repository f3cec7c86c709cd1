"""A saved call that had softcap or sinks, made again by whoever on this machine can, and judged as the watch judges.

Ours takes both. A sink is the same as one more key: one of zeros, whose score is the sink and whose value is 0. So
plans and other kernels take it too, head by head. Softcap is a step of its own, which they do not have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from assay.cases.attention.kernels import OURS, Kernel, available_kernels, is_refusal
from assay.cases.attention.plan import Plan
from assay.cases.attention.plans import named_plan
from assay.cases.attention.tiled import tiled_attention
from assay.formats.dtypes import format_of
from assay.results.record import Record
from assay.watching.adjusting import adjusted
from assay.watching.call import AttentionCall
from assay.watching.ledger import Ledger
from assay.watching.others import OTHERS
from assay.watching.rows import Seen

Made = Callable[[AttentionCall], Tensor]
Head = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""q, k, v, a bias and the scale of one head → its output."""


class Replayed(NamedTuple):
    """What came of it."""

    call: AttentionCall
    rows: list[Record]
    """Those of a watch: `implementation` is who made the call."""
    cannot: dict[str, str]
    """Who cannot make it, and why."""


def replay(call: AttentionCall, layer: str, plans: Sequence[str], device: str, folder: Path | None) -> Replayed:
    """Make the call again on `device`, by every kernel and plan; rows go to `folder`."""
    names = ("q", "k", "v", "bias", "slopes", "sinks")
    moved = {name: x.to(device) for name in names if (x := getattr(call, name)) is not None}
    call, cannot = replace(call, **moved), {}
    ledger = Ledger("replay", "baseline", OTHERS["baseline"], True, folder, Counter())
    try:
        for number, (name, made) in enumerate(_everybody(call, plans, device)):
            if isinstance(made, str):
                cannot[name] = made
                continue
            try:
                with torch.no_grad():
                    out = made(call)
            except (RuntimeError, ValueError) as error:
                if isinstance(error, RuntimeError) and not is_refusal(error):
                    raise
                cannot[name] = "it does not take these inputs"
                continue
            ledger.output(Seen(layer=layer, step=0, call=number, implementation=name), call, out, False)
        ledger.settle()
    finally:
        ledger.close()
    return Replayed(call, list(ledger.rows), cannot)


def _everybody(call: AttentionCall, plans: Sequence[str], device: str) -> Iterator[tuple[str, Made | str]]:
    """By name: how each makes the call, or why it cannot."""
    no_softcap = "it has no softcap" if call.softcap is not None else None
    yield "assay.flash_attention", lambda call: OTHERS["flash"](call, None)[0]
    if device.startswith("cuda") and find_spec("flash_attn") is not None:
        other = "sinks" if call.sinks is not None else "mask or bias" if call.bias is not None else None
        yield "flash-attn", _flash_attn if other is None else f"it has no {other}"
    format = str(format_of(call.dtype))
    for kernel in available_kernels(torch.device(device)):
        if kernel not in OURS and kernel.name != "flash-attn" and format in kernel.formats:
            yield kernel.name, no_softcap or _by_heads(_of_kernel(kernel))
    for name in plans:
        plan = named_plan(name, format)
        made = _by_heads(_of_plan(plan)) if no_softcap is None else "plans have no step for softcap"
        yield f"plan {plan.name}", made


def _flash_attn(call: AttentionCall) -> Tensor:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    sides = tuple(-1 if side is None else side for side in (call.left, call.right))
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    out: Tensor = flash_attn_func(
        q, k, v, softmax_scale=call.scale, window_size=sides, softcap=call.softcap or 0.0, alibi_slopes=call.slopes
    )
    return out.transpose(1, 2)


def _of_kernel(kernel: Kernel) -> Head:
    def one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        return kernel.call(q, k, v, False, scale=scale, bias=bias.to(q.dtype))

    return one


def _of_plan(plan: Plan) -> Head:
    def one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        return tiled_attention(q, k, v, plan=plan, bias=bias, scale=scale)

    return one


def _by_heads(one: Head) -> Made:
    """One head of one batch entry at a time, with its sink as one more key: so much of a bias fits into memory."""

    def made(call: AttentionCall) -> Tensor:
        batch, heads = call.q.shape[:2]
        found = [[one(*_with_its_sink(call, b, h)) for h in range(heads)] for b in range(batch)]
        return torch.cat([torch.cat(each, 1) for each in found])

    return made


def _with_its_sink(call: AttentionCall, batch: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    b, h = slice(batch, batch + 1), slice(head, head + 1)
    shared = head // (call.q.shape[1] // call.k.shape[1])
    own = (call.q[b, h], call.k[b, shared : shared + 1], call.v[b, shared : shared + 1])
    slopes = None if call.slopes is None else call.slopes.expand(call.q.shape[0], -1)[b, h]
    bias = None if call.bias is None else call.bias.expand(*call.q.shape[:2], -1, -1)[b, h]
    part = replace(call, q=own[0], k=own[1], v=own[2], slopes=slopes, bias=bias, sinks=None, softcap=None)
    queries, keys = part.q.shape[2], part.k.shape[2]
    scores = torch.zeros(1, 1, queries, keys, dtype=torch.float64, device=part.q.device)
    added = adjusted(part, scores, slice(0, queries), slice(0, keys))
    assert call.sinks is not None
    sink = call.sinks[head].double().expand(1, 1, queries, 1)
    k, v = (torch.cat((x, x.new_zeros(1, 1, 1, x.shape[3])), 2) for x in (part.k, part.v))
    return part.q, k, v, torch.cat((added, sink), -1), call.scale
