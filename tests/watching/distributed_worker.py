"""One of several processes that train a model together, unwatched and then watched; says what it saw as JSON."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from assay.watching.watch import watch
from tests.watching.models import WIDTH, stack


def weights_after_training(rank: int, watched: str, out: str) -> tuple[list[Any], Any]:
    """The weights after three steps; `watched` is "no", "the parallel model" or "the model in it"."""
    model = stack(torch.float32)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(rank)
    looked_at: torch.nn.Module = model if watched == "the model in it" else parallel
    with nullcontext() if watched == "no" else watch(looked_at, out=out) as w:
        for _ in range(3):
            parallel(torch.randn(2, 21, WIDTH, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()], w


def main(rank: int, processes: int, meeting: str, out: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)
    alone, _ = weights_after_training(rank, "no", out)
    found = []
    for watched in ("the parallel model", "the model in it"):
        weights, w = weights_after_training(rank, watched, out)
        whole = [row for row in w.rows if row["head"] is None]
        found.append(
            {
                "same": all(torch.equal(a, b) for a, b in zip(weights, alone, strict=True)),
                "rows": sorted({(row["layer"], row["tensor"], row["step"]) for row in whole}),
                "over": any(row["over"] for row in whole),
                "ids": sorted(row["id"] for row in w.rows),
            }
        )
    print(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
