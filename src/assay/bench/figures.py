"""What was measured of one shape, and what follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from assay.bench.contenders import STANDARD
from assay.bench.shapes import Pass, Shape


@dataclass(kw_only=True, slots=True)
class Figure:
    """One contender, forward or forward and backward."""

    contender: str
    flash: bool
    which: Pass
    samples: list[float] = field(default_factory=list)
    """Seconds of a call, one for each round."""
    graph_samples: list[float] = field(default_factory=list)
    """The same as a CUDA graph."""
    graph_reason: str | None = None
    """Why there is no graph, where one was wanted."""
    peak_bytes: int | None = None
    """Memory at the peak of a call, above its inputs."""
    reason: str | None = None
    """Why there are no samples, or no more of them."""

    @property
    def seconds(self) -> float | None:
        """The median, called from Python; None where there is nothing."""
        return median(self.samples)

    @property
    def graph_seconds(self) -> float | None:
        """The median as a CUDA graph."""
        return median(self.graph_samples)


@dataclass(kw_only=True, slots=True)
class Point:
    """All contenders on one shape. Filled while it is measured, so that a run cut short still has something."""

    shape: Shape
    dtype: str
    figures: list[Figure] = field(default_factory=list)
    ceiling_flops: float = 0.0
    """Arithmetic of the large matrix product."""
    ceiling_samples: list[float] = field(default_factory=list)
    """Its seconds, one for each round."""
    input_sets: int = 0
    reason: str | None = None
    """Why nothing was measured."""

    @property
    def ceiling(self) -> float | None:
        """FLOP/s of the large matrix product; None where it was not measured."""
        seconds = median(self.ceiling_samples)
        return None if seconds is None else self.ceiling_flops / seconds

    def of(self, which: Pass) -> list[Figure]:
        """The figures of one pass."""
        return [figure for figure in self.figures if figure.which == which]

    def named(self, contender: str, which: Pass) -> Figure | None:
        """The figure of one contender, if it was measured."""
        return next((f for f in self.of(which) if f.contender == contender and f.seconds is not None), None)

    def flop_rate(self, figure: Figure) -> float | None:
        """FLOP/s."""
        return _over(self.shape.flops(figure.which), figure.seconds)

    def ceiling_share(self, figure: Figure) -> float | None:
        """Of the large matrix product's FLOP/s."""
        rate = self.flop_rate(figure)
        return None if rate is None else _over(rate, self.ceiling)

    def token_rate(self, figure: Figure) -> float | None:
        """Queries a second, of all sequences."""
        return _over(self.shape.tokens, figure.seconds)

    def over_standard(self, figure: Figure) -> float | None:
        """Times as fast as standard attention."""
        standard = self.named(STANDARD, figure.which)
        return None if standard is None or standard.seconds is None else _over(standard.seconds, figure.seconds)

    def best_other(self, figure: Figure) -> Figure | None:
        """The fastest of all others."""
        return fastest(other for other in self.of(figure.which) if other is not figure)

    def over_best_other(self, figure: Figure) -> float | None:
        """Times as fast as the fastest of all others."""
        best = self.best_other(figure)
        return None if best is None or best.seconds is None else _over(best.seconds, figure.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            **asdict(self.shape),
            "name": self.shape.name,
            "dtype": self.dtype,
            "tokens": self.shape.tokens,
            "input_sets": self.input_sets,
            "matmul_tflops": in_tera(self.ceiling),
            "reason": self.reason,
            "figures": [self._figure_as_dict(figure) for figure in self.figures],
        }

    def _figure_as_dict(self, figure: Figure) -> dict[str, Any]:
        best = self.best_other(figure)
        return {
            "contender": figure.contender,
            "flash": figure.flash,
            "pass": figure.which,
            "reason": figure.reason,
            "seconds": figure.seconds,
            "tflops": in_tera(self.flop_rate(figure)),
            "ceiling_share": self.ceiling_share(figure),
            "peak_bytes": figure.peak_bytes,
            "tokens_per_second": self.token_rate(figure),
            "over_standard": self.over_standard(figure),
            "over_best_other": self.over_best_other(figure),
            "best_other": None if best is None else best.contender,
            "flops": self.shape.flops(figure.which),
            "samples": figure.samples,
            "graph_seconds": figure.graph_seconds,
            "graph_samples": figure.graph_samples,
            "graph_reason": figure.graph_reason,
        }


def fastest(figures: Any) -> Figure | None:
    """Of those that were measured."""
    return min((f for f in figures if f.seconds is not None), key=lambda f: f.seconds, default=None)


def median(samples: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.median(samples) if samples else None


def in_tera(rate: float | None) -> float | None:
    """FLOP/s as TFLOP/s."""
    return None if rate is None else rate / 1e12


def _over(above: float, below: float | None) -> float | None:
    return above / below if below else None
