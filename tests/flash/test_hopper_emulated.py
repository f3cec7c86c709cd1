"""The Hopper kernels run on the CPU, by the emulator of tests/gluon: numbers, races, deadlocks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import assay

pytest.importorskip("ml_dtypes")

SOURCE = Path(assay.__file__).parent
KERNEL, SOFTMAX = "hopper_forward.py", "hopper_softmax.py"
ARRIVE = "        mbarrier.arrive(buffers.empty.index(stage), count=1)\n"
TURN = "        take_turn(consumer, SHAPE)\n        s ="
WAIT = "        output = warpgroup_mma_wait(0, deps=(output,))\n"
FAULTS = {
    "V given back before it was read": ("forward", KERNEL, WAIT + ARRIVE, ARRIVE + WAIT, "Race: race on"),
    "no wait for K and V": (
        "forward",
        KERNEL,
        "        mbarrier.wait(buffers.full.index(stage), phase)\n" + TURN,
        TURN,
        "Race: race on",
    ),
    "an arrival forgotten": (
        "forward",
        KERNEL,
        "    mbarrier.arrive(buffers.empty.index(stage), count=1)\n    pass_blocks",
        "    pass_blocks",
        "Deadlock: deadlock in attention_forward_hopper",
    ),
    "a key too few": ("forward", SOFTMAX, "position + span.right)", "position + span.right - 1)", "AssertionError: "),
    "a slope in 16 bits": (
        "leaning",
        "hopper_alibi.py",
        "column == 1, small,",
        "column == 1, 0.0,",
        "AssertionError: lse",
    ),
    "ALiBi counted from where the tile begins": (
        "consumers",
        KERNEL,
        "tilt = slope * (rows - first)",
        "tilt = slope * (rows - work.first_row)",
        "other bits",
    ),
    "a slope past them": (
        "leaning",
        KERNEL,
        "slope = bounded(slope, scores)",
        "slope = slope * 1.0",
        "AssertionError: ",
    ),
    "keys ahead that lean as those behind": (
        "leaning",
        KERNEL,
        "slope, turned(lean))",
        "slope, lean)",
        "AssertionError: ",
    ),
    "a block that is not all ahead": (
        "leaning",
        "hopper_tiles.py",
        "gl.maximum(position + ROWS - 1, 0), COLUMNS)",
        "gl.maximum(position, 0), COLUMNS)",
        "AssertionError: ",
    ),
    "a block that is not all behind": (
        "leaning",
        "hopper_tiles.py",
        "gl.maximum(position + 1, 0) // COLUMNS",
        "gl.maximum(position + ROWS, 0) // COLUMNS",
        "AssertionError: ",
    ),
    "a slope in 16 bits, backward": (
        "leaning_backward",
        "hopper_alibi.py",
        "column % 4 == 1, small,",
        "column % 4 == 1, 0.0,",
        "AssertionError: ",
    ),
    "the slope of the head before": (
        "leaning_backward",
        "hopper_backward.py",
        "            slope, lean = slope_of(",
        "            slope, _ = slope_of(",
        "AssertionError: ",
    ),
    "S before its last step": (
        "leaning_backward",
        "hopper_backward.py",
        "s0 = warpgroup_mma_wait(2 + LEANING",
        "s0 = warpgroup_mma_wait(3 + LEANING",
        "EmuError: ",
    ),
    "P's second line": (
        "fp8_corners",
        "hopper_fp8_softmax.py",
        "mov.b32 second, 0x62886288;",
        "mov.b32 second, 0x60006000;",
        "AssertionError: out",
    ),
    "V's scale of the block before": (
        "fp8_corners",
        "hopper_fp8.py",
        "by_row(state.output, state.factor * state.v_ratio) + product",
        "by_row(state.output, state.factor) + product",
        "AssertionError: out",
    ),
    "what came before as it was": (
        "fp8_corners",
        "hopper_fp8_softmax.py",
        "gl.exp2(state.reference - reference)",
        "gl.exp2(0.0 * reference)",
        "AssertionError: ",
    ),
    "a slope of 0": (
        "fp8_corners",
        "hopper_fp8_softmax.py",
        "2.0**-24), 65504.0",
        "0.0), 65504.0",
        "AssertionError: out",
    ),
    "no key so far, then scores far below 0": (
        "fp8_corners",
        "hopper_fp8_softmax.py",
        "latest, reference)\n",
        "0.0, reference)\n",
        "AssertionError: out",
    ),
    "a block far below the maximum": (
        "fp8_corners",
        "hopper_fp8_softmax.py",
        "unit, 8000.0)",
        "unit, 0.0)",
        "AssertionError: ",
    ),
    "the centre of a row without keys": (
        "fp8",
        "hopper_fp8.py",
        "share = gl.where(row_sum == 0.0, 0.0, others / row_sum)",
        "share = others / row_sum",
        "AssertionError: out",
    ),
    "the centre added to the first block": (
        "fp8",
        "hopper_fp8.py",
        "gl.where(work.begin == 0, others, row_sum)",
        "row_sum",
        "AssertionError: out",
    ),
    "scores beyond FP16": (
        "fp8_corners",
        "hopper_fp8_softmax.py",
        "largest > FAR",
        "largest > 1e9",
        "AssertionError: ",
    ),
}
"""The kind of calls, the file, what is in it, what takes its place, and what is to be said about that."""


def run(sources: Path, kind: str, cases: int) -> subprocess.CompletedProcess[str]:
    """A process of its own, since there torch answers for a card that is not there."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.flash.emulated_attention", str(sources), kind, str(cases)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("forward", 40),
        ("negative", 8),
        ("leaning", 10),
        ("consumers", 10),
        ("backward", 30),
        ("leaning_backward", 10),
        ("fp8", 15),
        ("fp8_corners", 25),
    ],
)
def test_random_calls(kind: str, cases: int) -> None:
    done = run(SOURCE.parent, kind, cases)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{cases} cases"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    kind, file, old, new, said = FAULTS[fault]
    shutil.copytree(SOURCE / "flash", tmp_path / "assay/flash")
    kernel = tmp_path / "assay/flash/kernels" / file
    text = kernel.read_text(encoding="utf-8")
    assert old in text
    kernel.write_text(text.replace(old, new), encoding="utf-8")
    done = run(tmp_path, kind, 25 if kind in ("fp8_corners", "leaning") else 10)
    assert done.returncode == 1
    assert said in done.stderr
