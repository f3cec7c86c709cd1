"""What watching costs a training step: at 1% of the calls, and at all of them beside the two computations they need.

1% is `every=100` over whole cycles of a hundred steps. A cycle has a step for each layer in which that layer is
compared, and is idle otherwise; both kinds are timed, a run of one after a run of the other and one of the model alone,
and the mean of a cycle is made of their means. What a run leaves to be read is read within it.

The two computations are attention as one writes it (matmul, mask, softmax, matmul, and autograd for its gradients),
once in the format of the call and once in FP64, on the inputs of all calls of a step: each forward pass once, each
backward pass once, all heads at once or a head at a time, whichever is faster. Nothing of the watch is in them. Beside
that, the watch's own two computations, which in FP64 leave out keys that a causal mask hides, and on a GPU are fused:
what is above those is the figures, and what a busy cache and allocator cost.

A decoder of five million parameters on random tokens, one thread; on a GPU one of a hundred million, to fill it.
Figures are medians over rounds, of CPU time, on a GPU of time. Last, what a watch holds after 5 steps and after 50.
Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import assay
from assay.models.gpt import Gpt, gpt_sizes, next_token_loss
from assay.watching.call import AttentionCall
from assay.watching.watch import Watch

EVERY, SHARE_GOAL, ALL_GOAL = 100, 0.02, 1.10
RUN = 2.0
"""Seconds that a run of steps lasts about, at most one step for each layer; and at least four."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TURNS = {"cpu": 1, "cuda": 4}[DEVICE]
"""Of such runs in a round: on a GPU, whose clock swings, they are short beside the rest of it."""
SIZE = {"cpu": "5m", "cuda": "100m"}[DEVICE]
SHAPES = {
    "cpu": ((4, 256, True), (4, 256, False), (2, 512, True), (1, 1024, True)),
    "cuda": ((16, 1024, True), (16, 1024, False), (8, 2048, True)),
}[DEVICE]
"""Batch, length, and whether causal."""


class Call(NamedTuple):
    """What a call of attention needs, with the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    causal: bool


def seconds(work: Callable[[], object]) -> float:
    """Of one call. On a CPU those of this thread, so that other work on the machine does not count."""
    if DEVICE == "cpu":
        began = time.thread_time()
        work()
        return time.thread_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def written_down(call: Call) -> None:
    """Attention and its gradients."""
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    groups = q.shape[-3] // k.shape[-3]
    s = q @ k.repeat_interleave(groups, -3).transpose(-1, -2) * q.shape[-1] ** -0.5
    if call.causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf)
    torch.autograd.grad(torch.softmax(s, -1) @ v.repeat_interleave(groups, -3), (q, k, v), call.grad)


def both(call: Call) -> None:
    written_down(call)
    written_down(Call(call.q.double(), call.k.double(), call.v.double(), call.grad.double(), call.causal))


def both_by_head(call: Call) -> None:
    groups = call.q.shape[1] // call.k.shape[1]
    for b in range(call.q.shape[0]):
        for h in range(call.k.shape[1]):
            own, shared = slice(h * groups, (h + 1) * groups), slice(h, h + 1)
            both(Call(call.q[b, own], call.k[b, shared], call.v[b, shared], call.grad[b, own], call.causal))


def our_both(call: Call) -> None:
    right = 0 if call.causal else None
    caught = AttentionCall(q=call.q, k=call.k, v=call.v, scale=call.q.shape[-1] ** -0.5, right=right)
    caught.plain(call.grad)
    caught.golden(call.grad)


def measure(batch: int, length: int, causal: bool, dtype: str, rounds: int) -> bool:
    """Print a line; whether the goals are met."""
    torch.manual_seed(0)
    config = dataclasses.replace(gpt_sizes[SIZE], context=length)
    tokens = torch.randint(256, (batch, length + 1), device=DEVICE)
    calls: list[Call] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, **_: bool) -> Tensor:
        return attention(q, k, v, causal=causal)

    def keep(q: Tensor, k: Tensor, v: Tensor, **_: bool) -> Tensor:
        calls.append(Call(q.detach(), k.detach(), v.detach(), torch.randn_like(q), causal))
        return attend(q, k, v)

    next_token_loss(Gpt(config, keep).to(DEVICE, DTYPES[dtype]), tokens)
    model = Gpt(config, attend).to(DEVICE, DTYPES[dtype])

    def step() -> None:
        model.zero_grad()
        next_token_loss(model, tokens).backward()

    def all_calls(work: Callable[[Call], None]) -> None:
        for call in calls:
            work(call)

    def run(steps: Sequence[int], w: Watch | None = None) -> float:
        """The mean time of these steps."""

        def work() -> None:
            for number in steps:
                if w is not None:
                    w.begin_step(number)
                step()
            if w is not None:
                _ = w.calls  # reads what is still on the way

        return seconds(work) / len(steps)

    depth, times = config.depth, dict[str, list[float]]()
    step()
    count = max(4, min(depth, int(RUN / seconds(step))))
    compared = [EVERY - layer * depth // count for layer in range(count)]  # in each of them another layer
    for _ in range(rounds):
        for _ in range(TURNS):
            times.setdefault("alone", []).append(run(compared))
            with assay.watch(model, every=EVERY) as w:
                run([0], w)  # entering is paid once
                times.setdefault("idle", []).append(run([number - EVERY // 2 for number in compared], w))
                before = w.calls
                times.setdefault("sampled", []).append(run(compared, w))
                assert w.calls - before == count
        with assay.watch(model) as w:
            run([0], w)
            times.setdefault("always", []).append(run([1], w))
        for work in (both, both_by_head, our_both):
            times.setdefault(work.__name__, []).append(seconds(functools.partial(all_calls, work)))
    t = {name: statistics.median(each) for name, each in times.items()}
    idle, extra = t["idle"] / t["alone"] - 1, t["always"] - t["alone"]
    share = idle + depth / EVERY * (t["sampled"] - t["idle"]) / t["alone"]
    ratio = extra / min(t["both"], t["both_by_head"])
    met = share <= SHARE_GOAL and ratio <= ALL_GOAL
    print(
        f"{dtype} {batch} × {length}{' causal' if causal else ''}: a step {t['alone'] * 1e3:.0f} ms, watched but not "
        f"compared {idle:+.1%}, a call {(t['sampled'] - t['idle']) * 1e3:.1f} ms, 1% of them {share:+.1%}; all calls "
        f"{extra * 1e3:.0f} ms, {ratio:.2f} of the two computations, {extra / t['our_both']:.2f} of ours"
        f"{'' if met else '  MISSED'}",
        flush=True,
    )
    return met


def held() -> bool:
    """Print what a watch holds; whether it stays the same."""
    model = Gpt(gpt_sizes["300k"], attention).to(DEVICE)
    tokens = torch.randint(256, (1, 65), device=DEVICE)
    found = []
    with assay.watch(model) as w:
        for number in range(1, 51):
            model.zero_grad()
            next_token_loss(model, tokens).backward()
            if number in (5, 50):
                gc.collect()
                storages = [x.untyped_storage() for x in gc.get_objects() if type(x) is Tensor]
                found.append(sum({x.data_ptr(): x.nbytes() for x in storages}.values()))
    print(f"Tensors alive after 5 steps {found[0]:,} bytes, after 50 {found[1]:,}; {w.calls} calls compared")
    return found[0] == found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default={"cpu": 7, "cuda": 2}[DEVICE])
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)  # others on this machine would make two wait for each other
    print(
        torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", f"goals: {SHARE_GOAL:.0%} and {ALL_GOAL}", sep="; "
    )
    met = [measure(*shape, dtype, rounds) for shape in SHAPES for dtype in DTYPES]
    sys.exit(0 if all([*met, held()]) else 1)


if __name__ == "__main__":
    main()
