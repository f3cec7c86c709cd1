"""The CPU path against the reference, feature by feature, by PyTorch's kernel and by our own blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from assay import flash_attention
from assay.flash import cpu, cpu_aten, cpu_tiles
from assay.flash.call import Call
from assay.flash.cpu_dropout import Dropout, philox

from .cases import CASES, WHOLE, Case, Drawn, check_against_plain, error, largest, ours, theirs
from .inputs import draw

SHORT = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["natural", "own", "own, small blocks", "by members"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """PyTorch's kernel where it takes the call; our own blocks always; the same with several blocks everywhere; the
    members of a batch one by one.
    """
    if request.param == "by members":
        whole = Drawn.call
        monkeypatch.setattr(Drawn, "call", lambda drawn: replace(whole(drawn), batch_invariant=True))
    elif request.param != "natural":
        monkeypatch.setattr(cpu_aten, "takes", lambda call: False)
    if request.param == "own, small blocks":
        small_blocks(monkeypatch)
    return str(request.param)


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS", 16), ("KEYS", 24), ("SCORES", 1 << 10)):
        monkeypatch.setattr(cpu_tiles, name, value)


def check_fp64(drawn: Drawn) -> None:
    """A sum of n products is off by at most n·eps of the sum of their sizes; 64 is room for those sizes."""
    case, truth = drawn.case, theirs(drawn, torch.float64)
    longest = case.dims[0] + drawn.k.shape[2] + drawn.q.shape[2] * drawn.q.shape[1] * drawn.batch
    for name, x in ours(drawn).items():
        bound = 64 * longest * torch.finfo(torch.float64).eps * max(1.0, largest(truth[name]))
        assert error(x, truth[name]) <= bound, name


@pytest.mark.parametrize("name", CASES)
def test_fp64(name: str, path: str) -> None:
    check_fp64(Drawn(CASES[name], torch.float64))


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("own", [False, True], ids=["natural", "own"])
def test_no_worse_than_plain(name: str, dtype: torch.dtype, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if own:
        monkeypatch.setattr(cpu_aten, "takes", lambda call: False)
        small_blocks(monkeypatch)
    check_against_plain(Drawn(CASES[name], dtype))


@pytest.mark.parametrize("heads", [(1, 1), (16, 1)], ids=["one head", "mqa"])
@pytest.mark.parametrize("causal", [False, True])
def test_bf16_gradients_of_long_sums(heads: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch sums dK up in bf16, over query blocks and heads; in slices of rows ours must not lose by it."""
    monkeypatch.setattr(cpu_aten, "ROWS", 256)
    case = Case(batch=1, heads=heads, queries=800, keys=800 if causal else 96, causal=causal)
    check_against_plain(Drawn(case, torch.bfloat16))
    masked = replace(case, heads=(2, 2), mask=(0, 0, 1, 1))
    check_against_plain(Drawn(masked, torch.bfloat16))
    monkeypatch.setattr(cpu_aten, "KEYS", 100)
    check_against_plain(Drawn(replace(case, queries=800, keys=800), torch.bfloat16))
    check_against_plain(Drawn(masked, torch.bfloat16))


def test_bf16_dq_of_many_keys() -> None:
    """PyTorch sums dQ up in bf16 over blocks of keys; ours errs at most three times as much as torch's operators."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=generator).bfloat16() for n in (16, 65536, 65536))
    dout = torch.randn(1, 1, 16, 64, generator=generator).bfloat16()

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT * 0.125, -1) @ v

    def dq(call: Callable[..., torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        leaf = q.to(dtype).requires_grad_()
        out = call(leaf, k.to(dtype).requires_grad_(), v.to(dtype))
        return torch.autograd.grad(out, leaf, dout.to(dtype))[0].double()

    truth = dq(plain, torch.float64)
    theirs, ours = ((dq(call, torch.bfloat16) - truth).abs().max() for call in (plain, flash_attention))
    assert ours <= 3 * theirs


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("dims", [(24, 16), (16, 24)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(causal=True),
        Case(heads=(4, 2), queries=50),
        Case(mask=WHOLE),
        Case(bias=WHOLE),
        Case(transposed=True),
        Case(strided=True, heads=(4, 1), causal=True),
        Case(packed=((20, 30), (40, 30)), causal=True),
    ],
    ids=["causal", "grouped", "mask", "bias", "transposed", "strided", "packed"],
)
def test_two_head_dimensions_made_one(
    case: Case, dims: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By zeros, where there are many scores: PyTorch's kernel takes one head dimension."""
    monkeypatch.setattr(cpu_aten, "PADDED_SCORES", 0)
    monkeypatch.setattr(cpu_aten, "ROWS", 32)
    drawn = Drawn(replace(case, dims=dims), dtype)
    if case.packed is None:
        assert cpu_aten.takes(drawn.call()) == (dtype == torch.bfloat16 or dims == (24, 16))
    check_against_plain(drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(24, 16), (16, 24)], ids=str)
def test_heads_that_are_last_in_memory(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """torch's `pad` keeps that order, and torch's kernel does not look at the last stride. 760² scores: many."""
    drawn = (draw(1, 760, dim, 2, seed=seed) for seed, dim in enumerate((dims[0], *dims)))
    q, k, v = (x.to(dtype).permute(0, 3, 1, 2).requires_grad_() for x in drawn)
    results = []
    for leaves in ((q, k, v), [x.detach().contiguous().requires_grad_() for x in (q, k, v)]):
        out = flash_attention(*leaves, return_lse=True)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("seed", range(30))
def test_batch_invariance(seed: int) -> None:
    """A member has the bits that it has alone, or in another batch, wherever it lies in memory. On two threads."""
    rng = np.random.default_rng(seed)
    dtype = SHORT[rng.integers(3)]
    heads = int(rng.choice([1, 2, 4]))
    queries, keys = int(rng.choice([1, 2, 5, 33])), int(rng.choice([5, 16, 40, 130, 300]))
    dims = ((16, 16), (24, 16), (64, 64), (48, 64))[rng.integers(4)]
    bias = torch.randn(1, heads, queries, keys).to(dtype)
    hows: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (20, 20)}, {"bias": bias}, {"softcap": 9.0}]
    how = hows[rng.integers(5)]
    sizes = ((heads, queries, dims[0]), (1, keys, dims[0]), (1, keys, dims[1]))
    drawn = [torch.randn(5, *size, generator=torch.Generator().manual_seed(seed)).to(dtype) for size in sizes]

    def run(members: list[int], shifted: bool) -> list[torch.Tensor]:
        leaves = []
        for x in (each[members] for each in drawn):
            room = x.new_empty(x.numel() + 1)[1:] if shifted else x.new_empty(x.numel())
            leaves.append(room.view(x.shape).copy_(x).requires_grad_())
        out = flash_attention(*leaves, batch_invariant=True, **how)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole, some, alone = run([0, 1, 2, 3, 4], False), run([4, 2], True), run([2], True)
    finally:
        torch.set_num_threads(threads)
    for x, y, z in zip(whole, some, alone, strict=True):
        assert torch.equal(x[2], y[1])
        assert torch.equal(x[2], z[0])


@pytest.mark.parametrize(("queries", "keys"), [(0, 9), (9, 0), (0, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_empty(queries: int, keys: int, sinks: bool) -> None:
    drawn = Drawn(Case(queries=queries, keys=keys, sinks=sinks, heads=(4, 2)), torch.float32)
    results = ours(drawn)
    assert not results["out"].any()
    expected = drawn.sinks[:, None].expand(2, 4, queries) if drawn.sinks is not None else -torch.inf
    assert (results["lse"] == expected).all()
    for name in ("dq", "dk", "dv"):
        assert not results[name].any()


def test_empty_batch() -> None:
    results = ours(Drawn(Case(batch=0), torch.float32))
    assert results["out"].shape == (0, 4, 70, 16)


def test_a_bias_of_minus_infinity_hides(path: str) -> None:
    drawn = Drawn(Case(bias=WHOLE), torch.float64)
    assert drawn.bias is not None
    drawn.bias[:, 1, 3] = -torch.inf
    drawn.bias[..., 50:] = -torch.inf
    check_fp64(drawn)
    assert ours(drawn)["lse"][0, 1, 3] == -torch.inf


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_layout_of_the_bias(layout: str, path: str) -> None:
    """Read by its strides, whatever they are: without a gradient it goes to PyTorch's kernel."""
    drawn = Drawn(Case(keys=50), torch.float32)
    bias = torch.randn(2, 4, 50, 70).mT if layout == "transposed" else torch.randn(70, 50).expand(2, 4, 70, 50)
    given, dense = (replace(drawn.call(), bias=x) for x in (bias, bias.contiguous()))
    for x, y in zip(cpu.forward(given), cpu.forward(dense), strict=True):
        assert torch.equal(x, y)
    out, lse = cpu.forward(given)
    first, second = (cpu.backward(call, out, lse, drawn.dout, None) for call in (given, dense))
    for a, b in zip(first[:3], second[:3], strict=True):
        assert torch.equal(a, b)
    drawn.bias = bias
    truth = theirs(drawn, torch.float64)
    assert error(out, truth["out"]) < 1e-5
    assert error(first.q, truth["dq"]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_stays_where_it_is_seen(dtype: torch.dtype, path: str) -> None:
    drawn = Drawn(Case(mask=WHOLE, heads=(4, 2)), dtype)
    clean = ours(drawn)
    drawn.k[:, :, 2], drawn.v[:, :, 3] = torch.nan, torch.nan  # keys that nobody sees
    for name, x in ours(drawn).items():
        assert torch.equal(x, clean[name]), name
    drawn.q[1, 2, 10] = torch.nan
    out, lse = cpu.forward(drawn.call())
    assert out[1, 2, 10].isnan().all()
    out[1, 2, 10], lse[1, 2, 10] = clean["out"][1, 2, 10], clean["lse"][1, 2, 10]
    assert torch.equal(out, clean["out"])
    assert torch.equal(lse, clean["lse"])


def test_nan_stays_in_its_sequence(path: str) -> None:
    drawn = Drawn(Case(packed=((20, 30), (40, 30)), causal=True), torch.float32)
    clean = ours(drawn)
    drawn.k[:, :, :30], drawn.v[:, :, :30] = torch.nan, torch.nan
    for name, x in ours(drawn).items():
        own = slice(30, None) if name in ("dk", "dv") else slice(20, None)
        assert torch.equal(x[:, :, own], clean[name][:, :, own]), name


@pytest.mark.parametrize("case", [Case(mask=WHOLE, heads=(4, 2)), Case(softcap=2.0)], ids=["natural", "own"])
def test_autocast_changes_nothing(case: Case) -> None:
    drawn = Drawn(case, torch.float32)
    expected = ours(drawn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name, x in ours(drawn).items():
            assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("case", [Case(), Case(softcap=2.0), Case(packed=((30, 30), (17, 40)))], ids=str)
def test_inputs_are_left_alone(case: Case) -> None:
    """Blocks are worked on in place: never those that are views of what was given."""
    drawn = Drawn(replace(case, sinks=case.softcap is not None), torch.float32)
    call = drawn.call()
    out, lse = cpu.forward(call)
    tensors = [x for x in (call.q, call.k, call.v, call.sinks, out, lse, drawn.dout) if x is not None]
    before = [x.clone() for x in tensors]
    cpu.backward(call, out, lse, drawn.dout, None)
    cpu.forward(call)
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x, y)


KNOWN = [
    ((0,) * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    """The vectors that Random123 publishes."""
    a, b, c, d = (torch.tensor([word]) for word in counter)
    assert " ".join(f"{int(word):08x}" for word in philox((a, b, c, d), key)) == words


def test_dropout_counts_key_row_head() -> None:
    seed, heads = torch.tensor(-(2**50) + 77), torch.tensor([[3, 4], [9, 10]])
    mask = Dropout(seed, 0.4).kept(heads, torch.arange(5, 12), torch.arange(100, 120))
    assert mask.shape == (2, 2, 7, 20)
    key = (int(seed) & 0xFFFFFFFF, int(seed) >> 32 & 0xFFFFFFFF)
    for b, h, i, j in ((0, 0, 0, 0), (0, 1, 3, 19), (1, 0, 6, 2), (1, 1, 1, 11)):
        counter = [torch.tensor([x]) for x in (100 + j, 5 + i, int(heads[b, h]), 0)]
        word = int(philox((counter[0], counter[1], counter[2], counter[3]), key)[0])
        assert bool(mask[b, h, i, j]) == (word >= int(0.4 * 2**32))
    many = Dropout(seed, 0.4).kept(torch.arange(4), torch.arange(256), torch.arange(256))
    assert abs(many.float().mean().item() - 0.6) < 5 * (0.24 / many.numel()) ** 0.5


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def largest_tensor(call: Call) -> int:
    with Largest() as seen:
        out, lse = cpu.forward(call)
        cpu.backward(call, out, lse, torch.ones_like(out), None)
    return int(seen.numel)


@pytest.mark.parametrize("features", [{"softcap": 5.0}, {"sinks": torch.zeros(2), "right": 0}, {}], ids=str)
def test_memory_grows_with_the_length(features: dict[str, Any]) -> None:
    for length in (1024, 4096):
        q, k = torch.randn(1, 2, length, 16), torch.randn(1, 1, length, 16)
        call = Call(q=q, k=k, v=k, scale=0.25, **features)
        assert largest_tensor(call) <= max(q.numel(), cpu_tiles.ROWS * cpu_tiles.KEYS)


def test_a_window_costs_its_width() -> None:
    flops = []
    for length in (2048, 4096):
        q = torch.randn(1, 1, length, 16)
        call = Call(q=q, k=q, v=q, scale=0.25, left=100, right=20)
        with FlopCounterMode(display=False) as counter:
            out, lse = cpu.forward(call)
            cpu.backward(call, out, lse, out, None)
        flops.append(counter.get_total_flops())
        assert flops[-1] <= 2 * 7 * 16 * length * (cpu_tiles.ROWS + 121)
    assert flops[1] < 2.1 * flops[0]


@pytest.mark.parametrize("features", [{}, {"softcap": 2.0}, {"alibi": True}, {"window": (20, 0)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_does_not_change_its_members(features: dict[str, Any], dtype: torch.dtype) -> None:
    drawn = Drawn(Case(batch=3, heads=(4, 2), queries=300, keys=300, **features), dtype)
    call = drawn.call()
    out, lse = cpu.forward(call)
    grads = cpu.backward(call, out, lse, drawn.dout, None)
    for b in range(3):
        one = slice(b, b + 1)
        slopes = None if call.slopes is None else call.slopes[one]
        alone = replace(call, q=call.q[one], k=call.k[one], v=call.v[one], slopes=slopes)
        again = cpu.forward(alone)
        assert torch.equal(again[0], out[one])
        assert torch.equal(again[1], lse[one])
        for x, y in zip(cpu.backward(alone, *again, drawn.dout[one], None)[:3], grads[:3], strict=True):
            assert torch.equal(x, y[one])


sides = st.none() | st.integers(-5, 30)
wholes = st.tuples(*(st.integers(0, 1) for _ in range(4)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 3))
    lengths = st.tuples(st.integers(0, 40), st.integers(0, 40))
    packed = draw(st.none() | st.lists(lengths, min_size=1, max_size=4).map(tuple))
    added = draw(st.sampled_from(("none", "bias", "mask"))) if packed is None else "none"
    return Case(
        batch=draw(st.integers(1, 3)),
        heads=(kv_heads * draw(st.integers(1, 3)), kv_heads),
        queries=draw(st.integers(1, 60)),
        keys=draw(st.integers(1, 60)),
        dims=draw(st.tuples(st.integers(1, 20), st.integers(1, 20)) | st.just((8, 8))),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(sides, sides)),
        softcap=draw(st.none() | st.floats(0.5, 20.0)),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        bias=draw(wholes) if added == "bias" else None,
        mask=draw(wholes) if added == "mask" else None,
        packed=packed,
        dropout=draw(st.sampled_from((0.0, 0.0, 0.5, 0.9))),
        lse_gradient=draw(st.booleans()),
        transposed=draw(st.booleans()),
        strided=draw(st.booleans()),
    )


@settings(max_examples=150)
@example(case=Case(heads=(2, 1), queries=2, keys=1, dims=(8, 8), transposed=True, strided=True), seed=0, small=False)
@given(case=cases(), seed=st.integers(0, 1000), small=st.booleans())
def test_any_case(case: Case, seed: int, small: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small:
            small_blocks(patch)
        check_fp64(Drawn(case, torch.float64, seed))
