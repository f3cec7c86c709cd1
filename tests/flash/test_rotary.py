"""Rotary embedding against a product of complex numbers; its kernel interpreted here, compiled where there is a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from assay.flash.attention import flash_attention
from assay.flash.rotary import Rotary, rotate, rotate_one, rotated
from tests.interpreter import interpret

from .rotary_cases import CASES, Turn, by_complex_numbers, tables

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def turned(case: Turn, x: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    cos, sin, _ = tables(case.half, dtype)
    out: torch.Tensor = rotate_one(x, cos, sin, *case.tensors(), case.interleaved, case.inverse)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_is_the_product_of_complex_numbers(name: str, dtype: torch.dtype) -> None:
    """Off by the rounding of the result, and by a few of FP32: tables, two products, a sum."""
    case = CASES[name]
    x = case.x(dtype)
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    out = turned(case, x, inner)
    assert out.dtype == dtype
    assert out.shape == x.shape
    truth = by_complex_numbers(x, case.positions(), case.half, case.interleaved, case.inverse)
    largest = x.double().abs().amax() if x.numel() else torch.zeros(())
    bound = (torch.finfo(dtype).eps + 4 * torch.finfo(inner).eps) * 2 * largest
    assert ((out.double() - truth).abs() <= bound).all()
    assert torch.equal(out[..., 2 * case.half :], x[..., 2 * case.half :])


@pytest.mark.parametrize("name", CASES)
def test_back_is_where_it_was(name: str) -> None:
    case = CASES[name]
    x, (cos, sin, _) = case.x(torch.float64), tables(case.half)
    back = rotate_one(turned(case, x), cos, sin, *case.tensors(), case.interleaved, not case.inverse)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["part, interleaved", "before 0", "transposed", "packed, offsets", "inverse"])
def test_gradients(name: str) -> None:
    case = CASES[name]
    x = case.x(torch.float64)[:, :1, -4:].requires_grad_()
    if case.lengths is not None:
        case = Turn(half=case.half, lengths=(1, 3), offsets=(40, -2))
    cos, sin, _ = tables(case.half)
    cos, sin = cos * 1.5, sin * 0.5  # not a rotation: the gradient is the transpose, not the inverse
    arguments = (cos, sin, *case.tensors(), case.interleaved, case.inverse)
    assert torch.autograd.gradcheck(lambda x: rotate_one(x, *arguments), (x,))
    assert torch.autograd.gradgradcheck(lambda x: rotate_one(x, *arguments), (x,))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck's own, from torch 2.15 on
@pytest.mark.parametrize("name", ["interleaved", "transposed", "packed, offsets", "one row"])
def test_operator_keeps_torchs_rules(name: str) -> None:
    case = CASES[name]
    cos, sin, _ = tables(case.half, torch.float32)
    x = case.x(torch.float32).requires_grad_()
    torch.library.opcheck(
        torch.ops.assay.rotary_embedding.default, (x, cos, sin, *case.tensors(), case.interleaved, case.inverse)
    )


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (1, 2, 0, 3)])
def test_layout_stays(order: tuple[int, ...]) -> None:
    shape = (2, 3, 5, 4)
    inverse = sorted(range(4), key=order.__getitem__)
    x = torch.randn([shape[i] for i in order]).permute(inverse)
    out = turned(Turn(half=2), x, torch.float32)
    heads_inside = order.index(1) > order.index(2)
    assert (out.transpose(1, 2) if heads_inside else out).is_contiguous()


def test_the_result_may_be_written_to() -> None:
    """It is no view, which torch would refuse to change where it has a gradient."""
    x = torch.randn(2, 5, 3, 4).transpose(1, 2).requires_grad_()
    out = rotated(x, tables(2), 0)
    wanted = 2 * torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    out *= 2
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], wanted)


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (3, 9), (1, 9), (9, 4), (9, 0), (0, 9)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_last_query_stands_beside_the_last_key(queries: int, keys: int, interleaved: bool) -> None:
    q = torch.randn(2, 4, queries, 8, dtype=torch.float64)
    k = torch.randn(2, 2, keys, 8, dtype=torch.float64)
    cos, sin, _ = tables(3, positions=9)
    turned_q, turned_k = rotate(q, k, Rotary(cos, sin, interleaved), None, None)
    first = max(keys - queries, -8)  # of queries without a key the position does not matter
    expected_q = by_complex_numbers(q, torch.arange(first, first + queries)[None], 3, interleaved)
    expected_k = by_complex_numbers(k, torch.arange(keys)[None], 3, interleaved)
    torch.testing.assert_close(turned_q, expected_q, rtol=0, atol=1e-14)
    torch.testing.assert_close(turned_k, expected_k, rtol=0, atol=1e-14)


def packed(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_packed_sequences_are_rotated_each_by_itself() -> None:
    lengths = [(3, 9), (0, 4), (5, 2), (9, 0), (6, 6)]
    q, k = torch.randn(1, 2, 23, 8), torch.randn(1, 1, 21, 8)
    cu_q, cu_k = (packed(*(pair[i] for pair in lengths)) for i in (0, 1))
    rotary = tables(4, torch.float32, positions=9)  # fewer than all rows: the lengths are read
    turned_q, turned_k = rotate(q, k, rotary, cu_q, cu_k)
    for i, (queries, keys) in enumerate(lengths):
        rows, columns = slice(cu_q[i], cu_q[i] + queries), slice(cu_k[i], cu_k[i] + keys)
        one_q, one_k = rotate(q[:, :, rows], k[:, :, columns], rotary, None, None)
        assert torch.equal(turned_q[:, :, rows], one_q)
        assert torch.equal(turned_k[:, :, columns], one_k)


def test_packed_queries_beside_their_own_keys_need_no_offsets() -> None:
    x, cu = torch.randn(1, 2, 20, 8), packed(12, 8)
    rotary = tables(4, torch.float32)
    turned_q, turned_k = rotate(x, x, rotary, cu, cu)
    assert torch.equal(turned_q, turned_k)


def test_scores_depend_on_the_distance_alone() -> None:
    q, k, v = (torch.randn(1, 2, 12, 8, dtype=torch.float64) for _ in range(3))
    out = flash_attention(q, k, v, rotary=tables(4), window=(3, 0))
    # The last row of a shorter call has other positions, but sees the same keys at the same distances.
    late = flash_attention(q[:, :, -1:], k[:, :, -5:], v[:, :, -5:], rotary=tables(4), window=(3, 0))
    torch.testing.assert_close(out[:, :, -1:], late, rtol=0, atol=1e-13)


def test_compiles_in_one_graph() -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attention(q, k, v, rotary=tables(4, torch.float32), causal=True).square().sum()

    def gradients(of: object) -> list[torch.Tensor]:
        assert callable(of)
        leaves = [torch.linspace(-1, 1, 2 * n * 3 * 8).view(2, n, 3, 8).transpose(1, 2) for n in (5, 9, 9)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        return list(torch.autograd.grad(of(*leaves), leaves))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(gradients(compiled), gradients(loss), strict=True):
        torch.testing.assert_close(ours, eager)


def test_compiles_packed_with_short_tables() -> None:
    q, k, cu = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8), packed(12, 8)
    rotary = tables(4, torch.float32, positions=12)
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(compiled(q, k, rotary, cu, cu), rotate(q, k, rotary, cu, cu), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize(
    ("rotary", "message"),
    [
        ((torch.ones(9, 2), torch.ones(9, 2)), "rotary must be a Rotary(cos, sin), got tuple"),
        (Rotary([1.0], torch.ones(9, 2)), "cos must be a torch tensor, got list"),  # type: ignore[arg-type]
        (Rotary(torch.ones(9, 2), torch.ones(2)), "sin must be float of shape (positions, half"),
        (Rotary(torch.ones(9, 2, dtype=torch.int32), torch.ones(9, 2)), "got torch.int32 (9, 2)"),
        (Rotary(torch.ones(9, 2, device="meta"), torch.ones(9, 2)), "on the device of what it rotates (cpu), got meta"),
        (Rotary(torch.ones(9, 2).requires_grad_(), torch.ones(9, 2)), "no gradient here; pass cos.detach()"),
        (Rotary(torch.ones(9, 2), torch.ones(9, 1)), "one shape, got (9, 2) and (9, 1)"),
        (Rotary(torch.ones(9, 8), torch.ones(9, 8)), "must be 1 to 4 wide"),
        (Rotary(torch.ones(9, 0), torch.ones(9, 0)), "must be 1 to 4 wide"),
        (Rotary(torch.ones(8, 4), torch.ones(8, 4)), "they have 8, there are 3 queries and 9 keys"),
    ],
)
def test_refuses(rotary: Rotary, message: str) -> None:
    q, k = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 9, 8)
    with pytest.raises(ValueError, match=re.escape(message)):
        rotate(q, k, rotary, None, None)


def test_refuses_positions_beyond_the_tables() -> None:
    x, (cos, sin, _) = torch.randn(1, 1, 12, 8), tables(4, torch.float32, positions=8)
    with pytest.raises(ValueError, match="a packed sequence of 9"):
        rotate(x, x, Rotary(cos, sin), packed(3, 9), packed(3, 9))
    with pytest.raises(ValueError, match="12 rows"):
        rotate_one(x, cos, sin, None, None, False, False)
    for offset, position in ((5, 8), (-8, 8)):
        offsets = torch.tensor([offset], dtype=torch.int32)
        with pytest.raises(ValueError, match=f"a position of {position}"):
            rotate_one(x[:, :, :4], cos, sin, offsets, None, False, False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_refuses_what_is_not_float(dtype: torch.dtype) -> None:
    x, rotary = torch.ones(2, 1, 3, 8), tables(4, torch.float32)
    with pytest.raises(ValueError, match=f"must be float, got {dtype}"):
        rotated(x.to(dtype), rotary)


def test_refuses_offsets_that_are_not_whole_numbers() -> None:
    x, rotary = torch.ones(2, 1, 3, 8), tables(4, torch.float32)
    for offsets in (torch.tensor([True, False]), torch.tensor([0.0, 1.0]), torch.tensor([0, 1], dtype=torch.uint8)):
        with pytest.raises(ValueError, match="Offsets must be int32"):
            rotated(x, rotary, offsets)


def test_refuses_wrong_boundaries() -> None:
    x, (cos, sin, _) = torch.randn(1, 1, 12, 8), tables(4, torch.float32)
    with pytest.raises(ValueError, match="end with the packed length 12"):
        rotate_one(x, cos, sin, None, packed(3, 7), False, False)


def test_changed_boundaries_are_read_again() -> None:
    x, cu, rotary = torch.randn(1, 1, 12, 8), packed(6, 6), tables(4, torch.float32, positions=8)
    rotate(x, x, rotary, cu, cu)
    cu.numpy()[1] = 2  # of which the tensor's version does not tell
    with pytest.raises(ValueError, match="a packed sequence of 10"):
        rotate(x, x, rotary, cu, cu)


def test_interpreted_kernel_agrees_with_the_cpu() -> None:
    interpret("tests.flash.interpreted_rotary")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernel_agrees_with_the_cpu(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    x, (cos, sin, _) = case.x(dtype), tables(case.half, torch.float32)
    offsets, cu = case.tensors()
    expected = rotate_one(x, cos, sin, offsets, cu, case.interleaved, case.inverse)
    there = [None if t is None else t.cuda() for t in (offsets, cu)]
    on_gpu = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="cuda").copy_(x)
    out = rotate_one(on_gpu, cos.cuda(), sin.cuda(), *there, case.interleaved, case.inverse)
    assert out.stride() == expected.stride()
    torch.testing.assert_close(
        out.cpu(), expected, rtol=torch.finfo(dtype).eps, atol=4 * torch.finfo(torch.float32).eps
    )
