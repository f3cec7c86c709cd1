"""The paper's Figures 3 to 6 and the figures it lacks, each from the records of one sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from assay.report.charts import Chart
from assay.report.drawing import Sketch, categories, column, ratio, variants
from assay.results.record import Record

_DIFFERENCE = "largest |flash − baseline|"


class Section(NamedTuple):
    """Figures that stand under one heading, all from one sweep."""

    anchor: str
    title: str
    text: str
    sweep: str
    figures: tuple[Callable[[Sequence[Record]], Chart | None], ...]


def _of(rows: Sequence[Record], sweep: str) -> list[Record]:
    return [row for row in rows if row["sweep"] == sweep]


def figure_3(rows: Sequence[Record]) -> Chart | None:
    """The difference between flash and baseline, by format."""
    if not (rows := _of(rows, "precision")):
        return None
    return Chart(
        anchor="figure-3",
        title="Figure 3: the difference between flash and baseline, by number format",
        caption="Largest absolute difference between the two outputs. The paper sees it fall from BF16 to FP64.",
        x_title="format, by mantissa bits",
        y_title=_DIFFERENCE,
        kind="line",
        categories=categories(rows, "format"),
        variants=variants(rows, Sketch("format", {"flash against baseline": column("difference_max")})),
    )


def figure_4(rows: Sequence[Record]) -> Chart | None:
    """The errors of flash and of the baseline against golden, by format."""
    if not (rows := _of(rows, "precision")):
        return None
    sketch = Sketch(
        "format",
        {"flash": column("error_max"), "baseline": column("baseline_error_max")},
        aside=("Flash over baseline", ratio("error_max", "baseline_error_max")),
    )
    return Chart(
        anchor="figure-4",
        title="Figure 4: the error against golden, by number format",
        caption="Largest absolute error of each against attention in FP64 on the same inputs. "
        "The paper sees flash about 10× further away at BF16. In FP64 the baseline is golden itself.",
        x_title="format, by mantissa bits",
        y_title="largest |error|",
        kind="bar",
        categories=categories(rows, "format"),
        variants=variants(rows, sketch),
    )


def figure_5a(rows: Sequence[Record]) -> Chart | None:
    """The largest difference against sequence length."""
    if not (rows := _of(rows, "length")):
        return None
    return Chart(
        anchor="figure-5a",
        title="Figure 5a: the largest difference, by sequence length",
        caption="Flash against baseline at a fixed block. The paper sees it grow with the sequence.",
        x_title="sequence length",
        y_title=_DIFFERENCE,
        kind="line",
        x_log=True,
        variants=variants(rows, Sketch("length", {"max": column("difference_max")}, ("format",))),
    )


def figure_5b(rows: Sequence[Record]) -> Chart | None:
    """Mean and standard deviation of the difference against sequence length."""
    if not (rows := _of(rows, "length")):
        return None
    measures = {"mean": column("difference_mean"), "standard deviation": column("difference_std")}
    return Chart(
        anchor="figure-5b",
        title="Figure 5b: mean and standard deviation of the difference, by sequence length",
        caption="Flash against baseline: the mean of its size, and the standard deviation of the signed difference.",
        x_title="sequence length",
        y_title="flash − baseline",
        kind="line",
        x_log=True,
        variants=variants(rows, Sketch("length", measures, ("format",))),
    )


def length_ratio(rows: Sequence[Record]) -> Chart | None:
    """The error of flash over that of the baseline, against sequence length."""
    if not (rows := _of(rows, "length")):
        return None
    measures = {"ratio": ratio("error_max", "baseline_error_max")}
    return Chart(
        anchor="length-ratio",
        title="The error of flash over that of the baseline, by sequence length",
        caption="Both against golden. Above 1, flash is the less accurate of the two; below 1, the more accurate.",
        x_title="sequence length",
        y_title="largest error, flash / baseline",
        kind="line",
        x_log=True,
        reference=1.0,
        variants=variants(rows, Sketch("length", measures, ("plan", "format"))),
    )


def _blocks(rows: Sequence[Record], shapes: Sequence[str], series: tuple[str, ...], **texts: str) -> Chart | None:
    rows = [row for row in _of(rows, "blocks") if row["block_rows"] and row["block_columns"]]
    rows = [row for row in rows if row["block_shape"] in shapes]
    if len({row["block_shape"] for row in rows}) < len(shapes):
        return None
    return Chart(
        x_title="block area, rows × columns",
        y_title=_DIFFERENCE,
        kind="line",
        x_log=True,
        variants=variants(rows, Sketch("area", {"max": column("difference_max")}, series)),
        **texts,  # type: ignore[arg-type]
    )


def figure_6a(rows: Sequence[Record]) -> Chart | None:
    """Blocks with rows and columns swapped."""
    return _blocks(
        rows,
        ("paper", "swapped"),
        ("block shape",),
        anchor="figure-6a",
        title="Figure 6a: blocks with rows and columns swapped",
        caption="Flash against baseline, by the area of the block. The paper sees a larger difference when swapped.",
    )


def figure_6b(rows: Sequence[Record]) -> Chart | None:
    """Square blocks."""
    return _blocks(
        rows,
        ("paper", "square"),
        ("block shape",),
        anchor="figure-6b",
        title="Figure 6b: square blocks",
        caption="Flash against baseline, by the area of the block. The paper sees no significant change.",
    )


def figure_6c(rows: Sequence[Record]) -> Chart | None:
    """Larger blocks, in every format."""
    return _blocks(
        rows,
        ("paper",),
        ("format",),
        anchor="figure-6c",
        title="Figure 6c: larger blocks",
        caption="Flash against baseline. The paper sees larger blocks lower the difference: "
        "fewer blocks mean fewer rescalings.",
    )


def inputs_figure(rows: Sequence[Record]) -> Chart | None:
    """The error ratio by distribution of the inputs."""
    if not (rows := _of(rows, "inputs")):
        return None
    # Captured inputs go through real kernels too, which go by their names and not by what they round.
    rows = [row if row["variant"] == "flash" else row | {"plan": row["variant"]} for row in rows]
    measures = {"ratio": ratio("error_max", "baseline_error_max")}
    return Chart(
        anchor="inputs",
        title="The error of flash over that of the baseline, by inputs",
        caption="Both against golden. Bars start at 1, where the two are equally far away: upward, flash is the "
        "less accurate; downward, the more accurate.",
        x_title="inputs",
        y_title="largest error, flash / baseline",
        kind="bar",
        reference=1.0,
        categories=categories(rows, "inputs"),
        variants=variants(rows, Sketch("inputs", measures, ("plan",))),
    )


def kernels_figure(rows: Sequence[Record]) -> Chart | None:
    """The error ratio of real kernels."""
    if not (rows := _of(rows, "kernels")):
        return None
    measures = {"ratio": ratio("error_rmse", "baseline_error_rmse")}
    return Chart(
        anchor="kernels",
        title="The error of real kernels over that of the baseline",
        caption="Root mean square errors against golden, of the output and of the gradients. Bars start at 1, where "
        "kernel and baseline are equally far away.",
        x_title="kernel",
        y_title="RMS error, kernel / baseline",
        kind="bar",
        reference=1.0,
        categories=categories(rows, "variant"),
        variants=variants(rows, Sketch("variant", measures, ("tensor",), implied=("plan",))),
    )


SECTIONS = (
    Section(
        "precision",
        "Number formats",
        "The same inputs in one number format after another.",
        "precision",
        (figure_3, figure_4),
    ),
    Section(
        "length",
        "Sequence length",
        "Longer sequences at a fixed block: more blocks, more rescaling.",
        "length",
        (figure_5a, figure_5b, length_ratio),
    ),
    Section(
        "blocks",
        "Block size and shape",
        "The same problem cut into other blocks.",
        "blocks",
        (figure_6a, figure_6b, figure_6c),
    ),
    Section(
        "inputs-section",
        "Inputs",
        "What the paper leaves out: how much the answer depends on what is fed in.",
        "inputs",
        (inputs_figure,),
    ),
    Section(
        "kernels-section",
        "Real kernels",
        "Shipped kernels of this machine, not our emulation.",
        "kernels",
        (kernels_figure,),
    ),
)
"""In the order of the page."""
