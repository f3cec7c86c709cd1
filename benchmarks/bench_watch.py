"""What watching costs a training step: at 1% of the calls, and at all of them beside the two computations they need.

A decoder of five million parameters on random tokens, one thread; all kinds of steps alternate. Exits with 1 if a goal
is missed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import assay
from assay.models.gpt import Gpt, gpt_sizes, next_token_loss
from assay.watching.call import AttentionCall, plain, plain_gradients

SHARE, SHARE_GOAL, ALL_GOAL = 0.01, 0.02, 1.10
ROUNDS = 7


def seconds(work: Callable[[], object]) -> float:
    """Of one call, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # others on this machine would make two wait for each other
    torch.manual_seed(0)
    model = Gpt(gpt_sizes["5m"], attention).to(device)
    tokens = torch.randint(256, (4, 257), device=device)
    calls: list[AttentionCall] = []

    def step() -> None:
        model.zero_grad()
        next_token_loss(model, tokens).backward()

    def keep(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        calls.append(AttentionCall(q=q.detach(), k=k.detach(), v=v.detach(), scale=q.shape[-1] ** -0.5, right=0))
        return attention(q, k, v, causal=causal)

    kept = Gpt(gpt_sizes["5m"], keep).to(device)
    next_token_loss(kept, tokens)
    grads = [torch.randn_like(call.q) for call in calls]

    def both() -> None:
        for call, grad in zip(calls, grads, strict=True):
            for each in (call, call.in_double()):
                plain(each)
                plain_gradients(each, grad)

    times: dict[str, list[float]] = {name: [] for name in ("plain", "seldom", "always", "both")}
    for _ in range(ROUNDS):
        times["plain"].append(seconds(step))
        for name, every in (("seldom", 1000), ("always", 1)):
            with assay.watch(model, every=every):
                if every > 1:
                    step()  # step 0 is compared; entering and leaving are paid once and not timed
                times[name].append(seconds(step))
        times["both"].append(seconds(both))
    found = {name: statistics.median(each) for name, each in times.items()}
    idle = found["seldom"] / found["plain"] - 1
    share = idle + SHARE * (found["always"] - found["seldom"]) / found["plain"]
    ratio = (found["always"] - found["plain"]) / found["both"]
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(
        f"{where}, gpt 5m, batch 4 × 256: a step {found['plain'] * 1e3:.0f} ms; watched, nothing compared {idle:+.1%}"
    )
    print(f"1% of the calls: {share:+.1%} (goal: {SHARE_GOAL:.0%}){'' if share <= SHARE_GOAL else '  MISSED'}")
    print(
        f"all calls: {ratio:.2f} of the time of the two computations, plain and FP64 (goal: {ALL_GOAL})"
        f"{'' if ratio <= ALL_GOAL else '  MISSED'}"
    )
    sys.exit(0 if share <= SHARE_GOAL and ratio <= ALL_GOAL else 1)


if __name__ == "__main__":
    main()
