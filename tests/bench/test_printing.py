from __future__ import annotations

import io

import pytest
from rich.console import Console

from assay.bench.memory import in_units
from assay.bench.outcome import Outcome
from assay.bench.printing import show
from assay.bench.profiling import Part, Profile
from tests.bench.samples import Seconds, point

NAMES: Seconds = {"assay": [0.0001234], "SDPA flash (FA2)": [0.00123], "standard": [0.123456]}


def shown(outcome: Outcome, width: int = 100) -> str:
    file = io.StringIO()
    show(outcome, Console(file=file, width=width))
    return file.getvalue()


def test_a_table_fits_100_columns_and_cuts_nothing() -> None:
    made = point(NAMES)
    for figure in made.figures:
        figure.graph_samples.append(0.000056)
    text = shown(Outcome("cuda", "bf16", 10, [made]))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert "N 512, D 128: batch 2, 4 heads, causal, bf16; matmul 1000 TFLOP/s" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("assay"))
    assert row.split()[1:3] == ["0.123", "0.0560"]
    assert row.split()[-2:] == ["1000.45", "9.97"]


def test_figures_of_a_column_are_aligned() -> None:
    rows = [
        line
        for line in shown(Outcome("cuda", "bf16", 10, [point(NAMES)])).splitlines()
        if line.strip() and "3.0 MiB" in line
    ]
    assert len(rows) == 3
    assert len({line.index(".") for line in rows}) == 1  # the first figure is the time


def test_reasons_stand_below_the_table() -> None:
    made = point(NAMES)
    made.figures[1].samples.clear()
    made.figures[1].reason = "D must be [8]"
    made.figures[2].samples.clear()
    made.figures[0].graph_reason = "it synchronizes"
    text = shown(Outcome("cuda", "bf16", 10, [made]))
    assert "SDPA flash (FA2), forward: D must be [8]" in text
    assert "standard, forward: not reached" in text
    assert "assay cannot be captured as a CUDA graph: it synchronizes" in text


@pytest.mark.parametrize(
    ("share", "judged"), [(0.95, "95.0% of the GPU's time, as wanted"), (0.5, "below the 90% wanted")]
)
def test_a_profile_is_judged(share: float, judged: str) -> None:
    parts = [Part("attention_forward", share, 0.001, 1.0), *(Part(f"other {i}", 0.01, 1e-5, 2.0) for i in range(9))]
    text = shown(Outcome("cuda", "bf16", 10, [], [Profile("N 512", parts, share)]))
    assert judged in text
    assert "attention_forward" in text
    assert "2 more" in text


def test_sizes_in_words() -> None:
    assert [in_units(x) for x in (0, 1023, 1024, 5 * 2**20, 26 * 2**30, 5000 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "26 GiB",
        "5000 GiB",
    ]
