# mypy: ignore-errors
"""Inline PTX: straight lines and forward branches."""

from __future__ import annotations

import builtins as _py
import functools
import math
import re

import numpy as np

from tests.gluon.errors import BarrierError, EmuError, Unsupported, current, show, where
from tests.gluon.hopper import fence_async_shared, wait_stores
from tests.gluon.layouts import DotOperandLayout, NVMMADistributedLayout
from tests.gluon.ptx_table import PTX, _f32
from tests.gluon.tensors import Tensor, tensor_of


def _special(name):
    task = current()
    axis = "xyz".find(name[-1])
    if name.startswith("%ctaid"):
        return task.cta.ids[axis]
    if name.startswith("%nctaid"):
        return task.world.grid[axis]
    if name.startswith(("%tid", "%laneid", "%warpid", "%clock", "%globaltimer", "%smid")):
        return 0
    return None


def _bar(op, args):
    """Named barriers: bar.sync id, threads / bar.arrive id, threads."""
    task = current()
    number, threads = (int(str(a), 0) for a in args)
    mine = 32 * task.warps
    state = task.cta.named.setdefault(
        number, {"arrived": 0, "round": 0, "gathered": np.zeros(task.cta.agents, np.int64), "done": None}
    )
    if threads % 32 or state["arrived"] + mine > threads:
        raise BarrierError(f"{op} {number}, {threads}: {state['arrived'] + mine} threads have come\n{show(where())}")
    state["arrived"] += mine
    np.maximum(state["gathered"], task.clock, out=state["gathered"])
    task.tick()
    round_ = state["round"]
    if state["arrived"] == threads:
        state["arrived"], state["round"], state["done"] = 0, round_ + 1, state["gathered"].copy()
    if "sync" in op:
        task.block(
            lambda: state["round"] > round_, lambda: f"named barrier {number}: {state['arrived']} of {threads} threads"
        )
        task.merge(state["done"])
    else:
        task.point()


@functools.lru_cache(256)
def _parsed(asm):
    """Statements: (label, None …) or (guard, negated, op, args)."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", asm, flags=re.S).strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    found = []
    for statement in text.split(";"):
        statement = statement.strip()
        while (label := re.match(r"(\$?\w+):\s*", statement)) is not None:
            found.append((label[1],))
            statement = statement[label.end() :]
        if not statement or statement.startswith(".reg"):
            continue
        guard, negated = None, False
        if (match := re.match(r"@(!?)(\S+)\s+", statement)) is not None:
            negated, guard = match[1] == "!", match[2]
            statement = statement[match.end() :]
        op, _, rest = statement.partition(" ")
        found.append((guard, negated, op, tuple(a.strip() for a in re.findall(r"\s*\{[^}]*\}|[^,]+", rest))))
    return found


@functools.lru_cache(None)
def _instruction(op):
    return next((f for pattern, f in PTX.items() if re.fullmatch(pattern, op)), None)


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _setp(op, a, b):
    _, compare, *_, kind = op.split(".")
    if kind == "f32":
        a, b = _f32(a), _f32(b)
        if compare.endswith("u"):
            return _COMPARE[compare[:-1]](a, b) | np.isnan(a) | np.isnan(b)
        if compare == "ne":
            return (a != b) & ~np.isnan(a) & ~np.isnan(b)
    elif kind.startswith("s"):
        a, b = a.view(np.int32), b.view(np.int32)
    return _COMPARE[compare](a, b)


def _run_ptx(asm, sources, n_out, lanes, tied=()):
    """PTX with forward branches on uint32 arrays; `$i` are outputs, then sources.

    `lanes`: array → (warps, 32, …) or None.
    """
    regs = {f"${n_out + i}": s for i, s in enumerate(sources)}
    regs.update(
        (f"${output}", sources[i]) for i, output in tied
    )  # a constraint "3": it comes in the fourth output's register
    shape = np.shape(sources[0]) if sources else ()
    active, jumped = None, {}  # a mask, or None: all; label → who waits there
    short = asm if len(asm) < 300 else asm[:300] + "…"

    def value(token):
        token = token.strip()
        if token in regs:
            return regs[token]
        if token.startswith("%") and _special(token) is not None:
            return np.full(shape, _special(token), np.uint32)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", token):
            return np.full(shape, int(token[2:], 16), np.uint32)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", token):
            return np.full(shape, int(token.rstrip("U"), 0) & 0xFFFFFFFF, np.uint32)
        if re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", token):
            return np.full(shape, np.float32(token).view(np.uint32), np.uint32)
        raise Unsupported(f"inline PTX: operand {token!r} of {short!r} is not known or not set\n{show(where())}")

    for statement in _parsed(asm):
        if len(statement) == 1:
            back = jumped.pop(statement[0], None)
            if back is not None and active is not None:
                active = active | back
                active = None if np.all(active) else active
            continue
        guard, negated, op, args = statement
        on = active
        if guard is not None:
            p = value(guard)
            p = ~p if negated else p
            on = p if active is None else p & active

        def put(name, new, on=on):
            if on is not None:
                old = regs.get(name, np.zeros(shape, new.dtype))
                new = np.where(on, new, old)
            regs[name] = new

        if op.startswith("bra"):
            jump = np.ones(shape, bool) if on is None else on
            label = args[0]
            if not any(len(x) == 1 and x[0] == label for x in _parsed(asm)[_parsed(asm).index(statement) :]):
                raise Unsupported(f"inline PTX: a branch backwards, to {label}, in {short!r}\n{show(where())}")
            jumped[label] = jump | jumped.get(label, False)
            active = ~jump if active is None else active & ~jump
            continue
        if op.startswith("setp."):
            put(args[0], _setp(op, np.asarray(value(args[1])), np.asarray(value(args[2]))))
            continue
        if op.endswith(".pred") and op.split(".")[0] in ("and", "or", "xor", "not", "mov"):
            xs = [value(a) for a in args[1:]]
            put(
                args[0],
                {
                    "and": lambda x, y: x & y,
                    "or": lambda x, y: x | y,
                    "xor": lambda x, y: x ^ y,
                    "not": lambda x: ~x,
                    "mov": lambda x: x,
                }[op.split(".")[0]](*xs),
            )
            continue
        if op.startswith("selp."):
            put(args[0], np.where(value(args[3]), value(args[1]), value(args[2])))
            continue
        if op.startswith("vote.sync."):
            if lanes is None:
                raise Unsupported(
                    f"inline PTX: {op} on a tensor whose layout gives no order of threads (NVMMADistributedLayout "
                    f"or its DotOperandLayout with 16·warps rows)\n{show(where())}"
                )
            x = value(args[1])
            x = ~value(args[1][1:]) if args[1].startswith("!") else x
            warps = lanes(x)
            how = {"any": np.any, "all": np.all}[op.split(".")[2]]
            put(args[0], np.broadcast_to(how(warps, 1, keepdims=True), warps.shape).reshape(shape))
            continue
        if op.startswith(("bar.", "barrier.")):
            _bar(op, args)
            continue
        if op.startswith("cp.async.bulk.wait_group"):
            wait_stores(current(), int(args[0]), written=".read" not in op)
            continue
        if op.startswith("fence.proxy.async"):
            fence_async_shared()
            continue
        if op.startswith(
            ("fence", "membar", "cp.async.bulk.commit_group", "setmaxnreg", "nanosleep", "griddepcontrol")
        ):
            current().point()
            continue
        if args and args[0].startswith("{"):  # mov.b32 {lo, hi}, x
            parts, x = [a.strip() for a in args[0][1:-1].split(",")], value(args[1])
            bits = 32 // len(parts)
            for i, name in enumerate(parts):
                put(name, (x >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1))
            continue
        if len(args) > 1 and args[1].startswith("{"):  # mov.b32 x, {lo, hi}
            parts = [value(a) for a in args[1][1:-1].split(",")]
            bits = 32 // len(parts)
            out = np.zeros(shape, np.uint32)
            for i, x in enumerate(parts):
                out = out | ((x & np.uint32((1 << bits) - 1)) << np.uint32(bits * i))
            put(args[0], out)
            continue
        fn = _instruction(op)
        if fn is None:
            raise Unsupported(
                f"inline PTX {op!r} is not emulated (in {short!r}): add it to PTX in ptx_table.py, a function of "
                f"the source registers as uint32 arrays\n{show(where())}"
            )
        put(args[0], np.asarray(fn(*(np.asarray(value(a)) for a in args[1:])), np.uint32))
    try:
        return [regs[f"${i}"] for i in range(n_out)]
    except KeyError as error:
        raise Unsupported(f"inline PTX {short!r} sets no {error}\n{show(where())}") from None


@functools.lru_cache(256)
def _thread_order(layout, shape, warps):
    """Elements in the order (warp, lane, register); None where the layout is no wgmma fragment of 16·warps rows."""
    width, mma = 2, layout
    if isinstance(layout, DotOperandLayout) and layout.operand_index == 0:
        width, mma = layout.k_width, layout.parent
    if not isinstance(mma, NVMMADistributedLayout) or len(shape) != 2:
        return None
    rows, columns = shape
    if rows != 16 * warps or columns % (4 * width) or list(mma.warps_per_cta) != [warps, 1]:
        return None
    at = np.arange(rows * columns).reshape(warps, 2, 8, columns // (4 * width), 4, width)
    return at.transpose(0, 2, 4, 3, 1, 5).reshape(-1)


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure=True, pack=1):
    """A thread's elements in groups of `pack`; narrow ones are packed into 32-bit registers, the first lowest.

    The order of a thread's elements is that of wgmma fragments where the layout says so, else that of the tensor.
    """
    warps = current().warps
    many = isinstance(dtype, (tuple, list))
    dtypes = list(dtype) if many else [dtype]
    tensors = [tensor_of(a) for a in args]
    try:
        arrays = np.broadcast_arrays(*(t.a for t in tensors)) if tensors else []
    except ValueError:
        raise EmuError(f"inline_asm_elementwise of shapes {[t.shape for t in tensors]}\n{show(where())}") from None
    shape = arrays[0].shape if arrays else ()
    size = math.prod(shape)
    if size % pack:
        raise EmuError(f"inline_asm_elementwise: {size} elements in groups of {pack}\n{show(where())}")
    layout = next(
        (t.layout for t in tensors if t.layout is not None and t.a.shape == shape),
        next((t.layout for t in tensors if t.layout is not None), None),
    )
    order = lanes = None
    if layout is not None and (pack > 1 or "vote" in asm):
        order = _thread_order(layout, shape, warps)
        if order is not None:
            if size // (32 * warps) % pack:
                raise EmuError(
                    f"inline_asm_elementwise: a thread has {size // (32 * warps)} elements, in groups of {pack}\n"
                    f"{show(where())}"
                )
            lanes = lambda x: x.reshape(warps, 32, -1)  # noqa: E731
    sources = []
    for t, a in zip(tensors, arrays, strict=False):
        if t.dtype.bits > 32:
            raise Unsupported("inline PTX on 64-bit values")
        flat = np.ascontiguousarray(a).reshape(-1)
        sources += _pack((flat if order is None else flat[order]).reshape(-1, pack), t.dtype)
    want = [-(-pack // (32 // _py.max(8, d.bits))) for d in dtypes]
    n_out = constraints.count("=")
    if n_out != _py.sum(want):
        raise EmuError(
            f"inline_asm_elementwise: {n_out} outputs in the constraints, {_py.sum(want)} registers in "
            f"{dtypes} × {pack}\n{show(where())}"
        )
    n_in = len([c for c in constraints.split(",") if c.strip() and "=" not in c and not c.strip().startswith("~")])
    if n_in != len(sources):
        raise EmuError(
            f"inline_asm_elementwise: {n_in} inputs in the constraints, {len(sources)} registers in the "
            f"arguments × {pack}\n{show(where())}"
        )
    inputs = [c.strip() for c in constraints.split(",") if c.strip() and "=" not in c and not c.strip().startswith("~")]
    out = _run_ptx(asm, sources, n_out, lanes, [(i, int(c)) for i, c in enumerate(inputs) if c.isdigit()])
    results = []
    for d, n in zip(dtypes, want, strict=False):
        regs, out = out[:n], out[n:]
        a = _unpack(regs, d, pack, size // pack if sources else 1).reshape(-1)
        if order is not None:
            back = np.empty_like(a)
            back[order] = a
            a = back
        a = a.reshape(shape)
        results.append(Tensor(a if shape else a[()], d, layout))
    return tuple(results) if many else results[0]


def _pack(a, dtype):
    """(groups, pack) → registers, uint32 arrays of (groups,)."""
    raw = a.view(f"u{dtype.itemsize}").astype(np.uint32)
    per, bits = 4 // dtype.itemsize, 8 * dtype.itemsize
    regs = []
    for j in range(0, a.shape[1], per):
        reg = np.zeros(a.shape[0], np.uint32)
        for i in range(j, _py.min(j + per, a.shape[1])):
            reg |= raw[:, i] << np.uint32(bits * (i - j))
        regs.append(reg)
    return regs


def _unpack(regs, dtype, pack, groups):
    per, bits = 4 // dtype.itemsize, 8 * dtype.itemsize
    out = np.zeros((groups, pack), f"u{dtype.itemsize}")
    for i in range(pack):
        mask = np.uint64((1 << bits) - 1)
        out[:, i] = ((np.asarray(regs[i // per]).astype(np.uint64) >> np.uint64(bits * (i % per))) & mask).astype(
            out.dtype
        )
    return out.view(dtype.np)
