"""Calls that go to SDPA itself on the CPU: the same results as by our own path, and nobody's switches in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from assay import flash_attention, scaled_dot_product_attention
from assay.flash import cpu_dropout, cpu_plain, cpu_quick
from assay.flash.attention import attend
from assay.flash.cpu_dropout import Dropout, philox

from .inputs import draw, qkv

SHORT: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "dims": (8, False, {}),
    "dims, causal": (24, False, {"is_causal": True}),
    "bias": (16, True, {}),
    "bias and dims": (24, True, {}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHORT)
def test_short_calls_agree_with_our_blocks(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients too. Wide formats add up 16 + 20 + 20 rounded terms; 16-bit ones are rounded at the end only."""
    dim, with_bias, how = SHORT[name]
    q, k, v = draw(2, 4, 20, 16), draw(2, 4, 20, 16, seed=1), draw(2, 4, 20, dim, seed=2)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    bias = draw(4, 20, 20, seed=3).to(dtype).requires_grad_() if with_bias else None
    wanted = [q, k, v, *([] if bias is None else [bias])]

    def run() -> list[torch.Tensor]:
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, **how)
        return [out, *torch.autograd.grad(out.square().sum(), wanted)]

    assert cpu_plain.takes_short(q, k, v, 0 if how else None, bias)
    short = run()
    for limit in ("SCORES", "MANY_SCORES"):
        monkeypatch.setattr(cpu_plain, limit, 0)
    assert not cpu_plain.takes_short(q, k, v, 0 if how else None, bias)
    roundings = 56 if dtype.itemsize > 2 else 4
    for x, y in zip(short, run(), strict=True):
        assert x.dtype == y.dtype
        assert (x - y).abs().max() <= roundings * torch.finfo(dtype).eps * max(1.0, y.abs().max().item())


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_of_the_drop_in_is_torchs(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the scores are few: the same numbers drawn, the same gradients."""
    q, k, v = (x.requires_grad_() for x in qkv())
    results = []
    for call in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        torch.manual_seed(5)
        out = call(q, k, v, dropout_p=0.3, is_causal=causal)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    monkeypatch.setattr(cpu_plain, "DROPPED_SCORES", 0)
    torch.manual_seed(5)
    assert not torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=causal), results[0][0])


@pytest.mark.parametrize("call", [flash_attention, scaled_dot_product_attention])
@pytest.mark.parametrize("name", ["dropout_p", "scale"])
def test_several_numbers_are_refused(call: Callable[..., torch.Tensor], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number"):
        call(*qkv(), **{name: torch.tensor([0.1, 0.2])})


def test_several_softcaps_are_refused() -> None:
    with pytest.raises(ValueError, match="softcap must be a number"):
        flash_attention(*qkv(), softcap=torch.tensor([1.0, 2.0]))


def test_a_seed_makes_the_mask_that_cuda_makes() -> None:
    """With V = 1 for one key and 0 for the others the output is that key's probability, or 0."""
    q, k, _ = qkv()
    heads = torch.arange(8).view(2, 4)
    kept = Dropout(torch.tensor(11), 0.5).kept(heads, torch.arange(20), torch.arange(20))
    for key in (0, 7, 19):
        v = torch.zeros(2, 4, 20, 16)
        v[:, :, key] = 1
        out = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=11)
        assert torch.equal(out[..., 0] > 0, kept[..., key])


@pytest.mark.parametrize("chunk", [1, 50, 333, 1 << 17])
def test_masks_do_not_depend_on_how_they_are_cut(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the four words as they are published; lists that begin anywhere, counters over 2³¹, any seed."""
    monkeypatch.setattr(cpu_dropout, "CHUNK", chunk)
    heads, rows, keys = torch.tensor([[0, 7], [2**31 + 3, 2**32 - 1]]), torch.arange(90, 103), torch.arange(2, 40)
    for seed in (0, -1, 2**63 - 1, -(2**63), 1234567890123456789):
        counter = (keys, rows[:, None], heads[..., None, None], torch.zeros_like(keys))
        word = philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))[0]
        for share in (0.1, 0.5):
            dropout = Dropout(torch.tensor(seed), share)
            assert torch.equal(dropout.kept(heads, rows, keys), word >= int(share * 2**32))
            assert torch.equal(dropout.kept(heads[0], rows[:3], keys[:5]), (word >= int(share * 2**32))[0, :, :3, :5])
    assert Dropout(torch.tensor(1), 0.1).kept(heads, rows[:0], keys).shape == (2, 2, 0, 38)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
@pytest.mark.parametrize("dim", [8, 16])
def test_the_callers_switches_do_not_matter(backend: SDPBackend, dim: int) -> None:
    """Also where SDPA would refuse for want of a kernel."""
    q, k, v = draw(2, 4, 20, 16), draw(2, 4, 20, 16, seed=1), draw(2, 4, 20, dim, seed=2)
    expected = flash_attention(q, k, v)
    with sdpa_kernel(backend):
        assert (flash_attention(q, k, v) - expected).abs().max() < 1e-6
        assert (scaled_dot_product_attention(q, k, v) - expected).abs().max() < 1e-6
        masked = flash_attention(q, k, v, bias=torch.ones(20, 20, dtype=torch.bool))
        assert (masked - expected).abs().max() < 1e-6
        assert flash_attention(q, k, v, dropout_p=0.5).isfinite().all()


class Seen(TorchFunctionMode):
    """Counts the calls of torch's attention that a mode is asked about."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dim", [8, 16])
@pytest.mark.parametrize("how", [{}, {"bias": torch.ones(20, 20, dtype=torch.bool)}, {"dropout_p": 0.5}], ids=str)
def test_our_calls_are_not_taken_for_torchs(how: dict[str, Any], dim: int) -> None:
    q, k, v = draw(2, 4, 20, 16), draw(2, 4, 20, 16, seed=1), draw(2, 4, 20, dim, seed=2)
    with Seen() as seen:
        F.scaled_dot_product_attention(q, k, k)
        flash_attention(q, k, v, **how)
    assert seen.calls == 1


def test_reduced_math_is_not_taken() -> None:
    """A switch of torch's lets its kernel sum up in bf16."""
    q, k, v = draw(1, 2, 300, 16), draw(1, 2, 300, 16, seed=1), draw(1, 2, 300, 8, seed=2)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    expected = flash_attention(q, k, v)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        assert not cpu_plain.takes_short(q, k, v, None)
        assert (flash_attention(q, k, v) - expected).abs().max() <= 2**-8
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@pytest.mark.parametrize(
    "how", [{}, {"bias": draw(1, 4, 300, 300).requires_grad_()}, {"causal": True}], ids=["", "bias", "causal"]
)
def test_a_batch_does_not_change_its_members_if_asked(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of eight has few enough scores for SDPA, eight have not."""
    monkeypatch.setattr(cpu_plain, "MANY_SCORES", cpu_plain.SCORES)
    q, k = (draw(8, 4, 300, 16, seed=seed).requires_grad_() for seed in (0, 1))
    v = draw(8, 4, 300, 40, seed=2)
    assert cpu_plain.takes_short(q[:1], k[:1], v[:1], None)
    assert not cpu_plain.takes_short(q, k, v, None)
    alone = flash_attention(q[:1], k[:1], v[:1], batch_invariant=True, **how)
    assert torch.equal(alone, flash_attention(q, k, v, batch_invariant=True, **how)[:1])


def test_long_calls_write_no_scores_out() -> None:
    q, k, v = (torch.empty(1, 4, 2048, dim) for dim in (64, 64, 32))
    assert not cpu_plain.takes_short(q, k, v, None)
    assert cpu_plain.takes_short(q, k, q, None, None, 0.1)
    longer = torch.empty(1, 4, 4096, 64)
    assert not cpu_plain.takes_short(longer, longer, longer, None, None, 0.1)


def test_many_heads_of_short_sequences_are_sdpas() -> None:
    """Two head dimensions: up to 6M scores, with any mask and dtype, where a head has few of them."""
    for dtype in (torch.float32, torch.bfloat16):
        q, v = (torch.empty(4, 8, 384, dim, dtype=dtype) for dim in (64, 32))
        assert cpu_plain.takes_short(q, q, v, 0)
        twice, of_v = (x.repeat(2, 1, 1, 1) for x in (q, v))
        assert not cpu_plain.takes_short(twice, twice, of_v, 0)
        q, v = (torch.empty(1, 4, 1024, dim, dtype=dtype) for dim in (64, 32))
        assert not cpu_plain.takes_short(q, q, v, 0)


@pytest.mark.parametrize(
    ("how", "dim", "kv_heads"),
    [
        ({"bias": torch.ones(1, 1100) > 0}, 16, 2),
        ({"bias": torch.ones(2, 1, 1, 1100) > 0}, 16, 1),
        ({"bias": torch.ones(2, 1100, 1)}, 16, 2),
        ({"bias": torch.ones(1, 1)}, 16, 1),
        ({"causal": True}, 8, 2),
        ({"bias": torch.ones(1100, 1100)}, 32, 2),
    ],
    ids=["keys", "keys, MQA", "rows", "one number", "narrow values", "wide values"],
)
def test_no_kernel_that_writes_the_scores_of_long_calls(how: dict[str, Any], dim: int, kv_heads: int) -> None:
    """Whatever the mask's shape is, and whether one head dimension is made longer."""
    q, k, v = draw(2, 2, 1100, 16), draw(2, kv_heads, 1100, 16, seed=1), draw(2, kv_heads, 1100, dim, seed=2)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        out = flash_attention(q, k, v, **how)
    names = {event.key for event in seen.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_attention_math" not in names
    assert out.is_contiguous() or dim == 16
    expected = F.scaled_dot_product_attention(
        q, k, v, attn_mask=how.get("bias"), is_causal="causal" in how, enable_gqa=True
    )
    assert (out - expected).abs().max() < 1e-5


def test_the_quick_question_takes_the_plainest_only() -> None:
    q, k, v = qkv()
    found = cpu_quick.attention(q, k, v, True, None)
    assert found is not None
    assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    refused: list[tuple[Any, ...]] = [
        (q, k[:, :2], v[:, :2], False, None),
        (q, k[:, :, :5], v[:, :, :5], True, None),
        (q, k, v[..., :8], False, None),
        (q.half(), k.half(), v.half(), False, None),
        (q, k.double(), v, False, None),
        (q.to_sparse(), k, v, False, None),
        (q, k, v, 1, None),
        (q, k, v, False, 1),
        (q, k, v, False, float("nan")),
        (q[:, :, :0], k, v, False, None),
        (q, k[:, :, :0], v[:, :, :0], False, None),
        (q.mT.contiguous().mT, k, v, False, None),
        (q.to("meta"), k, v, False, None),
        (q, k.to("meta"), v, False, None),
        (q, None, v, False, None),
    ]
    mask = torch.ones(20, 20, dtype=torch.bool)
    for good in (mask, mask.float(), mask.expand(2, 1, 20, 20), mask.float().expand(2, 4, 20, 20)):
        assert cpu_quick.attention(q, k, v, False, None, good) is not None
    bad: list[Any] = [
        mask[:, :5], mask.double(), mask.int(), mask.to("meta"), mask.expand(4, 20, 20), mask.float().to_sparse(),
        mask.float().requires_grad_(), 1.0,
    ]  # fmt: skip
    refused += [(q, k, v, False, None, each) for each in bad] + [(q, k, v, True, None, mask)]
    for arguments in refused:
        assert cpu_quick.attention(*arguments) is None, arguments[3:]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cpu_quick.attention(q, k, v, False, None) is None


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    return flash_attention(q, k, v, causal=True)


def within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, behind: int | None, ahead: int) -> torch.Tensor:
    return flash_attention(q, k, v, window=(behind, ahead))


LIMITS: list[Any] = [
    (causal, *sizes, None, 0) for sizes in ((1, 20), (2, 3), (3, 20), (20, 30), (64, 65), (20, 5), (40, 20))
]
LIMITS += [(within, *sizes, None, n) for *sizes, n in ((3, 20, 0), (20, 30, 4), (20, 30, 19), (20, 18, 5), (40, 20, 0))]
LIMITS += [(within, *sizes, 7, n) for *sizes, n in ((20, 20, 0), (3, 20, 0), (20, 30, 4), (20, 18, 5), (40, 20, 0))]
LIMITS += [(within, 20, 30, 29, 19), (within, 20, 30, 28, 19), (within, 20, 20, 0, 0), (within, 20, 20, 7, 19)]
"""How, queries, keys, and how far behind and ahead a query sees."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("how", "queries", "keys", "behind", "ahead"), LIMITS)
def test_limits_that_are_written_out(
    how: Any, queries: int, keys: int, behind: int | None, ahead: int, dtype: torch.dtype
) -> None:
    """As our own path has them: gradients, rows that see nothing, and NaN in the last key, which only the rows that see
    it have."""
    q, k, v = (x.to(dtype).requires_grad_() for x in qkv(queries, keys))

    def results(out: torch.Tensor) -> list[torch.Tensor]:
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    ours = results(attend(q, k, v, left=behind, right=ahead)[0])
    for x, y in zip(results(how(q, k, v, behind, ahead)), ours, strict=True):
        assert (x - y).abs().max() <= 56 * torch.finfo(dtype).eps * max(1.0, y.abs().max().item())
    with torch.no_grad():
        k[:, :, -1] = torch.nan
    position = torch.arange(queries) + (keys - queries)
    seen = position + ahead >= keys - 1
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            lost = how(q, k, v, behind, ahead).isnan()
        assert torch.equal(lost.all(3).all(0).all(0), seen)
        assert torch.equal(lost.any(3).any(0).any(0), seen)


def test_fewer_queries_than_keys_are_asked_about_once() -> None:
    """But for what has a mask too large to be written out, or K's heads for several of Q's."""
    q, k, v = qkv(20, 30)
    out = cpu_quick.attention(q, k, v, True, None, last_sees_all=True)
    assert out is not None
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, torch.ones(20, 30, dtype=torch.bool).tril(10)))
    assert cpu_quick.attention(q, k, v, True, None) is None  # SDPA's alignment
    assert cpu_quick.attention(k, q, q, True, None, last_sees_all=True) is None
    assert cpu_quick.attention(q, k[:, :1], v[:, :1], True, None, last_sees_all=True) is None
    long = torch.zeros(1, 1, cpu_plain.SCORES // 2 + 1, 16)
    assert cpu_quick.attention(long[:, :, :2], long, long, True, None, last_sees_all=True) is None


def test_which_limits_are_written_out() -> None:
    q, k, _ = qkv(20, 30)
    assert cpu_plain.as_mask(q[:, :, :1], k, None, 0) == (None, None, None)
    assert cpu_plain.as_mask(q, k, 29, 19) == (None, None, None)  # hide nothing
    assert cpu_plain.as_mask(q, k, None, -10) == (None, -10, None)  # the kernel's own
    assert cpu_plain.as_mask(q, k[:, :, :20], 19, 0) == (None, 0, None)
    assert cpu_plain.as_mask(k, q, None, 0) == (None, 0, None)  # rows that see nothing
    assert cpu_plain.as_mask(k, q, 5, 0) == (5, 0, None)
    whole = torch.ones(20, 30, dtype=torch.bool)
    for (left, right), wanted in {
        (None, 2): whole.tril(12), (5, 2): whole.tril(12).triu(5), (5, None): whole.triu(5),
    }.items():  # fmt: skip
        *limits, mask = cpu_plain.as_mask(q, k, left, right)
        assert limits == [None, None]
        assert mask is not None
        assert torch.equal(mask, wanted)
    wide = torch.empty(1, 1, cpu_plain.SCORES // 2, 1)
    assert cpu_plain.as_mask(q[:, :, :4], wide, None, 0) == (None, 0, None)
    wide = torch.empty(1, 1, cpu_plain.WINDOW_SCORES // 2, 1)
    assert cpu_plain.as_mask(q[:, :, :4], wide, 9, 0) == (9, 0, None)


class OnMeta(TorchFunctionMode):
    """Makes every new tensor one without numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.ones else {})})


@pytest.mark.parametrize("first", ["inference", "fake", "another default", "a mode", "patched"])
def test_a_mask_that_is_kept_is_good_for_every_call(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked for it first: 10 queries over 40 keys, causal, are computed with a mask that is written out."""
    cpu_plain.mask_of.cache_clear()
    q, k, v = draw(1, 2, 10, 16), draw(1, 2, 40, 16, seed=1), draw(1, 2, 40, 16, seed=2)
    if first == "inference":
        with torch.inference_mode():
            flash_attention(q, k, v, causal=True)
    elif first == "fake":
        with FakeTensorMode() as mode:
            flash_attention(*(mode.from_tensor(x) for x in (q, k, v)), causal=True)
    elif first == "a mode":
        with OnMeta():
            flash_attention(q, k, v, causal=True)
    elif first == "patched":
        with monkeypatch.context() as patch:
            patch.setattr(torch, "ones", partial(torch.zeros, device="meta"))
            flash_attention(q, k, v, causal=True)
    else:
        with torch.device("meta"):
            flash_attention(q, k, v, causal=True)
    for x in (q, k, v):
        x.requires_grad_()
    out = flash_attention(q, k, v, causal=True)
    wanted = F.scaled_dot_product_attention(q, k, v, torch.ones(10, 40).tril(30) > 0)
    assert torch.equal(out, wanted)
    for x, y in zip(*(torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (out, wanted)), strict=True):
        assert torch.equal(x, y)
    assert cpu_plain.mask_of.cache_info().currsize == 1


@pytest.mark.parametrize("window", [(3, 0), (3, 2), (3, None), (None, 0), (29, 0), (29, 29), (None, None)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(20, 30), (30, 30), (1, 30)])
def test_short_windows_are_asked_about_once(queries: int, keys: int, causal: bool, window: Any) -> None:
    """And a window that torch's kernel does not know, of another kind, or with a bias, is not for the quick way."""
    q, k, v = qkv(queries, keys)
    left, right = window[0], 0 if causal else window[1]
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    seen = (ahead >= -(keys if left is None else left)) & (ahead <= (keys if right is None else right))
    out = cpu_quick.attention(q, k, v, causal, None, window=window)
    assert out is not None or (queries != keys and left is None and right == 0)
    if out is not None:
        assert (out - F.scaled_dot_product_attention(q, k, v, seen)).abs().max() < 1e-5
    for bad in (list(window), (-1, 0), (True, 0), (3.0, 0), (1, 2, 3)):
        assert cpu_quick.attention(q, k, v, causal, None, window=bad) is None
    assert cpu_quick.attention(q, k, v, causal, None, torch.zeros(queries, keys), window=window) is None
