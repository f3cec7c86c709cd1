"""What compiled kernels look like, read without a GPU: Triton brings ptxas and nvdisasm."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_GUARD = re.compile(r"^@!?U?P\w+\s+")
_WRITES = re.compile(r"U(?!TMA|BLKCP|CGABAR)[A-Z]|R2UR|S2UR|VOTEU|REDUX|LDCU")
_PRODUCT = re.compile(r"\wGMMA\.64x(\d+)x\d+\.F(32|16)\S* R(\d+), (?:R(\d+), )?")
_NO_RESULT = re.compile(r"ST|RED\b|RET|BR|CALL|WARPSYNC|NANOSLEEP|\w*SETP|PLOP")
_OF_A, _THREADS = 4, 128
"""Registers of A that a product reads, threads that have its result."""


class _Offline:
    """As much of a driver as compiling for an H100 or H200 takes."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """Inside, kernels are compiled for Hopper instead of launched; they are added to the list."""
    kernels: list[Any] = []

    def launch(self: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: kernels.append(self.run(*args, grid=grid, warmup=True, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", launch)
        patch.setattr(driver, "_active", _Offline())
        yield kernels


class Code(NamedTuple):
    """Of one kernel."""

    instructions: list[str]
    targets: list[list[int]]
    """Of each instruction, those that may follow it."""


def code_of(kernel: Any) -> Code:
    """The machine code."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        listing = subprocess.run(
            [TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True
        ).stdout  # fmt: skip
    return read(listing)


def read(listing: str) -> Code:
    """A listing of nvdisasm's."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(found[1])
    targets = []
    for i, text in enumerate(instructions):
        bare = _GUARD.sub("", text)
        after = [i + 1]
        if bare.startswith(("BRA", "EXIT", "RET")):
            always = bare == text and not re.match(r"BRA\S*\s+!?U?P\d", bare) and "BRA.DIV" not in bare
            after = [] if always else after
        if bare.startswith("BRX"):  # a table of places: a partition each
            after = [labels[name] for name in re.findall(r"\.L\w+", bare)]
        if bare.startswith(("BRA", "CALL")):
            after += [labels[name] for name in re.findall(r"`\((\.L\w+)\)", bare) if name in labels]
        targets.append([each for each in after if each < len(instructions)])
    return Code(instructions, targets)


def unset(code: Code) -> list[str]:
    """Instructions that read a uniform register which some way to them has not set.

    ptxas 12.8 has made such code of two products in the two arms of an `if`.
    """
    uses = [_registers(text) for text in code.instructions]
    known: list[frozenset[int] | None] = [None] * len(uses)
    known[0] = frozenset()
    left = [0]
    while left:
        i = left.pop()
        before = known[i]
        assert before is not None
        after = before | uses[i][0]
        for target in code.targets[i]:
            now = known[target]
            meeting = after if now is None else now & after
            if meeting != now:
                known[target] = meeting
                left.append(target)
    return [
        text
        for text, (_, read), before in zip(code.instructions, uses, known, strict=True)
        if before is not None and read - before
    ]


def _registers(text: str) -> tuple[set[int], set[int]]:
    """Uniform registers that it writes, and that it reads."""
    bare = _GUARD.sub("", text)
    name, _, rest = bare.partition(" ")
    operands = rest.split(",")
    if "GMMA" in name:
        read = set()
        for first in re.findall(r"gdesc\[UR(\d+)\]", rest):  # two descriptors; one, if A is in registers
            in_registers = re.match(r"\s*R\d+, R\d+, gdesc", rest) is not None
            read |= {int(first) + i for i in range(2 if in_registers else 0, 4)}
        return set(), read
    if _WRITES.match(name) and _UNIFORM.search(operands[0]):
        first = int(_UNIFORM.findall(operands[0])[0])
        wide = {first + 1} if re.search(r"64|WIDE", name) else set()
        return {first} | wide, {int(x) for x in _UNIFORM.findall(",".join(operands[1:]))}
    return set(), {int(x) for x in _UNIFORM.findall(rest)}


class Group(NamedTuple):
    """Products that are waited for together: the registers that they read A from, those that they sum in."""

    read: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()
    closed: bool = False


def hurried(code: Code) -> list[str]:
    """Instructions that write registers which a product under way may still read, or touch those that it sums in.

    ptxas 12.8 has made such code where A's name gets another value in an arm of an `if` that comes before the wait.
    """
    known: list[set[tuple[Group, ...]]] = [set() for _ in code.instructions]
    known[0].add(())
    left: list[tuple[int, tuple[Group, ...]]] = [(0, ())]
    found = set()
    while left:
        i, groups = left.pop()
        bare = _GUARD.sub("", code.instructions[i])
        if product := _PRODUCT.match(bare):
            groups = _with(groups, product, "gsb0" in bare)
        elif wait := re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", bare):
            groups = groups[len(groups) - min(int(wait[1], 16), len(groups)) :]
        else:
            written = _written(bare)
            named = {int(x) for x in re.findall(r"\bR(\d+)\b", bare)}
            if any(written & group.read or (written | named) & group.sums for group in groups):
                found.add(i)
        assert len(groups) < 8, "products that nobody waits for"
        for target in code.targets[i]:
            if groups not in known[target]:
                known[target].add(groups)
                left.append((target, groups))
    return [code.instructions[i] for i in sorted(found)]


def _with(groups: tuple[Group, ...], product: re.Match[str], closed: bool) -> tuple[Group, ...]:
    """One more product: of the last group, if that is not closed."""
    columns, bits, first, a = product.groups()
    sums = range(int(first), int(first) + 64 * int(columns) * int(bits) // (32 * _THREADS))
    read = range(int(a), int(a) + _OF_A) if a else ()
    last = Group()
    if groups and not groups[-1].closed:
        groups, last = groups[:-1], groups[-1]
    return *groups, Group(last.read.union(read), last.sums.union(sums), closed)


def _written(bare: str) -> set[int]:
    """Registers that an instruction without its guard writes."""
    name, _, rest = bare.partition(" ")
    if _NO_RESULT.match(name):
        return set()
    operands = [each.strip() for each in rest.split(",")]
    result = next((each for each in operands if not re.fullmatch(r"!?U?P\w+", each)), "")
    first = re.fullmatch(r"R(\d+)(\.\w+)?", result)
    if first is None:
        return set()
    wide = 1
    if re.search(r"\.64\b|WIDE|^CS2R(?!\.32)", name):
        wide = 2
    elif re.search(r"\.128\b|^LDSM.*\.4$", name):
        wide = 4
    elif re.search(r"^LDSM.*\.2$", name):
        wide = 2
    return set(range(int(first[1]), int(first[1]) + wide))


def spills(code: Code) -> list[str]:
    """Registers stored and loaded again in every turn of a loop that multiplies matrices.

    Not those that a branch leads past: a mask's code is such a place.
    """
    spans = [(to, i) for i, after in enumerate(code.targets) for to in after if to <= i]
    found = []
    for first, last in spans:
        inside = any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
        if inside or not any("GMMA" in text for text in code.instructions[first : last + 1]):
            continue
        past = {
            place
            for i in range(first, last + 1)
            for to in code.targets[i]
            if i + 1 < to <= last
            for place in range(i + 1, to)
        }
        found += [
            text
            for i, text in enumerate(code.instructions[first : last + 1], first)
            if text.startswith(("LDL", "STL")) and i not in past
        ]
    return found


def repurposed(code: Code) -> list[str]:
    """Instructions that read or write as numbers what was made a barrier of the copy engine's.

    Triton gives the place of a barrier that nobody uses to others. But the GPU knows it as a barrier: when another
    process has had its turn, the place has a new barrier's bits again, whatever was written there. Places are told by
    the constant in an address (single bytes are Triton's own, beside registers of another kind).
    """
    offset = re.compile(r"\[[^]]*\+0x([0-9a-f]+)\]")
    places = [(text, int(at[1], 16)) for text in code.instructions if (at := offset.search(text))]
    made = {place for text, place in places if "SYNCS.EXCH" in text}
    found = []
    for text, place in places:
        name = _GUARD.sub("", text).split()[0]
        if not re.match(r"(LDS|STS|LDSM|STSM|ATOMS)\b", name) or ".U8" in name:
            continue
        width = 16 if ".128" in name or "SM" in name else 8 if ".64" in name else 4
        if any(barrier < place + width and place < barrier + 8 for barrier in made):
            found.append(text)
    return found


def complaints(kernel: Any) -> list[str]:
    """ptxas's about the pipeline of products ("serialized")."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(kernel.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(path), "-o", f"{folder}/kernel.cubin"]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in (told.stdout + told.stderr).splitlines() if "serialized" in line]
