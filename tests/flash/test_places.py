"""Tiles of packed sequences are counted as often as need be, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from assay.flash.call import Call
from assay.flash.checks import check_packing

module = pytest.importorskip("assay.flash.places")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of tiles that were counted."""
    sizes: list[int] = []

    def count(cu: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(int(str(rest[-1])))
        return cu.clone()

    monkeypatch.setattr(module, "_count_places", count)
    return sizes


def packed(cu_q: torch.Tensor, cu_k: torch.Tensor) -> Call:
    q, k = (torch.zeros(1, 1, int(cu[-1]), 16) for cu in (cu_q, cu_k))
    return Call(q=q, k=k, v=k, scale=1.0, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def test_a_call_counts_once(counts: list[int]) -> None:
    """On the CPU as in a captured graph: nothing is kept from call to call."""
    cu, other = torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([0, 5, 7], dtype=torch.int32)
    call = packed(cu, cu)
    first = module.places(call, "q", 4, 128)
    assert module.places(call, "k", 4, 128) is first
    assert counts == [128]
    module.places(call, "k", 4, 64)
    assert counts == [128, 64]
    again = replace(call, cu_seqlens_k=other, k=call.k[:, :, :7])
    found = {of: module.places(again, of, 4, 128) for of in "qk"}
    assert counts == [128, 64, 128, 128]
    assert torch.equal(found["q"], cu)
    assert torch.equal(found["k"], other)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_list_of_lengths_stays_one(dtype: torch.dtype) -> None:
    cu = torch.tensor([0, 3, 9], dtype=dtype)
    q = torch.zeros(1, 1, 9, 16)
    for given in (None, cu):
        of_q, of_k = check_packing(cu, given, q)
        assert of_q is of_k
        assert of_q is not None
        assert of_q.dtype == torch.int32
    of_q, of_k = check_packing(cu, cu.clone(), q)
    assert of_q is not of_k
