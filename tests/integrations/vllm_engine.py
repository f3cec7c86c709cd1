"""A small engine around one attention layer: it pages, batches and calls the backend as vLLM does, and keeps the truth.

Sequences get pages in a random order, page 0 stays empty as in vLLM, and all that was never written is NaN, so that
whatever reads it shows. Beside the cache the engine keeps what must be in it, and each sequence's keys as they came.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ..flash.reference import reference_attention
from .fake_vllm import CommonAttentionMetadata

PAGE = 16


@dataclass
class Sequence:
    k: torch.Tensor
    v: torch.Tensor
    pages: list[int] = field(default_factory=list)


class Engine:
    """One layer, its cache, and its sequences by name."""

    def __init__(
        self,
        registry: ModuleType,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        heads: tuple[int, int] = (4, 2),
        size: int = 32,
        tokens_before_heads: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        slopes: list[float] | None = None,
        sinks: torch.Tensor | None = None,
        shared_with: str | None = None,
        pages: int = 40,
    ) -> None:
        self.backend = registry.AttentionBackendEnum.CUSTOM.get_class()
        (self.heads, self.kv_heads), self.size, self.dtype, self.device = heads, size, dtype, device
        self.generator = torch.Generator().manual_seed(0)
        shape = (pages, self.kv_heads, PAGE, 2 * size)
        if tokens_before_heads:
            self.cache = torch.full((pages, PAGE, self.kv_heads, 2 * size), torch.nan, dtype=dtype).transpose(1, 2)
        else:
            self.cache = torch.full(shape, torch.nan, dtype=dtype)
        self.cache[0] = 0
        self.cache = self.cache.to(device)
        self.expected = self.cache.cpu().clone()
        self.free = (torch.randperm(pages - 1, generator=self.generator) + 1).tolist()
        sinks = None if sinks is None else sinks.to(device, dtype)
        self.impl = self.backend.get_impl_cls()(
            self.heads, size, size**-0.5, self.kv_heads, slopes, window, "auto", softcap, "decoder", shared_with,
            **({} if sinks is None else {"sinks": sinks}),
        )  # fmt: skip
        spec = SimpleNamespace(block_size=PAGE)
        self.builder = self.backend.get_builder_cls()(spec, ["layer"], None, torch.device(device))
        self.options: dict[str, Any] = {
            "causal": True,
            "window": None if window is None else (window - 1, 0),
            "softcap": softcap,
            "alibi_slopes": None if slopes is None else torch.tensor(slopes),
            "sinks": None if sinks is None else sinks.cpu(),
        }
        self.sequences: dict[str, Sequence] = {}
        self.worst = {"ours": 0.0, "plain": 0.0}

    def draw(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.size, generator=self.generator).to(self.dtype)

    def common(self, new: dict[str, int], padding: int = 0) -> CommonAttentionMetadata:
        """What vLLM tells the builder; each sequence has pages for its new tokens then."""
        slots, table, lengths, starts = [], [], [], [0]
        for name, count in new.items():
            empty = torch.empty(0, self.kv_heads, self.size, dtype=self.dtype)
            sequence = self.sequences.setdefault(name, Sequence(empty, empty))
            length = len(sequence.k) + count
            while len(sequence.pages) * PAGE < length:
                sequence.pages.append(self.free.pop())
            places = range(length - count, length)
            slots += [sequence.pages[place // PAGE] * PAGE + place % PAGE for place in places]
            table.append(sequence.pages + [0] * (12 - len(sequence.pages)))
            lengths.append(length)
            starts.append(starts[-1] + count)
        for _ in range(padding):  # a sequence that is none, and a token that is none
            table, lengths, starts, slots = [*table, [0] * 12], [*lengths, 0], [*starts, starts[-1]], [*slots, -1]
        return CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=self.device),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            num_reqs=len(lengths),
            num_actual_tokens=len(slots),
            max_query_len=max(new.values()),
            max_seq_len=max(lengths),
            block_table_tensor=torch.tensor(table, dtype=torch.int32, device=self.device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
        )

    def step(self, new: dict[str, int], padding: int = 0, prefix: int = 0) -> None:
        """New tokens of some sequences, in this order: run, check the cache, and note the errors."""
        common = self.common(new, padding)
        tokens = common.num_actual_tokens
        q, k, v = (self.draw(tokens, heads) for heads in (self.heads, self.kv_heads, self.kv_heads))
        output = torch.full_like(q, torch.nan).to(self.device)
        with torch.inference_mode():
            step = self.builder.build(prefix, common)
            on_device = (x.to(self.device) for x in (q, k, v))
            assert self.impl.forward(None, *on_device, self.cache, step, output) is output
        first = 0
        for name, count in new.items():
            one = slice(first, first + count)
            self._keep(self.sequences[name], k[one], v[one])
            self._judge(self.sequences[name], q[one], output[one].cpu())
            first += count
        torch.testing.assert_close(self.cache.cpu(), self.expected, rtol=0, atol=0, equal_nan=True)

    def _keep(self, sequence: Sequence, k: torch.Tensor, v: torch.Tensor) -> None:
        for key, value in zip(k, v, strict=True):
            page, place = divmod(len(sequence.k), PAGE)
            sequence.k, sequence.v = torch.cat((sequence.k, key[None])), torch.cat((sequence.v, value[None]))
            self.expected[sequence.pages[page], :, place] = torch.cat((key, value), -1)

    def _judge(self, sequence: Sequence, q: torch.Tensor, out: torch.Tensor) -> None:
        dense = [x.transpose(0, 1)[None] for x in (q, sequence.k, sequence.v)]
        golden, plain = (
            reference_attention(*(x.to(dtype) for x in dense), **self.options)[0][0].transpose(0, 1)
            for dtype in (torch.float64, self.dtype)
        )
        for name, x in (("ours", out), ("plain", plain)):
            error = float((x.double() - golden).abs().max())
            assert error == error, "read what was never written"
            self.worst[name] = max(self.worst[name], error)

    def run(self) -> None:
        """Prompts, one of them in chunks, beside tokens to decode; in vLLM's order and not; then decoding alone."""
        self.step({"a": 19, "b": 33})
        self.step({"a": 1, "b": 17, "c": 5})
        self.step({"a": 1, "b": 1, "c": 1})
        self.step({"c": 2, "d": 40, "a": 1, "b": 2}, padding=3)
        for _ in range(3):
            self.step({"d": 1, "a": 1, "c": 1, "b": 1}, padding=2, prefix=16)

    @property
    def ratio(self) -> float:
        """Our largest error over plain attention's, in the same dtype."""
        assert self.worst["plain"] > 0
        return self.worst["ours"] / self.worst["plain"]
