"""Loss scaling, dynamic, static or none, behind one interface; a step says whether it was skipped, and its scale.

FP16 gradients below 2⁻²⁴ vanish: the loss is multiplied before backward, the gradients are divided after it. A step
whose gradients are not finite is skipped; dynamic scaling (torch's GradScaler) then halves the scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from assay.training.precision import Policy

LossScale = float | Literal["dynamic"] | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of one step."""

    skipped: bool
    """Whether the weights stayed as they were."""
    scale: float
    """What the loss of this step was multiplied by."""
    grad_norm: float
    """Of the gradients, unscaled and before clipping."""


class LossScaler:
    """Scales losses and takes optimizer steps: `scaled(loss).backward()`, then `step(...)`.

    `loss_scale` is None (nothing is scaled, nothing skipped by itself), a number (it stays; steps with gradients that
    are not finite are skipped) or "dynamic", to which the other arguments belong; their defaults are torch's.
    """

    def __init__(
        self,
        loss_scale: LossScale = None,
        device: str | torch.device = "cpu",
        *,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        check_loss_scale(loss_scale)
        self.loss_scale = loss_scale
        number = None if loss_scale is None or isinstance(loss_scale, str) else float(loss_scale)
        self._static = None if number is None else torch.tensor(number, dtype=torch.float32).item()  # as it is kept
        self._scaler = torch.amp.GradScaler(
            torch.device(device).type,
            init_scale=initial_scale if self._static is None else self._static,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=loss_scale is not None,
        )

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by; 1 without scaling."""
        return float(self._scaler.get_scale())

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return self._scaler.scale(loss)

    def step(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        clip: float | None,
        parameters: Iterable[Tensor],
        skip: bool = False,
    ) -> StepOutcome:
        """Unscale the gradients, clip their norm to `clip`, step, and adapt the scale.

        Several optimizers step together or not at all. With `skip` they do not, whatever the gradients are: a control
        that skips what another training skipped. The scale moves as it would have.
        """
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if not parameters:
            raise ValueError("A step needs gradients, got none: call scaled(loss).backward() before step.")
        together = _Together([optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer, skip)
        scale = self.scale
        self._scaler.unscale_(together)
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if clip is not None:
            clip_grads_with_norm_(parameters, clip, norm)
        self._scaler.step(together)
        self._scaler.update(self._static)
        return StepOutcome(skipped=not together.stepped, scale=scale, grad_norm=float(norm))

    def state_dict(self) -> dict[str, float | int]:
        """The scale and how long it has stood, as plain numbers; nothing without scaling."""
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Go on from what `state_dict` gave."""
        own = self._scaler.state_dict()
        if state.keys() != own.keys() or (self._static is not None and state["scale"] != self._static):
            raise ValueError(
                f"The state must be of a LossScaler with loss_scale={self.loss_scale!r}, which has {own}; "
                f"got {dict(state)}. Resume with the loss scale that the checkpoint was made with."
            )
        self._scaler.load_state_dict(dict(state))


def loss_scaling(policy: Policy, device: str | torch.device = "cpu") -> LossScaler:
    """The scaler that a policy asks for."""
    return LossScaler(policy.loss_scale, device)


def check_loss_scale(loss_scale: object) -> None:
    """Raise a ValueError unless it is None, "dynamic" or a positive number."""
    if loss_scale is None or loss_scale == "dynamic":
        return
    number = isinstance(loss_scale, int | float) and not isinstance(loss_scale, bool)
    if not number or not 0 < loss_scale < math.inf:  # type: ignore[operator]
        raise ValueError(
            f"loss_scale must be None, 'dynamic' or a positive finite number, got {loss_scale!r}. "
            "FP16 usually takes 'dynamic'; BF16 needs None."
        )


class _Together(torch.optim.Optimizer):
    """Several optimizers as the one that GradScaler sees, so that it checks and skips all of them at once."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], skip: bool) -> None:
        groups = [{"params": group["params"]} for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})
        self._optimizers, self._skip, self.stepped = optimizers, skip, False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Called by GradScaler, and only if all gradients are finite."""
        if self._skip:
            return
        for optimizer in self._optimizers:
            optimizer.step()
        self.stepped = True
