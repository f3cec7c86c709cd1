"""Colours, markers and dashes that the page and the image files share.

The colours stay apart for every kind of colour blindness (a test simulates them); a marker and a dash say the same.
"""

from __future__ import annotations

LIGHT = ("#0072B2", "#D55E00", "#009E73", "#C56E9F", "#2B2B33", "#7A3FE0", "#8A1C1C", "#1B1F7A")
"""On a white ground."""
DARK = ("#58B4F0", "#FF8A4C", "#2FC79B", "#E889C4", "#E6E9EF", "#9B7BFF", "#F2E24B", "#B5651D")
"""On a dark ground."""
HEAT = ("#eaf3f9", LIGHT[0], "#0b1a2a")
"""From low to high, on a white ground; the page's own are in its style."""
MARKERS = (("circle", "o"), ("square", "s"), ("diamond", "D"), ("triangle-up", "^"), ("x", "X"), ("cross", "P"),
           ("triangle-down", "v"), ("star", "*"))  # fmt: skip
"""Plotly's and Matplotlib's names of one marker, by colour."""
DASHES = (("solid", "-"), ("dash", "--"), ("dot", ":"), ("dashdot", "-."))
"""Plotly's and Matplotlib's names of one dash."""


def css() -> str:
    """The colours as CSS variables, which the page's script reads too."""
    light = "".join(f"--series-{i}:{colour};" for i, colour in enumerate(LIGHT))
    dark = "".join(f"--series-{i}:{colour};" for i, colour in enumerate(DARK))
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root:not([data-print]){{{dark}}}}}"
