"""The time of every kernel of a packed call beside those of a plain one of the same FLOPs, by torch's profiler.

    PYTHONPATH=src python benchmarks/profile_packed.py

16 sequences of 1024 tokens, causal, hidden size 2048, bf16, forward and backward from a captured graph, as the record
times them. Kernels that only the packed call has are what it costs to know where its tiles lie; the rest is how much
slower the same kernels are.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import assay

SEQUENCES, LENGTH, HIDDEN, REPLAYS = 16, 1024, 2048, 30


def main() -> None:
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}: {SEQUENCES} × {LENGTH}, causal, bf16; µs a call, plain and packed")
    ends = torch.arange(SEQUENCES + 1, device="cuda", dtype=torch.int32) * LENGTH
    for dim in (64, 128, 256):
        heads = HIDDEN // dim
        plain = _times((SEQUENCES, heads, LENGTH, dim), {})
        packed = _times((1, heads, SEQUENCES * LENGTH, dim), {"cu_seqlens_q": ends})
        for name in sorted(plain.keys() | packed.keys(), key=lambda name: -packed.get(name, 0.0)):
            print(f"D {dim:3}  {plain.get(name, 0.0):8.1f} {packed.get(name, 0.0):8.1f}  {name}")
        print(f"D {dim:3}  {sum(plain.values()):8.1f} {sum(packed.values()):8.1f}  all of them")


def _times(shape: tuple[int, ...], how: dict[str, Any]) -> dict[str, float]:
    """Microseconds a replay of each kernel, forward and backward."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def call() -> None:
        out = assay.flash_attention(q, k, v, causal=True, **how)
        torch.autograd.grad(out, (q, k, v), dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    total: Counter[str] = Counter()
    for event in found.events():
        if event.device_type == DeviceType.CUDA:
            total[event.name[:60]] += event.device_time
    return {name: time / REPLAYS for name, time in total.items()}


if __name__ == "__main__":
    main()
