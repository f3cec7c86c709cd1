"""`flash_attention` and the SDPA drop-in as a user calls them, on the CPU."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import assay
from assay import flash_attention, scaled_dot_product_attention
from assay.flash import ops
from assay.flash.checks import check_packing, check_sinks, check_window
from assay.flash.decode import attention_with_cache
from assay.flash.numerics import Numerics
from assay.flash.rotary import Rotary
from tests.flash.reference import reference_attention
from tests.test_structure import run_without


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(queries: int = 20, keys: int = 20, heads: tuple[int, int] = (4, 4), dim: int = 16) -> list[torch.Tensor]:
    return [draw(2, heads[0], queries, dim)] + [draw(2, heads[1], keys, dim, seed=i) for i in (1, 2)]


CU = torch.tensor([0, 5, 20], dtype=torch.int32)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "three dimensions": ({"q": draw(4, 20, 16)}, "must have the shape"),
    "not a tensor": ({"k": [1.0]}, "k must be a torch tensor, got list"),
    "sparse": ({"q": draw(2, 4, 20, 16).to_sparse()}, "q must be a dense tensor, got torch.sparse_coo"),
    "causal in words": ({"causal": "no"}, "causal must be True or False, got 'no'"),
    "dropout of None": ({"dropout_p": None}, "dropout_p must be a number"),
    "integers": ({"q": draw(2, 4, 20, 16).int()}, "bfloat16, float16 or float32"),
    "two dtypes": ({"v": draw(2, 4, 20, 16).bfloat16()}, "one dtype"),
    "another device": ({"k": torch.empty(2, 4, 20, 16, device="meta")}, "one device"),
    "other device alone": ({x: torch.empty(2, 4, 20, 16, device="meta") for x in "qkv"}, "runs on cpu and cuda"),
    "head dimension over 256": ({x: draw(2, 4, 20, 257) for x in "qkv"}, "1 to 256, got 257"),
    "head dimensions differ": ({"k": draw(2, 4, 20, 8)}, "one head dimension"),
    "lengths of k and v": ({"v": draw(2, 4, 19, 16)}, "same batch, heads and length"),
    "batches": ({"k": draw(3, 4, 20, 16), "v": draw(3, 4, 20, 16)}, "one batch size, got 2 and 3"),
    "heads that do not divide": ({"k": draw(2, 3, 20, 16), "v": draw(2, 3, 20, 16)}, "multiple of those of k and v"),
    "negative window": ({"window": (-1, 0)}, "at least 0"),
    "window of one side": ({"window": 5}, r"\(left, right\)"),
    "window of halves": ({"window": (1.5, None)}, "whole numbers"),
    "scale of NaN": ({"scale": float("nan")}, "scale must be a number"),
    "scale in words": ({"scale": "big"}, "scale must be a number"),
    "infinite scale": ({"scale": float("inf")}, "scale must be a number"),
    "scale of minus infinity": ({"scale": -float("inf")}, "scale must be a number, finite"),
    "a seed of half a number": ({"dropout_p": 0.5, "dropout_seed": 1.5}, "whole number of 64 bits"),
    "a seed too large": ({"dropout_p": 0.5, "dropout_seed": 2**63}, "whole number of 64 bits"),
    "negative softcap": ({"softcap": -1.0}, "softcap must be a number"),
    "dropout of 1": ({"dropout_p": 1.0}, "dropout_p must be a number"),
    "slopes of another shape": ({"alibi_slopes": torch.ones(3)}, r"\(heads,\) = \(4,\)"),
    "slopes with a gradient": ({"alibi_slopes": torch.ones(4, requires_grad=True)}, "no gradient"),
    "sinks of another shape": ({"sinks": torch.ones(2, 4)}, r"sinks must be float of shape \(heads,\)"),
    "bias of another shape": ({"bias": draw(19, 20)}, "must broadcast"),
    "bias of integers": ({"bias": torch.ones(20, 20, dtype=torch.int32)}, "float .* or bool"),
    "bias of five dimensions": ({"bias": torch.ones(1, 1, 1, 20, 20)}, "must broadcast"),
    "bias on another device": ({"bias": torch.ones(20, 20, device="meta")}, "device of q"),
    "bias and packing": ({"bias": draw(20, 20), "cu_seqlens_q": CU}, "exclude each other"),
    "packing and a batch": ({"cu_seqlens_q": CU}, "batch of 1"),
    "only keys packed": ({"cu_seqlens_k": CU}, "needs cu_seqlens_q"),
    "rotary that is a tuple": ({"rotary": (draw(20, 8), draw(20, 8))}, "must be a Rotary"),
    "rotary too short": ({"rotary": Rotary(draw(19, 8), draw(19, 8))}, "19"),
    "knobs on the CPU": ({"numerics": Numerics(row_sum="bf16")}, "tiled_attention"),
    "a seed of two numbers": ({"dropout_p": 0.5, "dropout_seed": torch.tensor([1, 2])}, "one int64"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    changes, message = BAD[name]
    given = dict(zip("qkv", qkv(), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        flash_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 7, 5, 20], "entry 2 is 5, after 7"),
        ([0, 5, 21], "ends with 21"),
        ([0, 5, 19], "ends with 19"),
        ([1, 5, 20], "begins with 1"),
        ([20], r"\(sequences \+ 1,\)"),
    ],
)
def test_bad_packing(cu: list[int], message: str) -> None:
    q, k, v = (x[:1] for x in qkv())
    with pytest.raises(ValueError, match=message):
        flash_attention(q, k, v, cu_seqlens_q=torch.tensor(cu, dtype=torch.int32))


@pytest.mark.parametrize("view", [lambda cu: cu, lambda cu: cu.data, lambda cu: cu.numpy()], ids=["", "data", "numpy"])
def test_packing_is_checked_again_when_it_changes(view: Callable[[torch.Tensor], Any]) -> None:
    """Also through views that leave the tensor's version as it is."""
    q, k, v = (x[:1] for x in qkv())
    cu = CU.clone()
    flash_attention(q, k, v, cu_seqlens_q=cu)
    view(cu)[1] = 30
    with pytest.raises(ValueError, match="entry 2 is 20, after 30"):
        flash_attention(q, k, v, cu_seqlens_q=cu)


def test_causal_is_aligned_with_the_last_key_and_in_sdpa_with_the_first() -> None:
    q, k, v = qkv(queries=3, keys=20)
    expected, _ = reference_attention(q, k, v, causal=True)
    assert (flash_attention(q, k, v, causal=True) - expected).abs().max() < 1e-5
    first = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (scaled_dot_product_attention(q, k, v, is_causal=True) - first).abs().max() < 1e-5
    assert (first - expected).abs().max() > 0.1


def test_the_drop_in_has_torchs_signature() -> None:
    expected = (
        "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Tensor"
    )
    assert expected in " ".join((F.scaled_dot_product_attention.__doc__ or "").split())
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)
    assert f"({shown}) -> Tensor" == expected


@settings(max_examples=60)
@given(data=st.data())
def test_the_drop_in_does_what_torch_does(data: st.DataObject) -> None:
    """Any leading dimensions, masks that broadcast, grouped heads; outputs and gradients, the mask's too."""
    leading = data.draw(st.sampled_from([(), (2,), (2, 4), (3, 2, 4), (1, 4)]))
    queries, keys, dim = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40), st.sampled_from([8, 16, 24])))
    grouped = len(leading) > 1 and data.draw(st.booleans())
    kv = (*leading[:-1], 2) if grouped else leading
    kind = data.draw(st.sampled_from(["none", "causal", "bool", "float"]))
    how: dict[str, Any] = {"enable_gqa": grouped, "scale": data.draw(st.sampled_from([None, 0.3]))}
    q, k, v = draw(*leading, queries, dim), draw(*kv, keys, dim, seed=1), draw(*kv, keys, dim, seed=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if kind == "causal":
        how["is_causal"] = True
    elif kind != "none":
        whole = data.draw(st.integers(0, len(leading)))
        mask = draw(*leading[whole:], queries, keys, seed=3)
        if kind == "bool":
            how["attn_mask"] = mask > -0.5
        else:
            how["attn_mask"] = mask.requires_grad_()
            leaves.append(mask)
    results = []
    for call in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = call(q, k, v, **how)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out) + out.detach())))
    for mine, theirs in zip(*results, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() <= 2e-5 * max(1.0, theirs.abs().max().item())


def test_the_drop_in_refuses_what_torch_refuses() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="exclude each other"):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(20, 20, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        scaled_dot_product_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        scaled_dot_product_attention(q[0, 0, 0], k[0, 0, 0], v[0, 0, 0])


FIVE = draw(2, 3, 4, 20, 16)
BAD_DROP_IN: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"query": [1.0]}, "query must be a torch tensor, got list"),
    "no value": ({"value": None}, "value must be a torch tensor, got NoneType"),
    "sparse": ({"key": draw(2, 4, 20, 16).to_sparse()}, "key must be a dense tensor, got torch.sparse_coo"),
    "leading dimensions": (
        {"query": draw(3, 4, 20, 16)},
        r"broadcast, got the shapes \(3, 4, 20, 16\), \(2, 4, 20, 16\)",
    ),
    "a mask in a list": ({"attn_mask": [[True]]}, "attn_mask must be a torch tensor, got list"),
    "a mask of another shape": ({"attn_mask": draw(19, 20)}, "attn_mask must broadcast"),
    "a mask of other leading dimensions": (
        {"query": FIVE, "key": FIVE, "value": FIVE, "attn_mask": draw(2, 5, 1, 20, 20)},
        r"leading dimensions \(2, 3\), got \(2, 5, 1, 20, 20\)",
    ),
    "causal in words": ({"is_causal": "no"}, "is_causal must be True or False, got 'no'"),
    "groups in words": ({"enable_gqa": "no"}, "enable_gqa must be True or False"),
    "dropout of None": ({"dropout_p": None}, "dropout_p must be a number"),
    "dropout over 1": ({"dropout_p": 1.5}, "dropout_p must be a number"),
}


@pytest.mark.parametrize("name", BAD_DROP_IN)
def test_bad_input_of_the_drop_in(name: str) -> None:
    changes, message = BAD_DROP_IN[name]
    given = dict(zip(("query", "key", "value"), qkv(), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(**given)


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([draw(5, 4, 16), draw(6, 4, 16)], layout=torch.jagged).transpose(1, 2)
    for call in (flash_attention, scaled_dot_product_attention):
        with pytest.raises(ValueError, match="must be a dense tensor, got a nested tensor"):
            call(nested, nested, nested)


@pytest.mark.parametrize(
    ("of_q", "of_kv"),
    [((), (4,)), ((4,), ()), ((), (3, 4)), ((4,), (3, 4)), ((3, 1), (4,)), ((2, 1, 4), (3, 1))],
    ids=str,
)
def test_leading_dimensions_broadcast_as_torchs(of_q: tuple[int, ...], of_kv: tuple[int, ...]) -> None:
    q, k, v = draw(*of_q, 6, 8), draw(*of_kv, 7, 8, seed=1), draw(*of_kv, 7, 8, seed=2)
    expected = F.scaled_dot_product_attention(q, k, v)
    found = scaled_dot_product_attention(q, k, v)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-5


def test_dropout_of_everything_in_the_drop_in() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    for call in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = call(q, k, v, dropout_p=1.0)
        assert (out == 0).all()
        assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("lengths", [(3, 20), (70, 200), (200, 70)], ids=str)
def test_causal_from_the_first_key_reads_no_key_that_nobody_sees(lengths: tuple[int, int]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(*lengths))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (found - expected).abs().max() < 1e-5
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, expected)), strict=True):
        assert (a - b).abs().max() < 1e-4
    with torch.no_grad():
        k[:, :, lengths[0] :], v[:, :, lengths[0] :] = torch.nan, torch.nan
    if lengths[0] < lengths[1]:
        assert torch.equal(scaled_dot_product_attention(q, k, v, is_causal=True), found)


def test_lse_and_its_gradient() -> None:
    q, k, v = (x.double().requires_grad_() for x in qkv())
    _, lse = flash_attention(q, k, v, return_lse=True)
    expected = (q @ k.mT * 0.25).logsumexp(-1)
    assert (lse - expected).abs().max() < 1e-12
    weights = draw(2, 4, 20, seed=5).double()
    found, wanted = (torch.autograd.grad((x * weights).sum(), (q, k)) for x in (lse, expected))
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 1e-12


def test_fully_masked_rows() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(queries=20, keys=5))
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :, :15] == 0).all()
    assert (lse[:, :, :15] == -torch.inf).all()
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert (dq[:, :, :15] == 0).all()
    assert dq.isfinite().all()


def test_rotary() -> None:
    q, k, v = qkv(queries=7)
    angles = torch.arange(20)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    rotary = Rotary(angles.cos(), angles.sin())

    def turned(x: torch.Tensor, first: int) -> torch.Tensor:
        a, b, rest = x.split((4, 4, 8), -1)
        cos, sin = (t[first : first + x.shape[2]] for t in rotary[:2])
        return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1)

    expected = flash_attention(turned(q, 13), turned(k, 0), v, causal=True)
    assert (flash_attention(q, k, v, causal=True, rotary=rotary) - expected).abs().max() < 1e-5


def test_dropout() -> None:
    q, k, v = qkv(keys=400)
    ones = torch.ones_like(v)
    seeded = [flash_attention(q, k, ones, dropout_p=0.25, dropout_seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[0], seeded[2])
    torch.manual_seed(3)
    first = flash_attention(q, k, v, dropout_p=0.25)
    assert not torch.equal(first, flash_attention(q, k, v, dropout_p=0.25))
    torch.manual_seed(3)
    assert torch.equal(first, flash_attention(q, k, v, dropout_p=0.25))
    # What stays is divided by its share: the mean over 2·4·20 rows of 400 keys is 1 within 5 standard errors.
    share = 0.25
    error = (share / (1 - share) / 400 * 3) ** 0.5 / 160**0.5  # a row's P varies: its squares sum to under 3/400
    assert abs(seeded[0][..., 0].mean().item() - 1) < 5 * error


def test_autocast() -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(q, k, v).dtype == torch.bfloat16
        assert scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    assert flash_attention(q, k, v).dtype == torch.float32


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (5, 0)},
    "softcap and sinks": {"softcap": 5.0, "sinks": torch.zeros(4)},
    "bias": {"bias": draw(20, 20)},
    "mask": {"bias": draw(20, 20) > 0},
}


@pytest.mark.parametrize("name", FEATURES)
def test_compile_without_breaks(name: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attention(q * 2, k, v, **FEATURES[name])
        return out.square().sum()

    expected = torch.autograd.grad(step(q, k, v), (q, k, v))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(expected, torch.autograd.grad(compiled(q, k, v), (q, k, v)), strict=True):
        assert (a - b).abs().max() < 1e-5


def test_opcheck() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(heads=(4, 2)))
    bias, slopes, sinks = draw(1, 4, 20, 20).requires_grad_(), torch.rand(2, 4), torch.zeros(4, requires_grad=True)
    options = (0.25, 10, 0, 5.0, 0.2, False, False, False, "")
    torch.library.opcheck(ops.attention, (q, k, v, bias, slopes, sinks, None, None, torch.tensor(5), *options))
    packed = [x.detach()[:1].transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    options = (0.25, 10, 0, 5.0, 0.0, False, False, False, "")
    torch.library.opcheck(ops.attention, (*packed, None, None, None, CU, CU, None, *options))


@pytest.mark.parametrize("name", FEATURES)
def test_compile_with_sizes_that_change(name: str) -> None:
    how = FEATURES[name]

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attention(q, k, v, **how)
        return out

    for heads in (4, 2) if name != "softcap and sinks" else (4,):
        q, k, v = qkv(heads=(heads, heads))
        expected: torch.Tensor = flash_attention(q, k, v, **how)
        assert (step(q, k, v) - expected).abs().max() < 1e-5


def test_the_callers_switches_do_not_reach_the_cpu() -> None:
    """Math attention would write the matrix of scores out."""
    q, k, v = qkv()
    expected = flash_attention(q, k, v)
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            assert torch.equal(flash_attention(q, k, v), expected)


def test_a_mask_under_vmap_and_without_data() -> None:
    q, mask = draw(3, 2, 4, 10, 16), draw(3, 1, 1, 10, 10) > 0
    mapped = torch.vmap(lambda q, m: flash_attention(q, q, q, bias=m))(q, mask)
    expected = torch.stack([flash_attention(x, x, x, bias=m) for x, m in zip(q, mask, strict=True)])
    assert (mapped - expected).abs().max() < 1e-5
    with FakeTensorMode():
        fake = torch.empty(2, 4, 10, 16)
        assert flash_attention(fake, fake, fake, bias=torch.empty(10, 10, dtype=torch.bool)).shape == fake.shape


def test_autocast_leaves_fp64() -> None:
    q, k, v = (x.double() for x in qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(q, k, v).dtype == torch.float64


def test_a_window_beyond_all_lengths() -> None:
    q, k, v = qkv()
    for side in (2**31 - 1, sys.maxsize):
        found = flash_attention(q, k, v, window=(side, side), softcap=5.0)
        assert torch.equal(found, flash_attention(q, k, v, softcap=5.0))
    assert check_window((sys.maxsize, 3), causal=False) == (2**30, 3)


def test_strided_side_inputs() -> None:
    """What the kernels read one after the other is made so first."""
    q, k, v = (x[:1] for x in qkv())
    cu = torch.stack((CU, CU + 1), 1)[:, 0]
    sinks = torch.stack((torch.ones(4), torch.zeros(4)), 1)[:, 0]
    found = flash_attention(q, k, v, cu_seqlens_q=cu, sinks=sinks)
    assert torch.equal(found, flash_attention(q, k, v, cu_seqlens_q=CU, sinks=torch.ones(4)))
    assert all(x.is_contiguous() for x in check_packing(cu, None, q) if x is not None)
    assert check_sinks(sinks, 4, q.device).is_contiguous()


def test_vmap() -> None:
    q, k = draw(3, 2, 4, 10, 16), draw(2, 4, 12, 16)
    bias = draw(3, 1, 4, 10, 12)
    mapped = torch.vmap(lambda q, b: flash_attention(q, k, k, bias=b, window=(8, 0)))(q, bias)
    one_by_one = [flash_attention(q[i], k, k, bias=bias[i], window=(8, 0)) for i in range(3)]
    assert (mapped - torch.stack(one_by_one)).abs().max() < 1e-6
    with pytest.raises(ValueError, match="sinks"):
        torch.vmap(lambda q, s: flash_attention(q, k, k, sinks=s))(q, draw(3, 4))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"window": (5, 0)}, "flash_attention has no second derivative"),
        ({}, "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"),
    ],
    ids=["ours", "torch's kernel"],
)
def test_double_backward_is_refused(how: dict[str, Any], message: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    (grad,) = torch.autograd.grad(flash_attention(q, k, v, **how).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        grad.sum().backward()


OTHER = draw(1, 2, 20, 8, seed=2)
ANGLES = torch.arange(20)[:, None] * torch.tensor([1.0, 0.3])
DIFFERENTIATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: flash_attention(x, x, x),
    "drop-in": lambda x: scaled_dot_product_attention(x, x, x),
    "mask": lambda x: scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(20, 20).tril().bool()),
    "softcap": lambda x: flash_attention(x, x, x, softcap=3.0),
    "window": lambda x: flash_attention(x, x, x, window=(3, 0)),
    "bias": lambda x: flash_attention(OTHER, OTHER, OTHER, bias=x[..., :1], window=(3, 0)),
    "rotary": lambda x: flash_attention(x, x, x, rotary=Rotary(ANGLES.cos(), ANGLES.sin())),
    "decode": lambda x: attention_with_cache(x, x, x),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in torch.func.jvp
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_forward_mode_is_refused(name: str) -> None:
    """Silently, the derivative would be 0: also in transforms of transforms, and where a gradient is recorded too."""
    function, x, tangent = DIFFERENTIATED[name], draw(1, 2, 20, 8), draw(1, 2, 20, 8, seed=1)
    jvp = torch.func.jvp
    ways: dict[str, Callable[[], Any]] = {
        "jvp": lambda: jvp(function, (x,), (tangent,)),
        "jacfwd": lambda: torch.func.jacfwd(function)(x),
        "jvp of vmap": lambda: jvp(torch.vmap(function), (x[None],), (tangent[None],)),
        "vmap of jvp": lambda: torch.vmap(lambda y: jvp(function, (y,), (y,)))(x[None]),
        "inner jvp": lambda: jvp(lambda y: jvp(lambda z: function(y) * z, (x,), (tangent,)), (x,), (tangent,)),
    }
    for way in ways.values():
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            way()
    with forward_ad.dual_level():
        for primal in (x, x.clone().requires_grad_()):
            dual = forward_ad.make_dual(primal, tangent)
            if name != "decode" or not primal.requires_grad:
                with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                    function(dual)
        assert torch.equal(function(x), function(x.clone()))  # without a tangent


@pytest.mark.parametrize("name", ["softcap", "window", "bias", "rotary", "mask"])
def test_gradients_of_torch_func_are_refused(name: str) -> None:
    x = draw(1, 2, 20, 8)
    transformed = torch.func.grad(lambda x: DIFFERENTIATED[name](x).sum())
    for way in (transformed, lambda x: torch.vmap(transformed)(x[None])):
        with pytest.raises(NotImplementedError, match=r"no gradient within torch.func.grad"):
            way(x)


def test_gradients_through_vmap() -> None:
    """Autograd's own gradient of a mapped call is no transform of it."""
    x = draw(3, 1, 2, 20, 8).requires_grad_()
    (found,) = torch.autograd.grad(torch.vmap(DIFFERENTIATED["softcap"])(x).square().sum(), x)
    one_by_one = torch.stack([DIFFERENTIATED["softcap"](y) for y in x])
    (expected,) = torch.autograd.grad(one_by_one.square().sum(), x)
    assert (found - expected).abs().max() < 1e-5


@given(
    st.builds(
        Numerics,
        probabilities=st.sampled_from([None, "bf16", "fp16", "fp32"]),
        row_sum=st.sampled_from(["bf16", "fp16", "fp32"]),
        rescale=st.sampled_from(["bf16", "fp16", "fp32"]),
        output_accumulator=st.sampled_from(["bf16", "fp16", "fp32"]),
        sum_after_cast=st.booleans(),
        reverse_keys=st.booleans(),
        block=st.none() | st.tuples(*2 * [st.sampled_from([16, 32, 64, 128, 256])]),
    )
)
def test_numerics_survive_being_written_down(numerics: Numerics) -> None:
    assert Numerics.decoded(numerics.encoded()) == numerics


@pytest.mark.parametrize(
    "change",
    [{"row_sum": "fp8"}, {"probabilities": 16}, {"block": (64, 65)}, {"block": (8, 64)}, {"reverse_keys": 1}],
    ids=str,
)
def test_bad_numerics(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Numerics: {next(iter(change))} must be"):
        Numerics(**change)


def test_it_needs_no_triton() -> None:
    program = """
import torch, assay
q = torch.randn(1, 4, 32, 16, requires_grad=True)
out = assay.flash_attention(q, q, q, causal=True, window=(5, 0), softcap=3.0)
out.sum().backward()
print(out.shape == q.shape, q.grad.isfinite().all().item())
"""
    done = run_without({"triton", "flash_attn", "transformers", "rich", "typer"}, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_the_provider_is_known_and_not_active() -> None:
    program = """
import torch, assay, assay.flash.provider
attention = torch.nn.attention
if hasattr(attention, "list_flash_attention_impls"):
    assert "assay" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names() -> None:
    assert assay.flash_attention is flash_attention
    assert assay.scaled_dot_product_attention is scaled_dot_product_attention
