"""The CPU's own attention: online softmax over blocks, memory that grows with the length and not with its square.

Inside, everything is FP32 (FP64 for FP64 inputs), P and dS too: CUDA kernels round those to the dtype of V for the
tensor cores' sake, and a CPU gains nothing by it.
"""

from __future__ import annotations

import torch

from assay.flash.call import Call, Gradients
from assay.flash.cpu_tiles import Part, Scores, accumulator, cut, parts
from assay.flash.layout import empty_gradient, empty_output


def forward(call: Call, first_batch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the LSE. `first_batch` is what dropout counts the first batch as."""
    q = call.q
    out = empty_output(q, call.v.shape[-1])
    lse = q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))
    for part in parts(call, first_batch):
        for rows in part.row_blocks():
            block, sums = _row_block(part, rows)
            part.put_rows(out, rows, block)
            part.put_rows(lse[..., None], rows, sums)
    return out, lse


def backward(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    needs_bias: bool,
    first_batch: int = 0,
) -> Gradients:
    """The gradients, with P computed again from the LSE. That of the sinks is in the accumulator's dtype still."""
    dtype, sinks = accumulator(call.q.dtype), call.sinks
    dq, dk, dv = (empty_gradient(x) for x in (call.q, call.k, call.v))
    dbias = torch.zeros(call.bias.shape, dtype=dtype, device="cpu") if needs_bias and call.bias is not None else None
    by_row = call.q.new_empty(call.q.shape[:3], dtype=dtype) if sinks is not None else None
    for part in parts(call, first_batch):
        step = _Backward(part, dbias)
        for rows in part.row_blocks():
            delta = _delta(part, rows, out, dout, dlse)
            sums = part.of_rows(lse[..., None], rows)
            empty = sums == -torch.inf
            sums, delta = sums.masked_fill(empty, 0.0), delta.masked_fill_(empty, 0.0)
            part.put_rows(dq, rows, step.rows(rows, part.of_rows(dout, rows), sums, delta))
            if by_row is not None and sinks is not None:
                of_sink = (part.by_row(sinks, rows) - sums).exp_().mul_(delta).neg_()
                part.put_rows(by_row[..., None], rows, of_sink)
        part.put_keys(dk, step.dk)
        part.put_keys(dv, step.dv)
    return Gradients(
        dq,
        dk,
        dv,
        dbias.to(call.bias.dtype) if dbias is not None and call.bias is not None else None,
        None if by_row is None else by_row.sum((0, 2)),
    )


def undropped(dropout: float) -> float:
    """What the probabilities that dropout keeps are multiplied by."""
    return 1 / (1 - dropout) if dropout < 1 else 0.0


def _row_block(part: Part, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the LSE of a block of rows. The sink, if there is one, is the first key taken in."""
    call = part.call
    q = part.of_rows(call.q, rows) * call.scale
    out = q.new_zeros(*q.shape[:2], call.v.shape[-1])
    if call.sinks is None:
        top, total = q.new_full((*q.shape[:2], 1), -torch.inf), q.new_zeros(*q.shape[:2], 1)
    else:
        top = part.by_row(call.sinks, rows)
        total = (top > -torch.inf).to(top.dtype)
    for keys in part.key_blocks(rows):
        scores = part.scores(q, rows, keys)
        if scores is None:
            continue
        highest = torch.maximum(top, scores.s.amax(-1, keepdim=True))
        shift = _finite(highest)
        p, rescale = scores.s.sub_(shift).exp_(), (top - shift).exp_()
        total = total * rescale + p.sum(-1, keepdim=True)
        if call.dropout:
            p.mul_(part.kept(rows, keys))
        out = out.mul_(rescale).baddbmm_(p, scores.v)
        top = highest
    lse = _finite(top) + total.log()
    # A row that sees nothing has the sum 0: its output is 0, and its LSE the logarithm of 0.
    return out.mul_(undropped(call.dropout) / total.masked_fill(total == 0, 1.0)), lse


class _Backward:
    """Gradients of one part: those of K and V add up while blocks of rows go by."""

    def __init__(self, part: Part, dbias: torch.Tensor | None) -> None:
        self.part, self.call = part, part.call
        heads = part.sides[0] * part.sides[1]
        self.dk, self.dv = (
            torch.zeros(heads, part.keys, x.shape[-1], dtype=part.dtype, device="cpu")
            for x in (part.call.k, part.call.v)
        )
        self.dbias = None if dbias is None else part.grouped(dbias)

    def rows(self, rows: slice, dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Take in a block of rows, and return its dQ."""
        part = self.part
        q = part.of_rows(self.call.q, rows) * self.call.scale
        dq = torch.zeros_like(q)
        for keys in part.key_blocks(rows):
            scores = part.scores(q, rows, keys)
            if scores is None:
                continue
            ds = self._dscores(scores, rows, keys, dout, lse, delta)
            dq.baddbmm_(ds, scores.k)
            self.dk[:, keys].baddbmm_(ds.mT, q)
        return dq.mul_(self.call.scale)

    def _dscores(
        self, scores: Scores, rows: slice, keys: slice, dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor
    ) -> torch.Tensor:
        """dS of a block, before the cap; takes in its share of dV and of the bias's gradient."""
        call, part = self.call, self.part
        p, dp = scores.s.sub_(lse).exp_(), dout @ scores.v.mT
        if call.dropout:
            kept = part.kept(rows, keys).to(p.dtype).mul_(undropped(call.dropout))
            dp.mul_(kept)
            self.dv[:, keys].baddbmm_((p * kept).mT, dout)
        else:
            self.dv[:, keys].baddbmm_(p.mT, dout)
        ds = dp.sub_(delta).mul_(p)
        if self.dbias is not None:
            target = cut(self.dbias, rows, keys)
            target += ds.view(*part.sides, rows.stop - rows.start, -1).sum_to_size(target.shape)
        if scores.capped is not None:
            ds.addcmul_(ds, scores.capped.square_(), value=-1)
        return ds


def _delta(part: Part, rows: slice, out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """What the softmax's gradient subtracts from dP: the sum of dO ∘ O over a row, less the gradient of the LSE."""
    delta = (part.of_rows(dout, rows) * part.of_rows(out, rows)).sum(-1, keepdim=True)
    return delta if dlse is None else delta.sub_(part.of_rows(dlse[..., None], rows))


def _finite(top: torch.Tensor) -> torch.Tensor:
    """Maxima with 0 in place of −inf: a row that has seen nothing yet then gets P = 0 rather than NaN."""
    return top.masked_fill(top == -torch.inf, 0.0)
