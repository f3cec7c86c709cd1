"""One step of vLLM over its paged cache: the new keys are written, then all new tokens attend. Nothing but torch.

The cache of a layer is (pages, KV heads, page size, 2 · head size), keys before values, with any strides. A step brings
some new tokens of each sequence, one after the other: a prompt, a chunk of one, or one token to decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from assay.flash.attention import flash_attention
from assay.flash.decode import attention_with_cache


@dataclass(kw_only=True)
class Chunks:
    """Sequences with several new tokens, or behind one that has: their keys are copied out of the pages."""

    starts: Tensor
    """(sequences + 1,): where the new tokens of each begin, the first at 0, and the total."""
    key_starts: Tensor
    """The same for all their keys."""
    pages: Tensor
    """(keys,): the page of each key."""
    offsets: Tensor
    """(keys,): its place in the page."""


@dataclass(kw_only=True)
class Step:
    """What the layers share. Neither frozen nor with slots: vLLM's wrappers hang things of their own on it."""

    tokens: int
    """Of all sequences; rows behind these are padding."""
    written: Tensor
    """Which tokens have a slot in the cache."""
    pages: Tensor
    """The pages of these slots."""
    offsets: Tensor
    """Their places in the pages."""
    decodes: int
    """How many sequences at the front have one new token each: their keys are read where they lie."""
    lengths: Tensor
    """(decodes,): the keys of each, with the new one."""
    table: Tensor
    """(decodes, pages of a sequence)."""
    chunks: Chunks | None
    """All other sequences."""


def plan_step(
    starts: Sequence[int], starts_on_device: Tensor, lengths: Tensor, table: Tensor, slots: Tensor, page: int
) -> Step:
    """Sort out a step once, for all layers.

    Args:
        starts: Where the new tokens of each sequence begin, and the total.
        starts_on_device: The same, beside the cache.
        lengths: (sequences,): the keys of each, with the new ones.
        table: (sequences, pages of a sequence): the pages of each.
        slots: For each token page · page size + place in the page; −1: its key is not kept.
        page: Keys in a page.

    vLLM runs in inference mode, where tensors have no version and the checks of the kernels read them in every call.
    The tensors here are made outside of it, so that they are read once a step.
    """
    counts = [after - before for before, after in pairwise(starts)]
    decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    with torch.inference_mode(False):
        slots = slots[: starts[-1]].long()
        written = (slots >= 0).nonzero().flatten()
        slots = slots[written]
        chunks = None
        if starts[-1] > decodes:
            begin = (starts_on_device[decodes:] - decodes).to(torch.int32)
            chunks = _chunks(begin, lengths[decodes:], table[decodes:], page)
        return Step(
            tokens=starts[-1],
            written=written,
            pages=slots // page,
            offsets=slots % page,
            decodes=decodes,
            lengths=lengths[:decodes].to(torch.int32, copy=True),
            table=table[:decodes].to(torch.int32, copy=True),
            chunks=chunks,
        )


def _chunks(starts: Tensor, lengths: Tensor, table: Tensor, page: int) -> Chunks:
    key_starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    key = torch.arange(int(key_starts[-1]), device=lengths.device)
    sequence = torch.bucketize(key, key_starts[1:], right=True)  # how many end before it
    place = key - key_starts[sequence]
    pages = table[sequence, place // page].long()
    return Chunks(starts=starts, key_starts=key_starts.to(torch.int32), pages=pages, offsets=place % page)


def write(cache: Tensor, key: Tensor, value: Tensor, step: Step) -> None:
    """Put the keys and values of the new tokens, (tokens, KV heads, head size), into their slots."""
    keys, values = _halves(cache, key.shape[-1])
    keys[step.pages, :, step.offsets] = key[step.written]
    values[step.pages, :, step.offsets] = value[step.written]


def attend(query: Tensor, cache: Tensor, step: Step, output: Tensor, scores: dict[str, Any]) -> None:
    """Attention of the new tokens, (tokens, heads, head size), over all keys of their sequences; into `output`.

    `scores` are the options that `attention_with_cache` and `flash_attention` have in common.
    """
    first, last, size = step.decodes, step.tokens, query.shape[-1]
    if first:
        keys, values = _halves(cache, size)
        out = attention_with_cache(
            query[:first, :, None], keys, values, lengths=step.lengths, block_table=step.table, causal=True, **scores
        )
        output[:first] = out[:, :, 0]
    if step.chunks is not None:
        copied = cache[step.chunks.pages, :, step.chunks.offsets].transpose(0, 1)[None]
        keys, values = _halves(copied, size)
        starts: dict[str, Any] = {"cu_seqlens_q": step.chunks.starts, "cu_seqlens_k": step.chunks.key_starts}
        out = flash_attention(query[first:last].transpose(0, 1)[None], keys, values, causal=True, **starts, **scores)
        output[first:last] = out[0].transpose(0, 1)


def _halves(cache: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return cache[..., :size], cache[..., size:]
