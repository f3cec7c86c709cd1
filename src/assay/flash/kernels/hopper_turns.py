"""Hand-overs by barriers of the hardware, where a warp that arrives does not wait for the other three.

Consumers of a CTA that take turns at the tensor cores; stages of shared memory that they give back to the producer.
(For an mbarrier one thread arrives, and Triton has the warpgroup meet before: short loops lose up to 5% by it.)
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl


@gluon.constexpr_function
def _bar(kind, number):
    """PTX. Of the hardware's 16 barriers Triton takes the first ones, a few for each partition; turns take three."""
    return f"bar.{kind} {8 + number}, 256; mov.u32 $0, 0;"


@gluon.constexpr_function
def _stage_bar(kind, consumers):
    """PTX: the barrier of the number that is given, for the consumers and the producer."""
    return f"bar.{kind} $1, {128 * (consumers + 1)}; mov.u32 $0, 0;"


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


@gluon.jit
def give_back(stage, SHAPE: gl.constexpr):
    """A consumer has read what is in a stage of K and V; the barriers of up to four come after those of turns."""
    gl.inline_asm_elementwise(
        _stage_bar("arrive", SHAPE.consumers), "=r,r", [stage + 11], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_all(stage, SHAPE: gl.constexpr):
    """The producer, until all consumers have given a stage back."""
    gl.inline_asm_elementwise(
        _stage_bar("sync", SHAPE.consumers), "=r,r", [stage + 11], dtype=gl.int32, is_pure=False, pack=1
    )
