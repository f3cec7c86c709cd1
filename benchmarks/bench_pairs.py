"""What measuring costs a study of pairs: the time of observing and comparing over the time of training.

At the default interval, with all kinds (weights, gradients, optimizer state, activations), layer by layer. Exits with 1
if a goal is missed. `--size` and `--device` choose another model and place; default: 1m on the CPU, 100m on CUDA.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace

import torch

from assay.recipes.pairs import figure_8
from assay.training.determinism import deterministic
from assay.training.observation import KINDS, Known, differences, observe
from assay.training.run import Run
from assay.training.tasks import find_task
from assay.training.training import Training

GOAL = 0.05
"""Measuring over training, at most."""
STEPS = 4
"""Timed of each training; an interval has more, which are alike."""


def seconds(work: object, device: torch.device) -> float:
    """Of one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()  # type: ignore[operator]
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="100m" if cuda else "1m")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--data", default="synthetic")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    image = 64 if arguments.size in ("30m", "100m", "300m") else 32
    base = Training(size=arguments.size, data=arguments.data, image=image, batch=32 if cuda else 16)
    study = figure_8(base)
    with deterministic():
        runs = {name: Run(replace(t, skips_like=None), find_task(t), device) for name, t in study.trainings.items()}
        for run in runs.values():
            run.advance()
        training = sum(statistics.median(seconds(run.advance, device) for _ in range(STEPS)) for run in runs.values())

        def measure() -> None:
            seen = {name: observe(run)[1] for name, run in runs.items()}
            for kind in KINDS:
                known = Known()
                for pair in study.pairs:
                    differences(seen[pair.arm][kind], seen[pair.reference][kind], known)

        measure()
        measuring = statistics.median(seconds(measure, device) for _ in range(3))
    share = measuring / (training * study.every)
    fine = share <= GOAL
    where = torch.cuda.get_device_name(device) if cuda else "CPU"
    print(f"{where}, text_to_image {arguments.size}, {len(runs)} trainings, {len(study.pairs)} pairs")
    print(f"a step of all {training:.2f} s, a comparison {measuring:.2f} s, every {study.every} steps: ", end="")
    print(f"{share:.1%} of the time (goal: {GOAL:.0%}){'' if fine else '  MISSED'}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
