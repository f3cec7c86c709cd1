"""Loops of which Triton would carry other names than Python does: the emulator refuses them."""

from __future__ import annotations

import ast

import pytest

pytest.importorskip("ml_dtypes")

from tests.gluon.carries import check_loops
from tests.gluon.errors import EmuError

KERNEL = """
@gluon.jit
def kernel(tiles):
    early = 0
    late = {start}
    for tile in range(tiles):
        late = early
        early = tile > 3
    return late
"""


def test_a_name_that_begins_as_another_is_refused() -> None:
    with pytest.raises(EmuError, match="the loop changes `late`, and Triton does not see it"):
        check_loops(ast.parse(KERNEL.format(start="early")), "kernel.py")


def test_a_name_with_a_value_of_its_own_is_carried() -> None:
    check_loops(ast.parse(KERNEL.format(start="1")), "kernel.py")


def test_other_functions_may_do_as_they_like() -> None:
    check_loops(ast.parse(KERNEL.format(start="early").replace("@gluon.jit", "@cache")), "kernel.py")
