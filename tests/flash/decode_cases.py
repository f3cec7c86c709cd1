"""Caches for the tests of decoding: drawn, with NaN wherever nothing may be read, and judged by the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from assay.flash.decode import attention_with_cache

from .reference import reference_attention


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes and features."""

    lengths: tuple[int, ...] | int | None = (70, 1, 0, 200)
    batch: int = 2
    """If `lengths` are not given one by one."""
    capacity: int = 200
    queries: int = 1
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (64, 64)
    page: int | None = None
    layout: str = "dense"
    """"transposed": (B, capacity, H, D) in memory; "strided": every other element."""
    causal: bool = True
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    splits: int | None = None
    batch_invariant: bool = False

    @property
    def each(self) -> tuple[int, ...]:
        """The length of every sequence."""
        if isinstance(self.lengths, tuple):
            return self.lengths
        return (self.capacity if self.lengths is None else self.lengths,) * self.batch

    @property
    def features(self) -> dict[str, Any]:
        """What the function and the reference take alike."""
        names = ("causal", "scale", "window", "softcap")
        return {name: getattr(self, name) for name in names}


CASES = {
    "one query": Case(heads=(4, 2)),
    "group 1": Case(heads=(2, 2), splits=2),
    "three queries, group 4": Case(queries=3, heads=(8, 2), splits=3),
    "sixteen queries, group 8": Case(queries=16, heads=(8, 1), lengths=(130, 9)),
    "twenty queries, group 8": Case(queries=20, heads=(8, 1), lengths=(130, 20)),
    "fewer keys than queries": Case(queries=5, lengths=(2, 0, 9, 4)),
    "more splits than keys": Case(lengths=(5, 1, 0), splits=9),
    "splits beyond one merge": Case(lengths=(1100, 60), capacity=1200, splits=19),
    "whole cache": Case(lengths=None),
    "one length": Case(lengths=77, splits=2),
    "no keys": Case(lengths=0, sinks=True),
    "pages of 16": Case(page=16, splits=2, heads=(4, 2)),
    "pages of 64": Case(page=64, queries=2),
    "pages of 128": Case(page=128, splits=3, layout="transposed"),
    "pages of 13": Case(page=13, splits=2, heads=(8, 1)),
    "pages of 1": Case(page=1, lengths=(3, 20), capacity=20),
    "pages, one length": Case(page=16, lengths=50, splits=2),
    "not causal": Case(causal=False, queries=3),
    "window": Case(window=(40, 0), queries=3, splits=2),
    "window of pages": Case(window=(30, 0), page=16, queries=2, splits=2),
    "window ahead": Case(window=(20, 1), causal=False, queries=4),
    "window, right only": Case(window=(None, 1), causal=False, queries=4, splits=2),
    "softcap": Case(softcap=1.5, splits=2),
    "alibi": Case(alibi=True, queries=3, splits=2, heads=(4, 2)),
    "sinks": Case(sinks=True, queries=2, heads=(4, 2)),
    "sinks, splits": Case(sinks=True, queries=2, splits=3),
    "dim 40": Case(dims=(40, 40), splits=2),
    "dims 64 and 24": Case(dims=(64, 24), page=16),
    "dims 24 and 72": Case(dims=(24, 72), splits=2),
    "transposed": Case(layout="transposed", queries=3, heads=(4, 2)),
    "strided": Case(layout="strided", queries=2, splits=2),
    "negative scale": Case(scale=-0.2, splits=2),
    "batch invariant": Case(batch_invariant=True, lengths=(600, 3), capacity=700),
    "everything": Case(
        lengths=(190, 0, 33),
        queries=3,
        heads=(8, 2),
        dims=(40, 72),
        page=13,
        window=(60, 0),
        softcap=3.0,
        alibi=True,
        sinks=True,
        splits=3,
        layout="transposed",
    ),
}

IN_FP32 = ("three queries, group 4", "twenty queries, group 8", "pages of 64", "softcap", "sinks, splits", "everything")
"""Where kernels are slow to run or to compile. FP32 has tiles of its own, and its tanh is exact."""


class Drawn:
    """The tensors of a case: caches as the function takes them, and the same keys dense and without NaN."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(seed)
        batch, (heads, kv_heads), (dim, dim_v) = len(case.each), case.heads, case.dims
        self.q = self._laid_out(self._normal(batch, heads, case.queries, dim).to(dtype)).to(device)
        self.k = self._normal(batch, kv_heads, case.capacity, dim).to(dtype)
        self.v = self._normal(batch, kv_heads, case.capacity, dim_v).to(dtype)
        self.slopes = torch.rand(batch, heads, generator=self.generator) if case.alibi else None
        self.sinks = self._normal(heads).to(dtype) if case.sinks else None
        self.table = self._shuffled_pages()
        self.k_cache, self.v_cache = (self._laid_out(self._cached(x)).to(device) for x in (self.k, self.v))

    def arguments(self) -> dict[str, Any]:
        """Of `attention_with_cache`."""
        case, given = self.case, self.case.lengths
        if isinstance(given, tuple):
            lengths: torch.Tensor | int | None = torch.tensor(given, dtype=torch.int32, device=self.device)
        else:
            lengths = given
        slopes, sinks, table = (None if x is None else x.to(self.device) for x in (self.slopes, self.sinks, self.table))
        return case.features | {
            "q": self.q,
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "lengths": lengths,
            "block_table": table,
            "alibi_slopes": slopes,
            "sinks": sinks,
            "splits": case.splits,
            "batch_invariant": case.batch_invariant,
        }

    def reference(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE, each sequence by itself, every operation in `dtype`."""
        outs, sums = [], []
        for b, length in enumerate(self.case.each):
            q, k, v = (x[b : b + 1].to("cpu", dtype) for x in (self.q, self.k[:, :, :length], self.v[:, :, :length]))
            slopes = None if self.slopes is None else self.slopes[b : b + 1]
            how = self.case.features | {"alibi_slopes": slopes, "sinks": self.sinks}
            out, lse = reference_attention(q, k, v, **how)
            outs.append(out)
            sums.append(lse)
        return torch.cat(outs), torch.cat(sums)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def _laid_out(self, x: torch.Tensor) -> torch.Tensor:
        if self.case.layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.case.layout == "strided":
            return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
        return x

    def _shuffled_pages(self) -> torch.Tensor | None:
        """Every page that has keys somewhere among more pages than are needed; the other entries name none."""
        case = self.case
        if case.page is None:
            return None
        needed = [-(-length // case.page) for length in case.each]
        table = torch.full((len(needed), -(-case.capacity // case.page)), -1, dtype=torch.int32)
        places = torch.randperm(sum(needed) + 3, generator=self.generator).to(torch.int32).split([*needed, 3])
        for b, pages in enumerate(places[:-1]):
            table[b, : len(pages)] = pages
        return table

    def _cached(self, x: torch.Tensor) -> torch.Tensor:
        """What a sequence has, where it belongs; NaN everywhere else."""
        case = self.case
        if self.table is None or case.page is None:
            cache = torch.full_like(x, torch.nan)
            for b, length in enumerate(case.each):
                cache[b, :, :length] = x[b, :, :length]
            return cache
        cache = x.new_full((int((self.table >= 0).sum()) + 3, x.shape[1], case.page, x.shape[3]), torch.nan)
        for b, length in enumerate(case.each):
            padding = (0, 0, 0, -length % case.page)
            keys = torch.nn.functional.pad(x[b, :, :length], padding, value=torch.nan)
            cache[self.table[b][self.table[b] >= 0].long()] = keys.unflatten(1, (-1, case.page)).transpose(0, 1)
        return cache


def check(case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    """At most twice the error of plain attention in the same dtype, and a few roundings."""
    drawn = Drawn(case, dtype, device)
    results = attention_with_cache(**drawn.arguments(), return_lse=True)
    assert results[0].dtype == dtype
    assert results[1].dtype == torch.float32
    truths, plains = drawn.reference(torch.float64), drawn.reference(dtype)
    for x, truth, plain in zip(results, truths, plains, strict=True):
        largest = max(1.0, truth.nan_to_num(neginf=0.0).abs().max().item())
        floor = (4 * torch.finfo(torch.float32).eps + torch.finfo(x.dtype).eps / 2) * largest
        assert error(x.cpu(), truth) <= 2 * error(plain, truth) + floor


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest distance; where the truth is infinite, `x` must be it."""
    finite = truth.isfinite()
    assert torch.equal(x[~finite].double(), truth[~finite])
    return (x.double() - truth)[finite].abs().max().item() if finite.any() else 0.0


def check_invariance(dtype: torch.dtype, device: str = "cpu", capacity: int = 1200, **features: Any) -> None:
    """A sequence alone, in a cache as short as can be, has the bits that it has in a batch of five."""
    lengths = (capacity * 7 // 12, 3, capacity, 0, 512)
    case = Case(lengths=lengths, capacity=capacity, batch_invariant=True, **features)
    drawn = Drawn(case, dtype, device)
    how = drawn.arguments()
    out, lse = attention_with_cache(**how, return_lse=True)
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        alone = how | {"q": how["q"][one], "lengths": how["lengths"][one]}
        if case.page is None:
            alone |= {name: how[name][one, :, :length] for name in ("k_cache", "v_cache")}
        else:
            alone["block_table"] = how["block_table"][one, : -(-length // case.page)]
        if how["alibi_slopes"] is not None:
            alone["alibi_slopes"] = how["alibi_slopes"][one]
        again = attention_with_cache(**alone, return_lse=True)
        assert torch.equal(again[0], out[one]), b
        assert torch.equal(again[1], lse[one]), b
