"""Loss scaling beside torch's own GradScaler, clipping and optimizers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

from assay.training.loss_scaling import LossScale, LossScaler, loss_scaling
from assay.training.precision import POLICIES

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]
SCALES: list[LossScale] = [None, 128.0, "dynamic"]


def weight(device: str = "cpu") -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -2.0, 3.0], device=device))


def loss_of(parameter: Tensor, size: float = 1.0) -> Tensor:
    """Its gradient is size · parameter."""
    return size * parameter.square().sum() / 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("loss_scale", SCALES)
def test_finite_steps_are_those_without_scaling(loss_scale: LossScale, clip: float | None, device: str) -> None:
    """Scales are powers of 2: dividing by them changes no bit."""
    ours, theirs = weight(device), weight(device)
    optimizers = [torch.optim.AdamW([parameter], lr=0.1) for parameter in (ours, theirs)]
    scaler = LossScaler(loss_scale, device)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scaled(loss_of(ours, step + 1)).backward()
        loss_of(theirs, step + 1).backward()
        norm = torch.nn.utils.clip_grad_norm_([theirs], math.inf if clip is None else clip)
        outcome = scaler.step(optimizers[0], clip, [ours])
        optimizers[1].step()
        assert (outcome.skipped, outcome.grad_norm) == (False, float(norm))
        assert outcome.scale == {None: 1.0, 128.0: 128.0, "dynamic": 65536.0}[loss_scale]
        assert torch.equal(ours, theirs)


def test_the_loss_is_multiplied() -> None:
    loss = torch.tensor(0.5, requires_grad=True)
    assert [LossScaler(scale).scaled(loss).item() for scale in SCALES] == [0.5, 64.0, 32768.0]


def test_dynamic_scaling_is_torch_s() -> None:
    """A wild sequence, beside GradScaler used as torch's documentation says."""
    ours, theirs = weight(), weight()
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in (ours, theirs)]
    scaler = LossScaler("dynamic", initial_scale=2.0**126, growth_interval=3)
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=3)
    skipped = []
    for size in (1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0, 64.0, 1.0):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scaled(loss_of(ours, size)).backward()
        reference.scale(loss_of(theirs, size)).backward()
        before = reference.get_scale()
        outcome = scaler.step(optimizers[0], 1.0, [ours])
        reference.unscale_(optimizers[1])
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        reference.step(optimizers[1])
        reference.update()
        assert (outcome.scale, scaler.scale) == (before, reference.get_scale())
        assert torch.equal(ours, theirs)
        assert outcome.skipped == (reference.get_scale() < before)
        skipped.append(outcome.skipped)
    assert True in skipped
    assert False in skipped
    assert scaler.state_dict() == reference.state_dict()


def test_a_static_scale_skips_and_stays() -> None:
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = LossScaler(2.0**127)
    scaler.scaled(loss_of(parameter)).backward()
    outcome = scaler.step(optimizer, 1.0, [parameter])
    assert (outcome.skipped, outcome.scale, scaler.scale) == (True, 2.0**127, 2.0**127)
    assert not math.isfinite(outcome.grad_norm)
    assert parameter.tolist() == [1.0, -2.0, 3.0]


def test_without_scaling_nothing_is_skipped_by_itself() -> None:
    parameter = weight()
    loss_of(parameter, math.inf).backward()
    outcome = LossScaler().step(torch.optim.SGD([parameter], lr=0.1), None, [parameter])
    assert not outcome.skipped
    assert not torch.isfinite(parameter).any()


@pytest.mark.parametrize("loss_scale", SCALES)
def test_a_step_can_be_made_to_be_skipped(loss_scale: LossScale) -> None:
    parameter = weight()
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    scaler = LossScaler(loss_scale)
    scaler.scaled(loss_of(parameter)).backward()
    outcome = scaler.step(optimizer, None, [parameter], skip=True)
    assert outcome.skipped
    assert outcome.grad_norm == pytest.approx(math.sqrt(14), rel=1e-6)
    assert parameter.tolist() == [1.0, -2.0, 3.0]
    assert not optimizer.state  # not even the moments moved
    scaler.scaled(loss_of(parameter)).backward()
    assert not scaler.step(optimizer, None, [parameter]).skipped


def test_several_optimizers_step_together_or_not_at_all() -> None:
    good, bad = weight(), weight()
    optimizers = [torch.optim.SGD([good], lr=0.1), torch.optim.AdamW([bad], lr=0.1)]
    scaler = LossScaler("dynamic")
    scaler.scaled(loss_of(good) + loss_of(bad, math.inf)).backward()
    assert scaler.step(optimizers, None, [good, bad]).skipped
    assert good.tolist() == bad.tolist() == [1.0, -2.0, 3.0]
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scaled(loss_of(good) + loss_of(bad)).backward()
    assert not scaler.step(optimizers, None, [good, bad]).skipped
    assert good.tolist() == pytest.approx([0.9, -1.8, 2.7])
    assert bad.tolist() != [1.0, -2.0, 3.0]


@pytest.mark.parametrize("fused", [False, True])
def test_fused_optimizers_skip_too(fused: bool) -> None:
    parameter = weight()
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    scaler = LossScaler("dynamic")
    scaler.scaled(loss_of(parameter, math.inf)).backward()
    assert scaler.step(optimizer, 1.0, [parameter]).skipped
    assert parameter.tolist() == [1.0, -2.0, 3.0]


@pytest.mark.parametrize("loss_scale", SCALES)
def test_a_run_goes_on_from_its_state(loss_scale: LossScale) -> None:
    def run(sizes: list[float], scaler: LossScaler, parameter: nn.Parameter) -> list[object]:
        optimizer = torch.optim.SGD([parameter], lr=0.01)
        found: list[object] = []
        for size in sizes:
            optimizer.zero_grad()
            scaler.scaled(loss_of(parameter, size)).backward()
            found.append(scaler.step(optimizer, 1.0, [parameter]))
        return [*found, parameter.tolist()]

    def fresh() -> LossScaler:
        return LossScaler(loss_scale, growth_interval=4)

    sizes = [1.0, 1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    whole, first = weight(), weight()
    expected = run(sizes, fresh(), whole)
    scaler = fresh()
    run(sizes[:3], scaler, first)
    again = fresh()
    again.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert run(sizes[3:], again, first) == expected[3:]
    if loss_scale == "dynamic":
        assert again.scale == 4 * 65536.0


def test_the_state_of_another_scaler_is_refused() -> None:
    for own, other in ((None, "dynamic"), ("dynamic", None), (2.0, 4.0)):
        state = LossScaler(other).state_dict()  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="must be of a LossScaler with loss_scale="):
            LossScaler(own).load_state_dict(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss_scale", ["static", -1.0, math.nan, True])
def test_bad_scales(loss_scale: float) -> None:
    with pytest.raises(ValueError, match="must be None, 'dynamic' or a positive finite number"):
        LossScaler(loss_scale)


@pytest.mark.parametrize("loss_scale", SCALES)
def test_a_step_needs_gradients(loss_scale: LossScale) -> None:
    parameter = weight()
    with pytest.raises(ValueError, match="needs gradients, got none"):
        LossScaler(loss_scale).step(torch.optim.SGD([parameter]), None, [parameter])


def test_a_policy_s_scaler() -> None:
    assert loss_scaling(POLICIES["fp16"]).scale == 65536.0
    assert loss_scaling(POLICIES["bf16"]).scale == 1.0
    assert loss_scaling(POLICIES["fp16"].replace(loss_scale=8.0), torch.device("cpu")).scale == 8.0
