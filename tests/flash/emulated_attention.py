"""Run the Hopper kernels on the emulator of tests/gluon, through the library's own host code, and hold them to FP64.

A program of its own, since it answers for CUDA: `emulated_attention SOURCES WHAT CASES`, where SOURCES is the folder
that holds the package. Case i of a kind is always the same one, inputs and interleaving.

The bounds count roundings. `u` is the largest relative error of one: 2⁻⁸ of bf16, 2⁻¹¹ of FP16, 2⁻²⁴ of FP32, 2⁻⁴ of
E4M3. Smaller numbers than the least normal one have the absolute error `least` of half their spacing.
- Output: P is rounded once, so u·P|V|, and the output once more.
- dV: P is rounded once, u·Pᵀ|dO|. dQ, dK: dS = P·(dO·Vᵀ − Σ O·dO) is rounded once, and its O was rounded when it was
  stored: 2u of the same sum of absolute values. All are rounded when they are stored.
- FP32: a score is a sum of D products, |error| ≤ (D + 8)·2⁻²⁴ of the sum of their absolute values, the 8 for what is
  done to it afterwards. P errs by as much in its numerator and its denominator. Other sums have D_v or `keys` terms.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch

from tests.flash.emulated_calls import (
    Random,
    described,
    loader_of,
    pretend_hopper,
    random_call,
    random_length,
    random_tensor,
    spoil,
)
from tests.flash.reference import LINE, reference_attention
from tests.gluon.errors import options, stats

CORNERS = ("blocks", "small", "zeros", "sizes", "below", "far")
"""Of calls in FP8: V's blocks each of its size; all P to be seen, some so small as E4M3's smallest; rows of Q that are
0; K's blocks each of its size; scores that are far below 0; scores of tens of thousands."""
Case = tuple[str, Callable[[], None]]
"""What it is, and a function that raises AssertionError where it is wrong."""
FORWARD_DIMS = [
    (64, 64),
    (64, 40),
    (128, 128),
    (256, 256),
    (100, 128),
    (128, 64),
    (192, 128),
    (64, 128),
    (256, 128),
    (200, 136),
    (100, 100),
]
BACKWARD_DIMS = [(64, 64), (128, 128), (128, 128), (100, 100), (120, 128), (64, 40), (256, 256)]
FP32 = 2.0**-24
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LEAST = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25}
"""bf16 has the exponents of FP32, whose exp2 gives 0 for what is below the least normal number."""


def close(name: str, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor | float) -> None:
    far = ~((got == want) | ((got.double() - want).abs() <= bound))
    assert not far.any(), f"{name}: {int(far.sum())} of {far.numel()} too far, at first {_first(far, got, want)}"


def _first(far: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> str:
    at = tuple(far.nonzero()[0].tolist())
    return f"{at}: {got[at].item()}, should be {want[at].item()}"


def truth(call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the call's options, in FP64."""
    return reference_attention(
        q,
        k,
        v,
        scale=call.scale,
        window=(call.left, call.right),
        softcap=call.softcap,
        alibi_slopes=call.slopes,
        sinks=call.sinks,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
    )


def score_error(call: Any, q: torch.Tensor, k: torch.Tensor) -> float:
    """The largest absolute error of a score that FP32 can make."""
    k = k.nan_to_num().repeat_interleave(q.shape[1] // k.shape[1], 1)
    largest = float((q.abs() @ k.abs().mT).max()) * abs(float(call.scale))
    if call.slopes is not None:
        largest += float(call.slopes.max()) * max(q.shape[2], k.shape[2])
    if call.sinks is not None:
        largest += float(call.sinks.nan_to_num(neginf=0.0).abs().max())
    return (q.shape[3] + 8) * FP32 * (largest + float(call.softcap or 0))


def by_query_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def without(x: torch.Tensor, starts: torch.Tensor | None, skipped: int | None) -> torch.Tensor:
    """A copy with zeros for a sequence that is not looked at."""
    x = x.clone()
    if skipped is not None and starts is not None:
        x[:, :, int(starts[skipped]) : int(starts[skipped + 1])] = 0
    return x


def forward(rng: Random, root: str) -> Case | None:
    loader = loader_of(root, int(rng.integers(1, 4)))
    launch = loader.load("assay.flash.launch")
    launch._few_queries = lambda call: False
    launch.hopper_forward.SHORT = int(rng.choice([0, 1024]))  # two or three consumers
    call = random_call(rng, launch.Call, FORWARD_DIMS[rng.integers(len(FORWARD_DIMS))])
    return forward_of(call, spoil(rng, call), launch)


def negative(rng: Random, root: str) -> Case | None:
    """Rows that have no positive score, but scores far apart, beside others; three consumers."""
    launch = loader_of(root, int(rng.integers(1, 4))).load("assay.flash.launch")
    launch._few_queries = lambda call: False
    call = random_call(rng, launch.Call, (64, 64))
    call = replace(call, left=None, right=None, scale=abs(call.scale))
    call.k.abs_().mul_(-1000)
    call.q[:, :, :: int(rng.integers(1, 5))].abs_()
    return forward_of(call, None, launch)


def leaning(rng: Random, root: str) -> Case | None:
    """ALiBi as a step of Q·Kᵀ: slopes and scales of all sizes, past what 16 bits hold; over keys ahead, too."""
    launch = loader_of(root, int(rng.integers(1, 4))).load("assay.flash.launch")
    launch._few_queries = lambda call: False
    call = leaning_call(rng, random_call(rng, launch.Call, FORWARD_DIMS[rng.integers(len(FORWARD_DIMS))]))
    assert launch.hopper.leans(call)
    right = (0, None, int(rng.integers(-100, 300)))[rng.integers(3)]
    return forward_of(replace(call, right=right), None, launch)


def leaning_call(rng: Random, call: Any) -> Any:
    """With slopes and a scale of any size."""
    sizes = 10.0 ** rng.uniform(-6, 6, (len(call.q) if call.cu_seqlens_q is None else call.sequences, call.q.shape[1]))
    scale = float(10.0 ** rng.uniform(-2, 0) * rng.choice([1, -1]))
    return replace(call, slopes=torch.tensor(sizes, dtype=torch.float32), scale=scale, right=0, softcap=None)


def consumers(rng: Random, root: str) -> Case | None:
    """Tiles of 128 rows and of 192, which packed calls have by the lengths of all their sequences: the same bits."""
    launch = loader_of(root, 2).load("assay.flash.launch")
    launch._few_queries = lambda call: False
    tiles = launch.hopper_forward
    call = random_call(rng, launch.Call, (64, 64))
    call = replace(call, right=0, slopes=None)
    if rng.random() < 0.7:
        slopes = torch.rand(call.sequences if call.packed else len(call.q), call.q.shape[1])
        call = replace(call, slopes=slopes, scale=0.1, softcap=None, right=int(rng.choice([0, 100])))

    def results(short: int) -> tuple[torch.Tensor, ...]:
        tiles.SHORT = short
        assert tiles.shape_of(call).consumers == (2 if short else 3)
        return tuple(launch.forward(call))

    def check() -> None:
        for name, one, other in zip(("out", "lse"), results(0), results(1 << 20), strict=True):
            assert torch.equal(one, other), f"{name}: other bits"

    return described(call), check


def forward_of(call: Any, skipped: int | None, launch: Any) -> Case | None:
    """Checks output and LSE, but of the sequence that is skipped."""

    def check() -> None:
        out, lse = (without(x, call.cu_seqlens_q, skipped) for x in launch.forward(call))
        q, k, v = (x.double() for x in (call.q, call.k, call.v))
        want, want_lse, spread = (
            without(x, call.cu_seqlens_q, skipped) for x in (*truth(call, q, k, v), truth(call, q, k, v.abs())[0])
        )
        u, least = ROUNDING[call.q.dtype], LEAST[call.q.dtype]
        error, keys = score_error(call, q, k), k.shape[2]
        relative = (1 + u) * (u + 2 * error + 2 * (keys + 8) * FP32)
        values = by_query_head(v.nan_to_num().abs().sum(2, keepdim=True), q)
        close("out", out, want, relative * spread + u * want.abs() + least * (1 + values))
        close("lse", lse, want_lse, error + (keys + 8) * FP32 + 2 * FP32 * want_lse.abs())

    return (f"{described(call)}, NaN in {skipped}", check) if launch.hopper.can(call) else None


def backward(rng: Random, root: str) -> Case | None:
    launch = backward_launch(rng, root)
    dims = BACKWARD_DIMS[rng.integers(len(BACKWARD_DIMS))]
    return backward_of(rng, random_call(rng, launch.Call, dims, 300, deterministic=bool(rng.random() < 0.3)), launch)


def leaning_backward(rng: Random, root: str) -> Case | None:
    """`leaning` of gradients."""
    launch = backward_launch(rng, root)
    dims = [(64, 64), (64, 40)][rng.integers(2)]
    call = leaning_call(rng, random_call(rng, launch.Call, dims, 300, deterministic=bool(rng.random() < 0.3)))
    assert launch.hopper.leans(call)
    return backward_of(rng, call, launch)


def backward_launch(rng: Random, root: str) -> Any:
    launch = loader_of(root, int(rng.integers(1, 4))).load("assay.flash.launch")
    launch.hopper.CACHED = int(rng.choice([0, 1 << 30]))  # heads share a CTA's time, or each has one alone
    launch.hopper.SHORT = {64: 0, 128: 0}  # dQ is added up, also of few keys
    return launch


def backward_of(rng: Random, call: Any, launch: Any) -> Case | None:
    """Checks the gradients, but of a sequence that is spoilt."""
    if not launch.hopper.can(call):
        return None  # only Triton's own kernels would run
    batch, heads, queries = call.q.shape[:3]
    dout = random_tensor(rng, batch, heads, queries, call.v.shape[3], call.q.dtype)
    dlse = torch.randn(call.q.shape[:3]) if rng.random() < 0.3 else None
    skipped = spoil(rng, call)

    def check() -> None:
        inputs = [x.double().requires_grad_() for x in (call.q, call.k, call.v)]
        out, lse = truth(call, *inputs)
        slopes = dout.double(), torch.zeros_like(lse) if dlse is None else dlse.double()
        wants = torch.autograd.grad((out, lse), inputs, slopes)
        out, lse = out.detach(), lse.detach()
        given = call, out.to(call.q.dtype), lse.float(), dout, dlse, False
        got = launch.backward(*given)
        if call.deterministic:  # another interleaving
            again = launch.backward(*given)
            for mine, other in zip((got.q, got.k, got.v), (again.q, again.k, again.v), strict=True):
                assert torch.equal(mine.nan_to_num(), other.nan_to_num()), "other bits"
        bounds = gradient_bounds(call, out, lse, *slopes)
        u = ROUNDING[call.q.dtype]
        for name, mine, want, bound in zip("qkv", (got.q, got.k, got.v), wants, bounds, strict=True):
            starts = call.cu_seqlens_q if name == "q" else call.cu_seqlens_k
            mine, want, bound = (without(x, starts, skipped) for x in (mine, want, bound))
            close(f"d{name}", mine, want, bound + u * want.abs())

    return f"{described(call)}, dlse {dlse is not None}, NaN in {skipped}", check


def gradient_bounds(
    call: Any, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the errors of dQ, dK and dV before they are stored."""
    q, k, v = (x.double() for x in (call.q, call.k, call.v))
    u, least, keys, queries = ROUNDING[call.q.dtype], LEAST[call.q.dtype], k.shape[2], q.shape[2]
    p = truth(call, q, k, torch.eye(keys, dtype=torch.float64).expand(*k.shape[:2], keys, keys))[0].nan_to_num()
    heads_k, heads_v = (by_query_head(x.nan_to_num().abs(), q) for x in (k, v))
    delta = (out.nan_to_num() * dout).abs().sum(3, keepdim=True) + dlse.abs()[..., None]
    ds = p * (dout.abs() @ heads_v.mT + delta)
    largest_lse = float(lse.nan_to_num(neginf=0).abs().max())
    single = 2 * score_error(call, q, k) + (2 * largest_lse + keys + call.q.shape[1] * queries + v.shape[3] + 16) * FP32
    scale, small = abs(call.scale), least * max(1, abs(call.scale))

    def of_heads(x: torch.Tensor) -> torch.Tensor:
        parts: torch.Tensor = x.unflatten(1, (k.shape[1], -1))
        return parts.sum(2)

    twice, once = (1 + u) * (2 * u + single), (1 + u) * (u + single)
    dq = twice * scale * (ds @ heads_k) + small * (1 + heads_k.sum(2, keepdim=True))
    dk = twice * scale * (ds.mT @ q.abs()) + small * (1 + q.abs().sum(2, keepdim=True))
    dv = once * (p.mT @ dout.abs()) + least * (1 + dout.abs().sum(2, keepdim=True))
    return dq, of_heads(dk), of_heads(dv)


def fp8_corners(rng: Random, root: str) -> Case:
    return fp8(rng, root, CORNERS[rng.integers(len(CORNERS))])


def fp8(rng: Random, root: str, corner: str = "") -> Case:
    """P is the bits of its logarithm (see `LINE`), in E4M3 of at most 13/8 · 2⁸, least spacing 2⁻⁹; scores are FP16."""
    loader = loader_of(root, int(rng.integers(1, 4)))
    launch, quantisation, call_type = (loader.load(f"assay.flash.{x}") for x in ("fp8_launch", "fp8", "call"))
    dim, most = int(rng.choice([64, 128, 256, 100])), 400
    kv_heads, group, batch = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    queries = random_length(rng, most)
    keys = queries if rng.random() < 0.5 else random_length(rng, most)
    dtype = (torch.bfloat16, torch.float16)[rng.integers(2)]
    kind = ("full", "causal", "window", "left")[rng.integers(4)]
    if corner:
        dim, keys = 128, 384 if corner == "small" else most
        kind = "causal" if corner in ("zeros", "below", "far") else "full"
        queries = 300 if corner == "below" else queries
    call = call_type.Call(
        q=random_tensor(rng, batch, kv_heads * group, queries, dim, dtype),
        k=random_tensor(rng, batch, kv_heads, keys, dim, dtype),
        v=values_of(rng, random_tensor(rng, batch, kv_heads, keys, dim, dtype), corner),
        scale=float(dim**-0.5 * {"small": 4, "below": 4, "far": 4000}.get(corner, rng.choice([1, 1, -1, 2]))),
        left=int(rng.choice([0, 50, 128, 200])) if kind in ("window", "left") else None,
        right=0 if kind == "causal" else int(rng.choice([0, 1, 30])) if kind == "window" else None,
        softcap=30.0 if rng.random() < 0.2 and not corner else None,
        sinks=torch.randn(kv_heads * group) if rng.random() < 0.25 else None,
    )
    make_unusual(call, corner, rng)
    if call.sinks is not None and rng.random() < 0.5:
        call.sinks[0] = -math.inf
    how = quantisation.FP8(
        two_level=bool(rng.random() < 0.5),
        rotate=bool(rng.random() < 0.3) and corner not in ("small", "far"),
        scaling="block" if corner else str(rng.choice(["block", "head", "tensor"])),
        format="e4m3" if corner else str(rng.choice(["e4m3", "e4m3", "e5m2"])),
    )
    bits = 3 if how.format == "e4m3" else 2

    off = torch.zeros(batch, kv_heads, quantisation.room(dim))
    if not how.two_level:
        off = launch.centres(call.v)

    def quantized(x: torch.Tensor, rotate: bool) -> Any:
        """In plain torch. Rotated by the kernel: a sum in another order may round to another 8-bit number."""
        rows = x is not call.v
        if rotate:
            return launch.quantize(x, None, how, True, rows)
        return quantisation._quantize_plainly(x, None if rows or how.two_level else off, how, False, rows)

    def check() -> None:
        for x in (call.q, call.k) if how.rotate else ():
            got, plain = (
                quantized(x, True).dequantized(),
                quantisation._quantize_plainly(x, None, how, True, True).dequantized(),
            )
            close("rotated", got, plain, plain.abs() / 2**bits + 2.0**-9 * plain.abs().max())  # to the next number
        asked = call.q, call.k, call.v, call.sinks, call.scale, call.left, call.right, call.softcap
        out, lse = launch.forward(*asked, how)
        q, k = (quantized(x, how.rotate).dequantized().double() for x in (call.q, call.k))
        v = quantized(call.v, False).dequantized().double()[..., :dim]
        added = quantisation.by_rows(off, keys)[..., :dim]
        want, want_lse = truth(call, q, k, v + added)
        alike = call.sinks is None and (keys <= 128 or how.two_level)
        sized = v.abs() if alike else v.abs() + off[:, :, None, :dim].abs()
        spread = truth(call, q, k, sized)[0]  # what is wrong with P is multiplied with, and with a sink with its share
        lengths = float(q.norm(dim=3).max() * k.norm(dim=3).max()) * abs(float(call.scale))
        sums = 0 if corner == "small" else dim / 32 + 2  # of 32 products in FP16, and the cap
        half = (sums + 3) * 2.0**-11 * max(lengths, call.softcap or 0)  # the slope, and a difference of two
        if corner == "far":  # whole numbers; two that differ, differ by more than P can or by next to nothing
            half = 2.0**-11
        error, u = score_error(call, q, k) + half, ROUNDING[dtype]
        exact, single = 2 * error + 2 * (keys + 8) * FP32, 8 * FP32
        low, high = LINE[0] * math.exp(-exact), LINE[1] * math.exp(exact)
        largest = torch.ones(())  # of the probabilities, at most
        if corner == "small":
            each = torch.eye(keys, dtype=torch.float64).expand(batch, kv_heads, -1, -1)
            largest = truth(call, q, k, each)[0].amax(3, keepdim=True)
        little = 1.25 * 2.0**-17 / low * largest  # for each key
        lost = little * (by_query_head(v.abs().sum(2, keepdim=True), q) + keys * spread)
        close(
            "out",
            out,
            want,
            (1 + u) * ((high / low - 1 + single) * spread + lost) + (u + single) * want.abs() + LEAST[dtype],
        )
        close("lse", lse, want_lse, error - math.log(low) + 1.25 * 2.0**-17 * keys + 2 * FP32 * want_lse.abs())
        if corner in ("small", "zeros", "sizes", "far"):  # many scores are alike, modulo a step of P
            return
        seen = want_lse > -math.inf
        mean = float((lse.double() - want_lse)[seen].mean()) if seen.any() else 0.0
        slope = 2.0**-11 * float(want_lse[seen].abs().max()) if seen.any() else 0.0  # which is an FP16 number
        most = 0.004 + slope + 0.2 / max(1, int(seen.sum())) ** 0.5
        assert abs(mean) <= most, f"the lse is {mean} too large in the mean"

    return f"{described(call)}, {how}", check


def make_unusual(call: Any, corner: str, rng: Random) -> None:
    if corner in ("small", "far"):  # sums of ±1, which are exact in FP16
        call.q.sign_()
        call.k.sign_()
        if corner == "far":
            call.k.mul_(torch.where(sizes_of_blocks(rng, call.k) < 1, 2.0**-20, 1.0))
    elif corner == "zeros":
        call.q[:, :, :128] = 0
    elif corner == "sizes":
        call.k.mul_(sizes_of_blocks(rng, call.k) / 64)
    elif corner == "below":  # and of the first keys that they go over some rows see none
        call.q.abs_().add_(1)
        call.k.abs_().add_(1).neg_()


def values_of(rng: Random, v: torch.Tensor, corner: str) -> torch.Tensor:
    """Of V's blocks one larger than the other; or what tells the first block's probabilities, and has the centre 0."""
    keys, dim = v.shape[2:]
    if corner == "small":
        return torch.eye(keys, dim, dtype=v.dtype).expand_as(v).contiguous()
    if rng.random() < 0.5:  # far from 0, in every dimension otherwise
        v = v + 5 * torch.randn(dim).to(v.dtype)
    return v * sizes_of_blocks(rng, v)


def sizes_of_blocks(rng: Random, x: torch.Tensor) -> torch.Tensor:
    sizes = torch.exp2(torch.from_numpy(rng.integers(-6, 7, x.shape[2] // 128 + 1)).to(x.dtype))
    return sizes.repeat_interleave(128)[: x.shape[2], None]


KINDS: dict[str, Callable[[Random, str], Case | None]] = {
    "forward": forward,
    "negative": negative,
    "leaning": leaning,
    "consumers": consumers,
    "backward": backward,
    "leaning_backward": leaning_backward,
    "fp8": fp8,
    "fp8_corners": fp8_corners,
}


def main(root: str, kind: str, cases: int) -> None:
    """So many cases; ends at the first that fails. Prints how much that was."""
    torch.set_num_threads(1)
    pretend_hopper()
    done = 0
    for number in count():
        if done == cases:
            break
        options.seed = number * 101
        torch.manual_seed(number)
        case = KINDS[kind](np.random.default_rng([number]), root)
        if case is None:  # the Hopper kernels do not take it
            continue
        try:
            case[1]()
        except Exception as error:
            error.add_note(f"{kind}, case {number}: {case[0]}")
            raise
        done += 1
    print(f"{done} cases")
    assert stats["launches"] >= cases


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
