"""Consumers of a CTA that take turns at the tensor cores, by barriers of the hardware.

Consumer c waits at barrier 8 + c: 128 threads that wait and 128 of the one before that arrive. All take equally many
turns, so `pass_blocks` takes them, too.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl


@gluon.constexpr_function
def _bar(kind, number):
    """PTX. Of the hardware's 16 barriers Triton takes the first ones, a few for each partition."""
    return f"bar.{kind} {8 + number}, 256; mov.u32 $0, 0;"


@gluon.jit
def named_barrier(kind: gl.constexpr, number: gl.constexpr):
    """Of two warpgroups: one waits ("sync"), the other goes on ("arrive")."""
    gl.inline_asm_elementwise(_bar(kind, number), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(consumer: gl.constexpr, SHAPE: gl.constexpr):
    """At the tensor cores: one after the other, block by block."""
    if SHAPE.turns:
        named_barrier("sync", consumer)


@gluon.jit
def pass_turn(consumer: gl.constexpr, SHAPE: gl.constexpr):
    """To the next consumer."""
    if SHAPE.turns:
        named_barrier("arrive", (consumer + 1) % SHAPE.consumers)
