"""One training under way: a model, its optimizers, its loss scale, and the step it is at."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.training.attention import find_attention
from assay.training.blame import Diverged, where_it_began
from assay.training.determinism import mixed
from assay.training.loss_scaling import loss_scaling
from assay.training.optimizers import learning_rate, make_optimizers, set_rate, states
from assay.training.precision import PolicyArithmetic, convert_weights
from assay.training.tasks import Batch, Task
from assay.training.training import Training


class Progress(NamedTuple):
    """What a step did."""

    loss: float
    grad_norm: float
    scale: float
    """Of the loss."""
    skipped: bool
    """Whether the step was not taken, for a gradient that was not finite."""
    seconds: float


class Run:
    """A training that can be advanced step by step, looked at, saved and restored."""

    def __init__(self, training: Training, task: Task, device: torch.device) -> None:
        self.training, self.task, self.device = training, task, device
        policy = training.policy
        model = task.model(find_attention(training.attention), PolicyArithmetic(policy), training.init_seed)
        self.model = convert_weights(model.to(device), policy)
        if training.change is not None:
            training.change(self.model)
        self.optimizers = make_optimizers(training.optimizer, self.model, training.learning_rate, training.weight_decay)
        self.scaling = loss_scaling(policy, device)
        self.average = {name: p.detach().float().clone() for name, p in self.model.named_parameters()}
        self.step = 0
        self.skipped: list[int] = []
        """The steps that were not taken."""
        self._loss = torch.compile(task.loss) if training.compile else task.loss

    def advance(self, skip: bool = False) -> Progress:
        """One step; raises `Diverged` if the loss is no number. With `skip` the gradient is computed and not used."""
        began = time.perf_counter()
        training = self.training
        set_rate(self.optimizers, learning_rate(self.step, training.steps, training.warmup, training.learning_rate))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(mixed(training.noise_seed, "step", self.step))
        total = torch.zeros((), device=self.device)
        for part in range(training.accumulate):
            batch = self.on_device(self.task.batch(training, self.step, part))
            loss = self._loss(self.model, batch) / training.accumulate
            self.scaling.scaled(loss).backward()
            total += loss.detach()
        value = total.item()
        if not math.isfinite(value):
            raise Diverged(self.step, value, where_it_began(self.model, self._compute_again))
        outcome = self.scaling.step(self.optimizers, training.clip, list(self.model.parameters()), skip=skip)
        if outcome.skipped:
            self.skipped.append(self.step)
        else:
            self._update_average()
        self.step += 1
        return Progress(value, outcome.grad_norm, outcome.scale, outcome.skipped, time.perf_counter() - began)

    def _compute_again(self) -> None:
        """The losses of the step, all parts of it."""
        for part in range(self.training.accumulate):
            self.task.loss(self.model, self.on_device(self.task.batch(self.training, self.step, part)))

    def on_device(self, batch: Batch) -> Batch:
        """The batch where the model is."""
        return tuple(x.to(self.device, non_blocking=True) for x in batch)

    @torch.no_grad()
    def _update_average(self) -> None:
        keep = min(self.training.average, (1 + self.step) / (10 + self.step))  # the first weights are soon forgotten
        averages = list(self.average.values())
        torch._foreach_lerp_(averages, [p.detach().float() for p in self.model.parameters()], 1 - keep)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that a checkpoint must hold, by name."""
        for name, parameter in self.model.named_parameters():
            yield f"weights {name}", parameter.detach()
        for name, buffer in self.model.named_buffers():
            yield f"buffers {name}", buffer
        for name, value in self.average.items():
            yield f"average {name}", value
        for name, value in states(self.model, self.optimizers):
            yield f"optimizer {name}", value

    def digest(self) -> str:
        """SHA-256 of the weights' names and bits: two trainings with the same one came to the same weights."""
        found = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            found.update(name.encode())
            found.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def numbers(self) -> dict[str, Any]:
        """The rest of it, as JSON takes it."""
        return {"step": self.step, "skipped": self.skipped, "scaling": self.scaling.state_dict()}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Go on from what `tensors` and `numbers` gave."""
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, value in tensors.items():
            kind, _, rest = name.partition(" ")
            if kind == "optimizer":
                key, _, parameter = rest.partition(" ")
                self._restore_state(key, own[parameter], value)
            else:
                (self.average if kind == "average" else own)[rest].copy_(value)
        self.step, self.skipped = numbers["step"], list(numbers["skipped"])
        self.scaling.load_state_dict(numbers["scaling"])

    def _restore_state(self, key: str, parameter: Tensor, value: Tensor) -> None:
        owner = next(o for o in self.optimizers if any(parameter is p for g in o.param_groups for p in g["params"]))
        # Step counters stay on the CPU, as the optimizers keep them there.
        owner.state[parameter][key] = value.clone() if key == "step" else value.to(parameter.device, copy=True)
