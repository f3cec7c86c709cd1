"""Inputs at which rounding goes wrong if it goes wrong anywhere."""

from __future__ import annotations

import numpy as np

from .oracles import NUMPY_DTYPES
from .twins import Array


@np.errstate(invalid="ignore")  # signalling NaN among the codes
def code_points(name: str) -> Array:
    """Every value that the numpy dtype of format `name` can hold, infinities and NaN included, as float64."""
    dtype = np.dtype(NUMPY_DTYPES[name])
    bits = {"fp6_e2m3": 6, "fp6_e3m2": 6, "fp4_e2m1": 4}.get(name, 8 * dtype.itemsize)
    codes: Array = np.arange(1 << bits, dtype=f"u{dtype.itemsize}").view(dtype)
    return codes.astype(np.float64)


@np.errstate(all="ignore")
def probes(name: str, carrier: type[np.floating]) -> Array:
    """The code points, the midpoints between them and beyond them, and the neighbours of all these."""
    values = code_points(name)
    finite = np.unique(values[np.isfinite(values)])
    step = finite[-1] - finite[-2]
    beyond = finite[-1] + step * np.array([0.5, 1.0, 1.5, 2.0, 100.0])
    middles = np.concatenate([(finite[1:] + finite[:-1]) / 2, beyond, -beyond])
    exact = np.concatenate([values, middles]).astype(carrier)
    above = np.nextafter(exact, carrier(np.inf))
    below = np.nextafter(exact, carrier(-np.inf))
    return np.concatenate([exact, above, below, special_values(carrier)])


def special_values(carrier: type[np.floating]) -> Array:
    """Zeros, infinities, NaN, and the ends of the carrier's own range."""
    info = np.finfo(carrier)
    ends = [0.0, np.inf, np.nan, float(info.max), float(info.tiny), float(info.smallest_subnormal)]
    return np.array([*ends, *(-v for v in ends)], dtype=carrier)


def random_bits(count: int, carrier: type[np.floating], seed: int = 0) -> Array:
    """Bit patterns drawn uniformly: every exponent, and NaN with all kinds of payloads."""
    width = np.dtype(carrier).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(count * width), dtype=carrier).copy()
