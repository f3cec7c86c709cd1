"""The Hopper backward with a line left out or moved: the emulator finds it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("ml_dtypes")

from tests.flash.test_hopper_emulated import SOURCE, run

KERNEL, LOADS = "flash/kernels/hopper_backward.py", "flash/kernels/hopper_backward_loads.py"
FAULTS = {
    "dQ added before the last sum was written": (
        KERNEL,
        "            stores_done()  # the next tile adds to the same dQ\n",
        "            pass\n",
        "AssertionError: ",
    ),
    "K given back before the last dQ has read it": (
        KERNEL,
        "        if not ADD_Q:\n",
        "        if True:\n",
        "Race: race on",
    ),
    "dQ of rows that come after the last one, behind it": (
        KERNEL,
        "            place -= (work.end - work.begin) * 2\n",
        "",
        "AssertionError: ",
    ),
    "dS given back before dQ has read it": (
        KERNEL,
        "        dq = warpgroup_mma_wait(1 if LAST else 2, deps=(dq,))\n",
        "        mbarrier.arrive(buffers.ds_empty.index(stage), count=1)\n"
        "        dq = warpgroup_mma_wait(1 if LAST else 2, deps=(dq,))\n",
        "Race: race on",
    ),
    "S without its K": (
        KERNEL,
        "        mbarrier.wait(buffers.k_full.index(slot), phase)\n",
        "",
        "Race: race on",
    ),
    "V brought while the last tile reads it": (
        LOADS,
        "                        mbarrier.wait(buffers.v_empty.index(i), (count & 1) ^ 1)\n",
        "",
        "Race: race on",
    ),
    "V kept": (
        KERNEL,
        "    if LAST:\n        mbarrier.arrive(buffers.v_empty.index(consumer), count=1)\n",
        "",
        "Deadlock: deadlock in attention_backward_hopper",
    ),
    "dQ of a head's last keys forgotten": (
        KERNEL,
        "    if ADD_Q and step > 0:\n",
        "    if ADD_Q and step < 0:\n",
        "AssertionError: dq:",
    ),
}
"""Where, what is in the kernel, what takes its place, and what is to be said about that."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    file, old, new, said = FAULTS[fault]
    shutil.copytree(SOURCE / "flash", tmp_path / "assay/flash")
    text = (tmp_path / "assay" / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / "assay" / file).write_text(text.replace(old, new), encoding="utf-8")
    done = run(tmp_path, "backward", 150)
    assert done.returncode == 1, done.stdout
    assert said in done.stderr
