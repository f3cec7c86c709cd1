"""Colours that stay apart for every kind of colour blindness."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from assay.report.palette import DARK, LIGHT, MARKERS

# Machado, Oliveira and Fernandes (2009), full severity; the first is normal vision.
SEEN = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(light, 0, 1) / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    low, high = sorted(float((TO_XYZ @ linear(colour))[1]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("eye", SEEN)
@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_are_told_apart(colours: tuple[str, ...], eye: str) -> None:
    seen = [lab(np.array(SEEN[eye]) @ linear(colour)) for colour in colours]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 10


@pytest.mark.parametrize(("colours", "ground"), [(LIGHT, "#fcfcfa"), (DARK, "#14171c")])
def test_colours_stand_out_from_the_ground(colours: tuple[str, ...], ground: str) -> None:
    assert all(contrast(colour, ground) >= 3 for colour in colours)


def test_a_marker_for_every_colour() -> None:
    assert len(MARKERS) == len(LIGHT) == len(DARK) == len(set(MARKERS))
