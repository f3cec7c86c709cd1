"""The implementation, the baseline and the golden value on the same inputs: their outputs, and their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from assay.budgets.fp64 import baseline_in_fp64

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., Any]
_UPSTREAM = 2**31
"""Added to the seed of the gradient that flows in: inputs drawn from the same seed must not be that gradient. (Beyond
2³² torch's CPU generator takes two seeds for one.)"""


class Three(NamedTuple):
    """One output, or one gradient."""

    fn: torch.Tensor
    baseline: torch.Tensor
    golden: torch.Tensor
    """FP64."""


class _Run(NamedTuple):
    """One of the three, called."""

    role: str
    leaves: Tensors
    outputs: list[torch.Tensor]


def run_three(
    fn: Function, baseline: Function, golden: Function | None, inputs: Tensors, seed: int | None
) -> dict[str, Three]:
    """All outputs by name and, with a seed for the gradient that flows in, the gradients of all float inputs."""
    plain = _forward("baseline", baseline, inputs, seed is not None)
    fast = _forward("fn", fn, inputs, seed is not None)
    _check_same_layout(fast, plain)
    upstream = None if seed is None else _upstream(plain, seed)
    grads = [_backward(run, upstream, plain) for run in (fast, plain)]
    doubles = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    with baseline_in_fp64() if golden is None else nullcontext():
        exact = _forward("golden", golden or baseline, doubles, seed is not None)
        _check_golden(exact, plain)
        grads.append(_backward(exact, upstream, plain))
    names = [f"output {i}" for i in range(len(plain.outputs))] if len(plain.outputs) > 1 else ["output"]
    found = dict(zip(names, map(Three, fast.outputs, plain.outputs, exact.outputs), strict=True))
    for i, name in enumerate(_input_names(baseline, inputs)):
        mine, plains, exacts = (g.get(i) for g in grads)
        if mine is None and plains is not None:
            raise ValueError(
                f"fn must have a gradient for every input for which the baseline has one, but has none for {name}. "
                f"Return one from its backward, or detach {name} in the baseline."
            )
        if mine is not None:
            none = torch.zeros_like(mine)
            found[f"gradient of {name}"] = Three(
                mine, none if plains is None else plains, none.double() if exacts is None else exacts
            )
    return {name: Three(*(x.detach() for x in three)) for name, three in found.items()}


def _forward(role: str, function: Function, inputs: Tensors, gradients: bool) -> _Run:
    """Call it on copies of its own, so that nobody sees what another did to the inputs."""
    leaves = tuple(x.detach().clone().requires_grad_(gradients and x.is_floating_point()) for x in inputs)
    with torch.set_grad_enabled(gradients):
        result = function(*leaves)
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    for i, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor) or not output.is_floating_point() or not output.numel():
            what = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, torch.Tensor) else repr(output)
            raise ValueError(
                f"What {role} returns must be a tensor of floats that is not empty, or several of them; output {i} is "
                f"{what}. Leave it out (lambda *x: f(*x)[0]) and compare it by torch.equal."
            )
    return _Run(role, leaves, outputs)


def _check_same_layout(fast: _Run, plain: _Run) -> None:
    for i, output in enumerate(plain.outputs):
        if output.dtype == torch.float64:
            raise ValueError(
                f"The golden value is FP64 and can judge narrower formats only, but output {i} is float64. "
                "Test the FP32 version, or compare by torch.testing.assert_close."
            )
    layouts = [[(tuple(x.shape), x.dtype, x.device) for x in run.outputs] for run in (fast, plain)]
    if layouts[0] != layouts[1]:
        shown = [", ".join(f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in run.outputs) for run in (fast, plain)]
        raise ValueError(
            "fn and baseline must give the same number of outputs, of the same shapes and dtypes on the same device; "
            f"fn gives {shown[0]}; baseline {shown[1]}. Cast or reshape in a lambda around one of them."
        )


def _check_golden(exact: _Run, plain: _Run) -> None:
    shapes = [[tuple(x.shape) for x in run.outputs] for run in (exact, plain)]
    dtypes = {x.dtype for x in exact.outputs}
    if shapes[0] != shapes[1] or dtypes != {torch.float64}:
        raise ValueError(
            f"The golden value must be FP64 of the baseline's shapes {shapes[1]}; it is "
            f"{', '.join(sorted(map(str, dtypes)))} of {shapes[0]}. golden= is called with the inputs in FP64."
        )


def _upstream(plain: _Run, seed: int) -> list[torch.Tensor]:
    """N(0, 1) in each output's own format; the same for all three."""
    generator = torch.Generator().manual_seed(_UPSTREAM + seed)
    drawn = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in plain.outputs)
    return [d.to(x.device, x.dtype) for d, x in zip(drawn, plain.outputs, strict=True)]


def _backward(run: _Run, upstream: list[torch.Tensor] | None, plain: _Run) -> dict[int, torch.Tensor]:
    """Gradients by the position of their input; those that autograd does not know are not there."""
    if upstream is None:
        return {}
    which = [i for i, x in enumerate(plain.outputs) if x.requires_grad]
    dead = [i for i in which if not run.outputs[i].requires_grad]
    if dead or not which:
        raise ValueError(
            f"gradients=True needs outputs with a gradient; output {dead[0] if dead else 0} of "
            f"{run.role if dead else 'baseline'} has none. Give it a backward (torch.autograd.Function), "
            "or detach that output in the baseline too."
        )
    floats = [i for i, x in enumerate(run.leaves) if x.requires_grad]
    found = torch.autograd.grad(
        [run.outputs[i] for i in which],
        [run.leaves[i] for i in floats],
        [upstream[i].to(run.outputs[i].dtype) for i in which],
        allow_unused=True,
    )
    return {i: grad for i, grad in zip(floats, found, strict=True) if grad is not None}


def _input_names(baseline: Function, inputs: Tensors) -> list[str]:
    """What the baseline calls them, else their numbers."""
    try:
        parameters = list(inspect.signature(baseline).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return plain[: len(inputs)] if len(plain) >= len(inputs) else [f"input {i}" for i in range(len(inputs))]
