"""`flash_attention` on a GPU: every feature against the reference, and what only a GPU shows."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from assay import deviation, flash_attention, golden_attention
from assay.flash import hopper, replay
from tests.flash.cases import CASES, Case, Drawn, by_operator, check_against_plain, largest, theirs
from tests.flash.gpu_inputs import inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE = {
    f"{name}, D {dim}": replace(case, dims=(dim, dim), batch=1)
    for dim in (64, 128, 256)
    for name, case in {
        "ragged": Case(queries=300, keys=515),
        "causal": Case(queries=513, keys=513, causal=True),
        "causal, more queries": Case(queries=400, keys=130, causal=True),
        "gqa": Case(queries=257, keys=257, causal=True, heads=(8, 2)),
        "window": Case(queries=600, keys=600, window=(100, 0)),
        "window both": Case(queries=400, keys=500, window=(65, 40)),
        "few queries": Case(queries=5, keys=1500, causal=True, heads=(8, 2), sinks=True),
        "softcap": Case(queries=260, keys=260, causal=True, softcap=2.0),
        "alibi": Case(queries=260, keys=330, alibi=True),
        "alibi, causal": Case(queries=260, keys=330, alibi=True, causal=True, sinks=True),
        "sinks": Case(queries=260, keys=260, sinks=True, causal=True),
        "bias": Case(queries=130, keys=200, bias=(1, 1, 1, 1)),
        "bias, causal": Case(queries=130, keys=200, bias=(1, 1, 1, 1), causal=True),
        "packed": Case(packed=((200, 200), (0, 7), (77, 140), (1, 300), (130, 130)), causal=True),
        "packed, full": Case(packed=((200, 200), (0, 7), (77, 140), (1, 300), (130, 130))),
        "dropout": Case(queries=150, keys=150, dropout=0.3),
        "transposed": Case(queries=300, keys=300, transposed=True, causal=True),
    }.items()
} | {
    "dims 192 and 128": Case(queries=300, keys=300, dims=(192, 128), causal=True),
    "dims 64 and 128": Case(queries=300, keys=300, dims=(64, 128)),
    "dims 128 and 256": Case(queries=300, keys=300, dims=(128, 256)),
    "dims 256 and 64": Case(queries=300, keys=300, dims=(256, 64), causal=True),
    "dims 111 and 100, packed": Case(packed=((200, 200), (77, 140), (130, 130)), dims=(111, 100), causal=True),
}


@pytest.fixture(scope="module", autouse=True)
def added_up() -> Iterator[None]:
    """dQ of few keys, too, if not `deterministic`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "SHORT", dict.fromkeys(hopper.SHORT, 0))
        replay.forget()
        yield
    replay.forget()


def check(case: Case, dtype: torch.dtype, seed: int = 0, deterministic: bool = False, **scales: float) -> None:
    drawn = Drawn(case, dtype, seed).to("cuda")
    for name, factor in scales.items():
        setattr(drawn, name, getattr(drawn, name) * factor)
    check_against_plain(drawn, partial(by_operator, deterministic=deterministic))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_no_worse_than_plain(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["added up", "by rows"])
@pytest.mark.parametrize("name", LARGE)
def test_large_heads(name: str, dtype: torch.dtype, deterministic: bool) -> None:
    check(LARGE[name], dtype, deterministic=deterministic)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [59, 64, 111, 128, 256])
@pytest.mark.parametrize("lengths", [(1, 1), (239, 1), (799, 3), (113, 203), (1023, 1024), (4224, 4224)], ids=str)
def test_lengths(lengths: tuple[int, int], dim: int, causal: bool) -> None:
    queries, keys = lengths
    check(Case(batch=1, heads=(2, 1), queries=queries, keys=keys, dims=(dim, dim), causal=causal), torch.bfloat16)


@pytest.mark.parametrize("length", [1, 2, 5, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_values(length: int, dtype: torch.dtype) -> None:
    check(Case(queries=length, keys=length, dims=(64, 64), causal=True), dtype, q=5, k=3, v=3)


@settings(max_examples=30)
@given(
    lengths=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dims=st.sampled_from([(64, 64), (128, 128), (40, 24), (256, 256)]),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(st.none() | st.integers(0, 200), st.none() | st.integers(0, 200))),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 4.0]),
    seed=st.integers(0, 2**31),
)
def test_any_shape(lengths: tuple[int, int], seed: int, **how: Any) -> None:
    check(Case(batch=1, queries=lengths[0], keys=lengths[1], **how), torch.bfloat16, seed)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_any_scale(scale: float, dim: int) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(2, 200, dim))
    dout = torch.randn_like(q)
    mine = flash_attention(q, k, v, scale=scale, causal=True)
    mask = torch.ones(200, 200, device="cuda", dtype=torch.bool).tril()
    scores = (q.double() @ k.double().mT * scale).masked_fill(~mask, -torch.inf)
    truth = scores.softmax(-1) @ v.double()
    assert (mine - truth).abs().max() < 0.02
    found, expected = torch.autograd.grad(mine, (q, k, v), dout), torch.autograd.grad(truth, (q, k, v), dout.double())
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 0.02 * max(1.0, largest(b))


@contextmanager
def portable() -> Iterator[None]:
    """Our Triton kernels in place of the Hopper ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "DIMS", ())
        replay.forget()
        yield
    replay.forget()


@pytest.mark.parametrize(("heads", "length", "dim"), [(8, 777, 64), (8, 777, 128), (8, 777, 256), (128, 300, 64)])
def test_reruns_have_the_same_bits(heads: int, length: int, dim: int) -> None:
    """Also where heads fill the card, and each is one CTA's alone."""
    q, k, v = (x.requires_grad_() for x in inputs(heads, length, dim))
    dout = torch.randn_like(q)

    def run() -> list[torch.Tensor]:
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True, deterministic=True)
        return [out, lse, *torch.autograd.grad(out, (q, k, v), dout)]

    first = run()
    for _ in range(250):
        for a, b in zip(first, run(), strict=True):
            assert torch.equal(a, b)


def test_deterministic_algorithms_of_torch() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(2, 1024, 128))
    dout = torch.randn_like(q)
    asked = torch.autograd.grad(flash_attention(q, k, v, deterministic=True), (q, k, v), dout)
    torch.use_deterministic_algorithms(True)
    try:
        found = torch.autograd.grad(flash_attention(q, k, v), (q, k, v), dout)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(found, asked, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_calls_that_repeat_have_the_same_bits(name: str) -> None:
    """Launched again, on other memory, with other numbers: as if for the first time."""
    case = {**CASES, **LARGE}[name]
    first, second = (Drawn(case, torch.bfloat16, seed).to("cuda") for seed in (0, 1))
    for drawn in (first, first):
        by_operator(drawn, deterministic=True)
    again = by_operator(second, deterministic=True)
    replay.forget()
    for key, x in by_operator(second, deterministic=True).items():
        assert torch.equal(x, again[key]), key


def test_calls_that_repeat_are_launched_by_the_launcher_in_c() -> None:
    """All of their kernels: else Triton is built in another way, and calls take twice as long."""
    replay.forget()
    q, k, v = (x.requires_grad_() for x in inputs(2, 300, 128))
    for _ in range(3):
        out = flash_attention(q, k, v, causal=True)
        out.backward(torch.ones_like(out))
    assert [kept is not None and len(kept.launches) for kept in replay._KNOWN.values()] == [1, 3]


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_batch_invariance(dim: int) -> None:
    """A sequence alone, in a batch, and among others: the same bits, forward and backward."""
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v, dout = (torch.randn(5, 4, 300, dim, device="cuda", generator=generator).bfloat16() for _ in range(4))

    def run(*tensors: torch.Tensor, **how: Any) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = flash_attention(*leaves, causal=True, batch_invariant=True, **how)
        return [out, *torch.autograd.grad(out, leaves, tensors[3])]

    batched, alone = run(q, k, v, dout), run(*(x[2:3] for x in (q, k, v, dout)))
    for a, b in zip(batched, alone, strict=True):
        assert torch.equal(a[2:3], b)
    pieces = [x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v, dout)]
    starts = torch.arange(0, 1501, 300, device="cuda", dtype=torch.int32)
    among = run(*pieces, cu_seqlens_q=starts)
    fewer = run(*(x[:, :, 600:1200] for x in pieces), cu_seqlens_q=starts[:3])
    for a, b in zip(among, fewer, strict=True):
        assert torch.equal(a[:, :, 600:1200], b)


@pytest.mark.parametrize("name", [name for name in LARGE if "bias" not in name and "dropout" not in name])
def test_hopper_and_portable_agree(name: str) -> None:
    """Two kernels that share no code: they differ by roundings of the output only."""
    drawn = Drawn(LARGE[name], torch.bfloat16).to("cuda")
    mine = by_operator(drawn)
    with portable():
        other = by_operator(drawn)
    truth = theirs(drawn, torch.float64)
    for key in mine:
        finite = truth[key].isfinite()
        gap = (mine[key].double() - other[key].double())[finite].abs().max()
        assert gap <= 2 * 2**-8 * max(1.0, largest(truth[key]))


@pytest.mark.parametrize("name", [name for name in LARGE if "bias" not in name and "dropout" not in name])
def test_hopper_gradients_are_no_worse(name: str) -> None:
    """RMSE at most 1.05 of the portable kernels'; of a gradient that is 0, a few roundings of FP32."""
    drawn = Drawn(LARGE[name], torch.bfloat16).to("cuda")
    mine = by_operator(drawn)
    with portable():
        other = by_operator(drawn)
    truth = theirs(drawn, torch.float64)
    few = 4 * torch.finfo(torch.float32).eps * max(largest(truth[key]) for key in ("dq", "dk", "dv"))
    for key in ("dq", "dk", "dv"):
        assert deviation(mine[key], truth[key]).rmse <= 1.05 * deviation(other[key], truth[key]).rmse + few, key


def test_packed_lengths_that_change_in_place() -> None:
    q, k, v = inputs(2, 400, 128)
    cu = torch.tensor([0, 100, 400], device="cuda", dtype=torch.int32)
    for middle, seen in ((100, cu), (257, cu), (30, cu.data), (350, cu.data)):  # the data's changes nobody counts
        seen[1] = middle
        packed = flash_attention(q, k, v, cu_seqlens_q=cu)
        for first, last in ((0, middle), (middle, 400)):
            alone = flash_attention(*(x[:, :, first:last] for x in (q, k, v)))
            assert torch.equal(packed[:, :, first:last], alone)


def test_strides() -> None:
    """Slices of one packed tensor, (B, N, H, D), expanded heads, unaligned rows: read as they are, or copied."""
    qkv = torch.randn(2, 100, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    layouts = {
        "of qkv": [x.transpose(1, 2) for x in qkv.unbind(2)],
        "expanded": [qkv[:, :, i, :1].transpose(1, 2).expand(2, 4, 100, 64) for i in range(3)],
        "unaligned": [qkv[:, :, i, :, 3:62].transpose(1, 2) for i in range(3)],
        "last strided": [qkv[:, :, i, :, ::2].transpose(1, 2) for i in range(3)],
    }
    for name, tensors in layouts.items():
        leaves = [x.detach().requires_grad_() for x in tensors]
        dense = [x.detach().contiguous().requires_grad_() for x in tensors]
        results = []
        for each in (leaves, dense):
            out = flash_attention(*each, causal=True)
            results.append((out, *torch.autograd.grad(out.float().sum(), each)))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("times", [1, 3], ids=["new", "kept"])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_captured_graph(dim: int, times: int) -> None:
    """Of a call that is launched for the second time, or from what was kept of those before."""
    replay.forget()
    static = [x.requires_grad_() for x in inputs(4, 256, dim)]
    cu = torch.tensor([0, 100, 256], device="cuda", dtype=torch.int32)
    dout = torch.randn_like(static[0])

    def run() -> list[torch.Tensor]:
        dense = flash_attention(*static, causal=True)
        packed = flash_attention(*static, causal=True, cu_seqlens_q=cu)
        return [dense, packed, *torch.autograd.grad(dense + packed, static, dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for x, fresh in zip(static, inputs(4, 256, dim, seed=7), strict=True):
            x.copy_(fresh)
    graph.replay()
    for a, b in zip(captured, run(), strict=True):
        assert torch.equal(a, b)


def test_compiled_into_cuda_graphs() -> None:
    """In a process of its own, in which nothing of ours was allocated before."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.flash.reduced_overhead"],
        cwd=root, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_compile_without_breaks() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(4, 256, 64))
    slopes = torch.rand(4, device="cuda")

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = flash_attention(q * 2, k, v, causal=True, alibi_slopes=slopes, window=(50, 0), return_lse=True)
        return out.float().sin().sum() + lse.cos().sum()

    expected = torch.autograd.grad(step(q, k, v), (q, k, v))
    found = torch.autograd.grad(torch.compile(step, fullgraph=True)(q, k, v), (q, k, v))
    for a, b in zip(expected, found, strict=True):
        assert (a.float() - b.float()).abs().max() <= 2**-7 * max(1.0, largest(a.float()))


def test_opcheck() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(2, 64, 64))
    rest = (None, None, None, None, None, None, 0.1, None, 0, None, 0.0, False, False, False, "")
    torch.library.opcheck(torch.ops.assay.flash_forward.default, (q, k, v, *rest))


def test_autocast() -> None:
    q, k, v = inputs(2, 64, 64, torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = flash_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_fp32_is_fp32_unless_asked() -> None:
    q, k, v = inputs(2, 300, 64, torch.float32)
    truth = golden_attention(q, k, v)
    exact, short = (deviation(flash_attention(q, k, v, allow_tf32=tf32), truth).relative for tf32 in (False, True))
    assert exact < 2e-6 < 1e-5 < short < 2e-3


@pytest.mark.skipif(not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="torch has no registry")
def test_behind_sdpa() -> None:
    import assay.flash.provider  # noqa: F401

    # Two tiles of keys: the forward of one has FA2's own bits, and dQ of three the order in which they come.
    q, k, v = (x.requires_grad_() for x in inputs(16, 256, 64))
    dout = torch.randn_like(q)

    def run(call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        out = call()
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    def sdpa() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    before = run(sdpa)[0]
    torch.nn.attention.activate_flash_attention_impl("assay")
    try:
        inside = run(sdpa)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    for a, b in zip(inside, run(lambda: flash_attention(q, k, v, causal=True)), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(run(sdpa)[0], before)
    assert not torch.equal(before, inside[0])


def test_working_memory_is_linear() -> None:
    found = []
    for length in (4096, 16384):
        q, k, v = (x.requires_grad_() for x in inputs(1, length, 128))
        dout = torch.randn_like(q)
        torch.autograd.grad(flash_attention(q, k, v, causal=True), (q, k, v), dout)
        gc.collect()  # what other tests left would be freed in between
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(flash_attention(q, k, v, causal=True), (q, k, v), dout)
        found.append(torch.cuda.max_memory_allocated() - before)
        del q, k, v, dout
    assert found[1] <= 4.1 * found[0]
    assert found[1] < 16384**2  # half a matrix of scores in bf16


def test_nan_stays_in_its_row_and_sequence() -> None:
    for dim in (64, 128, 256):
        q, k, v = inputs(2, 300, dim)
        clean = flash_attention(q, k, v, causal=True)
        q[:, :, 70] = torch.nan
        out = flash_attention(q, k, v, causal=True)
        assert out[:, :, 70].isnan().all()
        out[:, :, 70] = clean[:, :, 70]
        assert torch.equal(out, clean)
        cu = torch.tensor([0, 130, 300], device="cuda", dtype=torch.int32)
        leaves = [x.requires_grad_() for x in inputs(2, 300, dim)]
        clean = flash_attention(*leaves, cu_seqlens_q=cu)
        expected = torch.autograd.grad(clean.float().square().sum(), leaves)
        with torch.no_grad():
            for x in leaves:
                x[:, :, 130:] = torch.nan
        out = flash_attention(*leaves, cu_seqlens_q=cu)
        found = torch.autograd.grad(out.float().square().sum(), leaves)
        assert torch.equal(out[:, :, :130], clean[:, :, :130])
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a[:, :, :130], b[:, :, :130])


def test_scores_beyond_fp16() -> None:
    """Q·Kᵀ of 1e6 would overflow fp16; in FP32 it is one key's row."""
    q = torch.full((1, 1, 40, 64), 128.0, device="cuda", dtype=torch.float16)
    k = q.clone()
    k[:, :, 1:] = -k[:, :, 1:]
    v = torch.randn_like(q)
    out = flash_attention(q, k, v, scale=1.0)
    assert torch.equal(out, v[:, :, :1].expand_as(out))


def test_dropout_is_the_same_on_both_devices() -> None:
    drawn = Drawn(Case(dropout=0.4, queries=100, keys=130, heads=(4, 2)), torch.float32)
    first, second = by_operator(drawn), by_operator(drawn.to("cuda"))
    for name, x in first.items():
        assert (x - second[name].cpu()).abs().max() <= 1e-5 * max(1.0, largest(x)), name


def test_double_backward_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(1, 40, 64))
    (grad,) = torch.autograd.grad(flash_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
