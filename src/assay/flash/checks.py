"""What `flash_attention` must be given; everything else is refused here, before anything is launched."""

from __future__ import annotations

import weakref
from itertools import pairwise
from numbers import Integral, Real

import torch

Window = tuple[int | None, int | None]
LARGEST_DIM = 256
FAR = 2**30
"""A window's side beyond all lengths, of which int32 holds the sums."""
_LARGEST_GRID = 65535
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Shapes, dtypes and devices of the three."""
    if type(q) is type(k) is type(v) is torch.Tensor and _are_good(q, k, v):
        return
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have the shape (batch, heads, length, head dimension), got {tuple(x.shape)}. "
                "Packed sequences have a batch of 1: (1, heads, all lengths, head dimension)."
            )
        if x.dtype not in _FLOATS or (x.dtype == torch.float64 and x.device.type != "cpu"):
            raise ValueError(
                f"{name} must be bfloat16, float16 or float32 (on the CPU also float64), got {x.dtype} on {x.device}."
            )
        if not 1 <= x.shape[3] <= LARGEST_DIM:
            raise ValueError(f"{name}'s head dimension must be 1 to {LARGEST_DIM}, got {x.shape[3]}.")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}. Cast them with .to.")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}.")
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"flash_attention runs on cpu and cuda, got tensors on {q.device}.")
    if q.is_cuda and max(q.shape[:2]) > _LARGEST_GRID:
        raise ValueError(
            f"On CUDA there may be {_LARGEST_GRID} sequences and heads at most, got {q.shape[0]} and {q.shape[1]}. "
            "Split the batch, or pack the sequences (cu_seqlens)."
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have one head dimension, got {q.shape[3]} and {k.shape[3]}.")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must have the same batch, heads and length, got {tuple(k.shape)}, {tuple(v.shape)}.")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have one batch size, got {q.shape[0]} and {k.shape[0]}.")
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q's heads must be a multiple of those of k and v (grouped queries), got {q.shape[1]} and {k.shape[1]}."
        )


def _are_good(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """All that is refused by name in one question: most calls are good, and many are short."""
    if not (q.is_cpu and k.is_cpu and v.is_cpu) and not (
        q.is_cuda
        and q.device == k.device == v.device
        and q.dtype is not torch.float64
        and max(q.shape[:2], default=0) <= _LARGEST_GRID
    ):
        return False
    if not (q.layout is k.layout is v.layout is torch.strided) or q.is_nested or k.is_nested or v.is_nested:
        return False
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if not (len(of_q) == len(of_k) == len(of_v) == 4 and q.dtype is k.dtype is v.dtype and q.dtype in _FLOATS):
        return False
    (batch, heads, _, dim), (kv_batch, kv_heads, _, kv_dim) = of_q, of_k
    if not (batch == kv_batch and kv_heads > 0 and heads > 0 == heads % kv_heads and of_v[:3] == of_k[:3]):
        return False
    return 1 <= dim == kv_dim <= LARGEST_DIM and 1 <= of_v[3] <= LARGEST_DIM


def check_dense(name: str, x: object) -> None:
    """A tensor whose elements lie at strides."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a torch tensor, got {type(x).__name__}. Use torch.as_tensor.")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else x.layout
        raise ValueError(
            f"{name} must be a dense tensor, got {kind}. Use .to_dense() of a sparse one; sequences of several lengths "
            "are packed (cu_seqlens of flash_attention)."
        )


def check_flag(name: str, value: object) -> bool:
    """True or False, as Python's own; of what else Python takes for true, "no" is."""
    if value is True or value is False:
        return value
    if isinstance(value, torch.Tensor) or value not in (True, False):
        raise ValueError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def check_window(window: Window | None, causal: bool) -> Window:
    """The window's sides, None where there is no limit; causal limits the right one to 0."""
    check_flag("causal", causal)
    if window is None:
        return None, 0 if causal else None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"window must be (left, right), None on a side meaning no limit; got {window!r}.")
    for side in window:
        if side is not None and not (isinstance(side, int | Integral) and not isinstance(side, bool) and side >= 0):
            raise ValueError(
                f"window's sides must be None or whole numbers of at least 0, got {window!r}. "
                "(127, 0) is a causal window of 128 keys."
            )
    left, right = (None if side is None else min(int(side), FAR) for side in window)
    return left, 0 if causal else right


def check_number(name: str, value: object, least: float, most: float) -> float:
    """A finite number with least ≤ value < most, as Python's own: kernels take no numpy numbers."""
    given = float("nan")
    if isinstance(value, int | float | Real) and not isinstance(value, bool):  # numpy's are Real
        given = float(value)
    if not (least <= given < most and given > -float("inf")):
        limits = "finite"
        if most < float("inf"):
            limits = f"from {least:g} to below {most:g}"
        elif least > -float("inf"):
            limits = f"finite and at least {least:g}"
        raise ValueError(f"{name} must be a number, {limits}; got {value!r}.")
    return given


def check_bias(bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, name: str = "bias") -> torch.Tensor:
    """Four-dimensional, of q's batch, heads, queries and keys, or 1 in place of any; `CausalBias` written out."""
    shape = (*q.shape[:3], k.shape[2])
    if type(bias) not in (torch.Tensor, torch.nn.Parameter):
        bias = _written_out(bias, q.device)
    _check_tensor(name, bias, q.device)
    if bias.dtype != torch.bool and bias.dtype not in _FLOATS:
        raise ValueError(f"{name} must be float (added) or bool (True = seen), got {bias.dtype}. Cast it with .to.")
    missing = 4 - bias.dim()
    full = (1,) * missing + tuple(bias.shape)
    if missing < 0 or any(size != 1 and size != want for size, want in zip(full, shape, strict=True)):
        raise ValueError(f"{name} must broadcast to (batch, heads, queries, keys) = {shape}, got {tuple(bias.shape)}.")
    return bias.reshape(full)


def _written_out(bias: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A `CausalBias`, whose own numbers mean nothing, as a mask; anything else as it is."""
    from torch.nn.attention.bias import CausalBias, CausalVariant  # takes a second, for the compiler

    if not isinstance(bias, CausalBias):
        return bias
    below = bias.seq_len_kv - bias.seq_len_q if bias.variant == CausalVariant.LOWER_RIGHT else 0
    return torch.ones(bias.seq_len_q, bias.seq_len_kv, dtype=torch.bool, device=device).tril_(below)


def check_slopes(slopes: torch.Tensor, batch: int, heads: int, device: torch.device) -> torch.Tensor:
    """(batch, heads) in FP32."""
    _check_tensor("alibi_slopes", slopes, device)
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes have no gradient here; pass alibi_slopes.detach().")
    shape = tuple(slopes.shape)  # compared one by one: `in` takes a compiler's symbolic sizes for different
    if (shape != (heads,) and shape != (batch, heads)) or not slopes.dtype.is_floating_point:
        raise ValueError(
            f"alibi_slopes must be float of shape (heads,) = ({heads},) or (batch, heads) = ({batch}, {heads}), "
            f"got {slopes.dtype} {tuple(slopes.shape)}."
        )
    return slopes.float().expand(batch, heads).contiguous()


def check_sinks(sinks: torch.Tensor, heads: int, device: torch.device) -> torch.Tensor:
    """(heads,) of any float dtype, one after the other in memory."""
    _check_tensor("sinks", sinks, device)
    if tuple(sinks.shape) != (heads,) or not sinks.dtype.is_floating_point:
        raise ValueError(f"sinks must be float of shape (heads,) = ({heads},), got {sinks.dtype} {tuple(sinks.shape)}.")
    return sinks.contiguous()


def check_packing(
    cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None, q: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both or neither, as int32; with one given the other is the same. Their values are checked where they run."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None, None
    if cu_seqlens_q is None:
        raise ValueError("cu_seqlens_k needs cu_seqlens_q: where the queries of each packed sequence begin.")
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_tensor(name, cu, q.device)
        if cu.dim() != 1 or len(cu) < 2 or cu.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 of shape (sequences + 1,), got {cu.dtype} {tuple(cu.shape)}.")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must be of the same sequences, "
            f"got {len(cu_seqlens_q)} and {len(cu_seqlens_k)} entries."
        )
    if q.shape[0] != 1:
        raise ValueError(
            f"Packed sequences have a batch of 1, (1, heads, all lengths, head dimension); got a batch of {q.shape[0]}."
        )
    # The kernels read them one after the other in memory.
    of_q = as_int32(cu_seqlens_q).contiguous()
    return of_q, of_q if cu_seqlens_k is cu_seqlens_q else as_int32(cu_seqlens_k).contiguous()


def as_int32(x: torch.Tensor) -> torch.Tensor:
    """int64 as int32: what that does not hold, and would be some other number, becomes one beyond all lengths."""
    return x if x.dtype == torch.int32 else x.clamp(-FAR, FAR).to(torch.int32)


def check_boundaries(name: str, cu: torch.Tensor, total: int) -> None:
    """From 0, never falling, to the packed length. On CUDA a version of a tensor is read once: it waits for the GPU.

    While a CUDA graph is captured nothing can be read; what is replayed is not checked.
    """
    if cu.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    values = read_once(cu, None)
    rule = f"{name} must begin with 0, never fall, and end with the packed length {total}"
    if values[0] != 0 or values[-1] != total:
        raise ValueError(f"{rule}; it begins with {values[0]} and ends with {values[-1]}.")
    for i, (before, after) in enumerate(pairwise(values)):
        if after < before:
            raise ValueError(f"{rule}; entry {i + 1} is {after}, after {before}.")


def _check_tensor(name: str, x: object, device: torch.device) -> None:
    check_dense(name, x)
    if isinstance(x, torch.Tensor) and x.device != device:
        raise ValueError(f"{name} must be on the device of q ({device}), got {x.device}.")


def check_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor | None) -> None:
    """Shapes, dtypes and devices of queries, caches and block table; what the table says is checked where it runs."""
    if table is None:
        check_qkv(q, k, v)
        return
    for name, x in (("q", q), ("k_cache", k), ("v_cache", v)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            shape = "batch, heads, queries" if name == "q" else "pages, KV heads, page size"
            raise ValueError(f"With block_table {name} must be a tensor ({shape}, head dimension), got {got}.")
        check_dense(name, x)
    if k.shape[:3] != v.shape[:3] or 0 in k.shape[:3]:
        raise ValueError(
            "With block_table k_cache and v_cache must have the same pages, KV heads and page size, all at least 1; "
            f"got {tuple(k.shape)}, {tuple(v.shape)}."
        )
    # A page in the place of each sequence's keys: nothing that is left to check depends on the number of pages.
    check_qkv(q, *(x[:1].expand(q.shape[0], -1, -1, -1) for x in (k, v)))
    _check_tensor("block_table", table, q.device)
    if table.dim() != 2 or table.shape[0] != q.shape[0] or table.dtype != torch.int32:
        raise ValueError(
            f"block_table must be int32 of shape (batch, pages of a sequence) = ({q.shape[0]}, …), "
            f"got {table.dtype} {tuple(table.shape)}. Use .to(torch.int32)."
        )


def check_lengths(
    lengths: torch.Tensor | int | None, q: torch.Tensor, capacity: int
) -> tuple[torch.Tensor | None, int]:
    """The lengths, if they are not all one, and what none exceeds; a tensor's values are checked where it runs."""
    if lengths is None:
        return None, capacity
    if isinstance(lengths, torch.Tensor):
        _check_tensor("lengths", lengths, q.device)
        if tuple(lengths.shape) != (q.shape[0],) or lengths.dtype != torch.int32:
            raise ValueError(
                f"lengths must be int32 of shape (batch,) = ({q.shape[0]},), got {lengths.dtype} "
                f"{tuple(lengths.shape)}. Use .to(torch.int32)."
            )
        return lengths, capacity
    if isinstance(lengths, bool) or not isinstance(lengths, int) or not 0 <= lengths <= capacity:
        raise ValueError(
            f"lengths must be an int32 tensor or a whole number, 0 to the cache's capacity {capacity}; got {lengths!r}."
        )
    return None, lengths


def check_cache_values(
    lengths: torch.Tensor | None, table: torch.Tensor | None, capacity: int, pages: int, page_size: int
) -> None:
    """Lengths of 0 to the capacity, and pages that exist wherever a sequence has keys.

    On CUDA a version of a tensor is read once: it waits for the GPU. While a CUDA graph is captured nothing can be
    read; what is replayed is not checked.
    """
    given = lengths if lengths is not None else table
    if given is None or (given.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    counts = [capacity] * len(given) if lengths is None else read_once(lengths, None)
    if counts and not 0 <= min(counts) <= max(counts) <= capacity:
        b, count = next((b, count) for b, count in enumerate(counts) if not 0 <= count <= capacity)
        raise ValueError(
            f"lengths must be 0 to the cache's capacity {capacity}, got {count} for sequence {b}. "
            "Take a larger cache (with block_table: a wider table), or keep fewer keys."
        )
    for b, (count, right) in enumerate(zip(counts, [] if table is None else read_once(table, pages), strict=False)):
        if table is not None and count > right * page_size:
            raise ValueError(
                f"block_table must hold pages 0 to {pages - 1} wherever a sequence has keys, "
                f"got {table[b, right].item()} for page {right} of sequence {b}, which has {count} keys."
            )


_READ: dict[int, tuple[weakref.ref[torch.Tensor], int, int | None, list[int]]] = {}


def read_once(x: torch.Tensor, pages: int | None) -> list[int]:
    """The values of x; with `pages`, how many entries of each row come before the first that is not one of so many.

    On the CPU x is read every time, which waits for nothing: what `x.data` and `x.numpy()` write leaves the version as
    it is. So is a tensor made in inference mode, which has none. The key is an id, since tensors compare element by
    element; the reference tells whether the tensor of that id is still the same.
    """
    if not x.is_cuda:
        return _read(x, pages)
    version = -1 if x.is_inference() else x._version
    known = _READ.get(id(x))
    if known is not None and version >= 0 and known[0]() is x and known[1:3] == (version, pages):
        return known[3]
    values, key = _read(x, pages), id(x)
    _READ[key] = (weakref.ref(x, lambda _: _READ.pop(key, None)), version, pages, values)
    return values


def _read(x: torch.Tensor, pages: int | None) -> list[int]:
    values = x if pages is None else ((x >= 0) & (x < pages)).int().cumprod(1).sum(1)
    read: list[int] = values.tolist()
    return read
