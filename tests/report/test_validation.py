from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.report.validation import page, write_page


def row(**changes: Any) -> dict[str, Any]:
    return {
        "kernel": "a kernel",
        "format": "bf16",
        "causal": False,
        "shape": (1, 2, 3, 4),
        "distribution": "N(0, 1)",
        "seed": 0,
        "device": "CPU",
        "part": "output",
        "plan": "shipped bf16",
        "tiling": "(64, 64)",
        "kernel_rmse": 1e-4,
        "emulation_rmse": 1.01e-4,
        "shipped_rmse": 1e-4,
        "shipped_ratio": 1.0,
        "notes": ("a <note>",),
        "ratio": 1.01,
        "matches": True,
        "bit_equal": 0.75,
        "ulp_edges": (0.0, 0.5, 1.0),
        "ulp_shares": (0.75, 0.0, 0.2, 0.05),
        **changes,
    }


def test_page_says_what_was_measured() -> None:
    text = page([row(), row(part="dq", ratio=0.8, matches=False)])
    assert "1 of 2 tensors" in text
    assert "Furthest: a kernel, bf16, dq, ratio 0.800" in text
    assert "CPU, (batch, heads, length, dim) = (1, 2, 3, 4), inputs N(0, 1), seed 0" in text
    assert "<td class='bad'>0.800</td>" in text


def test_text_is_escaped() -> None:
    text = page([row(kernel="<script>alert(1)</script>", plan="a & b <i>")])
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "a &amp; b &lt;i&gt;" in text
    assert "a &lt;note&gt;" in text


def test_page_asks_for_nothing_from_outside() -> None:
    text = page([row()])
    assert "http" not in text
    assert "src=" not in text


def test_no_rows_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        write_page([], tmp_path / "index.html")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_page(tmp_path: Path) -> None:
    target = tmp_path / "index.html"
    write_page([row()], target)
    before = target.read_text()
    with pytest.raises(KeyError):
        write_page([{"kernel": "broken"}], target)
    assert target.read_text() == before
    assert list(tmp_path.iterdir()) == [target]
