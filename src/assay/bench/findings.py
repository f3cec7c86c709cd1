"""What the figures say, in sentences: where flash helps, where it does not, and how ours stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from assay.bench.contenders import OURS, STANDARD
from assay.bench.figures import Figure, Point, fastest
from assay.bench.shapes import Pass

EVEN = 0.03
"""Times closer than this are called the same: so much do they move from run to run."""
STEADY = 1.2
"""The slowest sample of a figure over its fastest, at most, on a machine that does nothing else."""
EXPECTED = {512: "1.5×", 2048: "2×", 8192: "3×", 16384: "more than 3×"}
"""Flash over standard attention on a GPU, by length, from the literature."""


def findings(points: Sequence[Point], *, on_gpu: bool) -> list[str]:
    """Sentences, each drawn from the measurements alone."""
    return [*_speedups(points, on_gpu), *_where_flash_does_not_help(points), *_ours(points), *_unsteady(points)]


def _speedups(points: Sequence[Point], on_gpu: bool) -> Iterator[str]:
    for which, dim in dict.fromkeys((f.which, p.shape.dim) for p in points for f in p.figures):
        found = [
            f"{ratio:.1f}× at {point.shape.keys}{_expected(point, on_gpu)}"
            for point, _, ratio in _flash_over_standard(points, which)
            if point.shape.dim == dim and not point.shape.few_queries
        ]
        if found:
            yield f"{_in_words(which)}, D {dim}: the fastest flash kernel over standard attention: {', '.join(found)}."


def _expected(point: Point, on_gpu: bool) -> str:
    expected = EXPECTED.get(point.shape.keys) if on_gpu else None
    return f" (the literature: {expected})" if expected else ""


def _flash_over_standard(points: Sequence[Point], which: Pass) -> Iterator[tuple[Point, Figure, float]]:
    for point in points:
        best = fastest(figure for figure in point.of(which) if figure.flash)
        ratio = None if best is None else point.over_standard(best)
        if best is not None and ratio is not None:
            yield point, best, ratio


def _where_flash_does_not_help(points: Sequence[Point]) -> Iterator[str]:
    passes = dict.fromkeys(figure.which for point in points for figure in point.figures)
    found = [(which, *row) for which in passes for row in _flash_over_standard(points, which)]
    useless = [(which, point, best, ratio) for which, point, best, ratio in found if ratio < 1 + EVEN]
    for which, point, best, ratio in useless:
        yield (
            f"Flash does not help at {_place(point)}, {_in_words(which).lower()}: the fastest, {best.contender}, is "
            f"{ratio:.2f}× as fast as standard attention{_as_graphs(point, best)}."
        )
    if found and not useless:
        which, point, _, ratio = min(found, key=lambda row: row[3])
        least = f"{_place(point)}, {_in_words(which).lower()}"
        yield f"Flash is faster than standard attention at every shape measured; least at {least}: {ratio:.2f}×."


def _as_graphs(point: Point, best: Figure) -> str:
    """Whether that is the kernel or its launch."""
    standard = next((f for f in point.of(best.which) if f.contender == STANDARD), None)
    if standard is None or standard.graph_seconds is None or best.graph_seconds is None:
        return ""
    return f" ({standard.graph_seconds / best.graph_seconds:.2f}× as CUDA graphs, without the launches)"


def _ours(points: Sequence[Point]) -> Iterator[str]:
    rows = [
        (point, figure, ratio)
        for point in points
        for figure in point.figures
        if figure.contender == OURS and (ratio := point.over_best_other(figure)) is not None
    ]
    slower = [row for row in rows if row[2] < 1 - EVEN]
    for which in dict.fromkeys(figure.which for _, figure, _ in slower):
        where = [
            f"{ratio:.2f}× the speed of {best.contender} at {_place(point)}"
            for point, figure, ratio in slower
            if figure.which == which and (best := point.best_other(figure)) is not None
        ]
        yield f"{_in_words(which)}, {OURS} is slower than the best other: {'; '.join(where)}."
    if rows and not slower:
        point, figure, ratio = min(rows, key=lambda row: row[2])
        least = f"{_place(point)}, {_in_words(figure.which).lower()}"
        yield f"{OURS} is nowhere slower than the best other, within {EVEN:.0%}; least at {least}: {ratio:.2f}×."


def _unsteady(points: Sequence[Point]) -> Iterator[str]:
    spreads = [max(f.samples) / min(f.samples) for point in points for f in point.figures if f.samples]
    moved = [spread for spread in spreads if spread > STEADY]
    if moved:
        yield (
            f"{len(moved)} of {len(spreads)} figures moved by more than {STEADY - 1:.0%} from round to round, at most "
            f"{max(moved):.1f}×: the machine had other work, or --rounds are too few."
        )


def _place(point: Point) -> str:
    return f"{point.shape.name} (D {point.shape.dim})"


def _in_words(which: Pass) -> str:
    return "Forward" if which == "forward" else "Forward and backward"
