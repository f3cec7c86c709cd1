"""What features of `flash_attention` cost over a plain call with as many FLOPs, and how the time of a window grows.

FLOPs are counted by the pairs of a query and a key that it sees. CUDA graphs in turn, medians, inputs that rotate.
Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from assay import flash_attention
from benchmarks.bench_flash import HIDDEN, TOKENS, backward_works, draw, forward_works, milliseconds

GOAL = 1.1
"""Time with a feature over the time without, a pair."""
GROWTH_GOAL = 2.2
"""Time of a window's call over that of half the length."""
UNEQUAL = (6144, 4096, 2560, 1536, 1024, 512, 300, 212)
"""Lengths of packed sequences, TOKENS in all, as a bucket of documents has them."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A call with it, and the plain one beside it."""

    name: str
    how: dict[str, Any]
    plain: dict[str, Any]
    """The call beside it."""
    length: int = 4096
    plain_length: int = 4096
    groups: int = 1
    """Heads of q to one of k and v."""
    packed: tuple[int, ...] = ()
    """Lengths of sequences; else there are TOKENS / length of one length."""

    @property
    def pairs_over_plain(self) -> float:
        """Pairs that are seen, over those of the plain call; TOKENS rows each."""
        lengths = self.packed or (TOKENS // self.length) * (self.length,)
        plain = (TOKENS // self.plain_length) * pairs(self.plain_length, **_mask(self.plain))
        return sum(pairs(length, **_mask(self.how)) for length in lengths) / plain


def pairs(length: int, causal: bool = False, window: tuple[int, int] | None = None) -> int:
    """Of a query and a key that it sees, in one head of a sequence."""
    left, right = window or (length, length)
    rows = torch.arange(length)
    last = (rows + (0 if causal else right)).clamp_(max=length - 1)
    return int((last - (rows - left).clamp_(min=0) + 1).sum())


def _mask(how: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in how.items() if name in ("causal", "window")}


def features(dim: int) -> list[Feature]:
    heads = HIDDEN // dim
    causal: dict[str, Any] = {"causal": True}
    slopes, sinks = torch.rand(heads, device="cuda") / 100, torch.zeros(heads, device="cuda")
    equal = (TOKENS // 4096) * (4096,)
    window: dict[str, Any] = {"how": {"window": (1023, 0)}, "plain": causal, "plain_length": 2048}
    return [
        Feature(name="GQA 4", how=causal, plain=causal, groups=4),
        Feature(name="ALiBi", how=causal | {"alibi_slopes": slopes}, plain=causal),
        Feature(name="ALiBi, full", how={"alibi_slopes": slopes}, plain={}),
        Feature(name="softcap", how=causal | {"softcap": 30.0}, plain=causal),
        Feature(name="softcap, full", how={"softcap": 30.0}, plain={}),
        Feature(name="sinks", how=causal | {"sinks": sinks}, plain=causal),
        Feature(name="packed", how=causal | {"cu_seqlens_q": _ends(equal)}, plain=causal, packed=equal),
        Feature(name="packed, unequal", how=causal | {"cu_seqlens_q": _ends(UNEQUAL)}, plain=causal, packed=UNEQUAL),
        Feature(name="window 1024, N 16384", length=16384, **window),
        Feature(name="window 1024, N 8192", length=8192, **window),
    ]


def _ends(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)


def bench_features(rounds: int) -> bool:
    good = True
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16; time over plain, a pair (forward, backward)"
    )
    for dim in (64, 128, 256):
        for feature in features(dim):
            ratios = _over_plain(feature, dim, rounds)
            fine = max(ratios) <= GOAL
            good &= fine
            line = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"{feature.name:24} D {dim:3}: {line}{'' if fine else '  MISSED'}", flush=True)
    return good


def _over_plain(feature: Feature, dim: int, rounds: int) -> list[float]:
    """Forward and backward."""
    sets = draw(feature.length, dim, HIDDEN // dim // feature.groups)
    if feature.packed:
        sets = [[x.detach().transpose(0, 1).flatten(1, 2)[None].contiguous() for x in each] for each in sets]
        sets = [[x.requires_grad_() for x in each] for each in sets]
    same = draw(feature.plain_length, dim)
    ratios = []
    for make in (forward_works, backward_works):
        works = [
            make(lambda q, k, v: flash_attention(q, k, v, **feature.how), sets),
            make(lambda q, k, v: flash_attention(q, k, v, **feature.plain), same),
        ]
        with_it, without = milliseconds(works, rounds)
        ratios.append(with_it / without / feature.pairs_over_plain)
    return ratios


def bench_growth(rounds: int) -> bool:
    """One sequence, longer and longer, and a window that stays: a straight line."""
    good = True
    print("window of 1024 keys, one sequence: milliseconds (forward, backward)")
    for dim in (64, 128, 256):
        found: list[list[float]] = []
        for length in (16384, 32768, 65536):
            sets = draw(length, dim, sets=1)
            works = [
                make(lambda q, k, v: flash_attention(q, k, v, window=(1023, 0)), sets)
                for make in (forward_works, backward_works)
            ]
            found.append(milliseconds(works, rounds))
            print(f"D {dim:3} N {length:5}: {found[-1][0]:.3f}, {found[-1][1]:.3f}", flush=True)
        growth = max(now / before for now, before in zip(found[-1], found[-2], strict=True))
        good &= growth <= GROWTH_GOAL
        print(f"the last over the one before: {growth:.2f}{'' if growth <= GROWTH_GOAL else '  MISSED'}", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], "features", "growth"], help="default: both")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("The features' cost is that on a GPU, and here is none: nothing is measured.")
        return
    torch.manual_seed(0)
    parts = {"features": bench_features, "growth": bench_growth}
    good = [parts[part](arguments.rounds) for part in arguments.parts or parts]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
