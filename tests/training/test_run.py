"""One training: the steps it takes, against the same written down plainly; accumulation; saving and restoring."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from assay.models.arithmetic import Arithmetic
from assay.training.attention import find_attention
from assay.training.blame import Diverged
from assay.training.observation import observe
from assay.training.optimizers import learning_rate
from assay.training.precision import POLICIES
from assay.training.tasks import find_task
from assay.training.training import Training
from tests.training.small import BASE, SKIPPING, TEXT, assert_same_bits, new_run, state, trained


def add_dropout(model: nn.Module) -> None:
    """Random numbers from torch's own generator, in the middle of a step."""
    layer = model.get_submodule("blocks.0.mlp")
    layer.register_forward_hook(lambda module, given, output: nn.functional.dropout(output, 0.5))


def test_a_run_is_plain_pytorch() -> None:
    """The loop that anybody would write, in FP32: the same bits, and the average of the weights beside them."""
    training = replace(TEXT, precision="fp32", clip=0.5)
    task = find_task(training)
    model = task.model(find_attention("standard"), Arithmetic(), 0)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    average = {name: p.detach().double() for name, p in model.named_parameters()}
    run = new_run(training)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, 6, 2, 1e-3)
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(training, step))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        keep = min(0.9, (1 + step) / (10 + step))
        average = {n: keep * average[n] + (1 - keep) * p.detach().double() for n, p in model.named_parameters()}
        progress = run.advance()
        assert (progress.loss, progress.grad_norm) == (loss.item(), norm.item())
        assert (progress.scale, progress.skipped) == (1.0, False)
    assert_same_bits(
        {name: p.detach() for name, p in run.model.named_parameters()},
        {name: p.detach() for name, p in model.named_parameters()},
    )
    for name, value in run.average.items():
        assert torch.allclose(value.double(), average[name], rtol=1e-6, atol=1e-8)


def test_two_parts_are_one_batch_of_twice_the_size() -> None:
    whole = trained(replace(TEXT, precision="fp32", batch=8, optimizer="sgd", learning_rate=0.1))
    parts = trained(replace(TEXT, precision="fp32", batch=4, accumulate=2, optimizer="sgd", learning_rate=0.1))
    once = trained(replace(TEXT, precision="fp32", batch=4, optimizer="sgd", learning_rate=0.1))
    gaps = []
    for other in (parts, once):
        pairs = zip(whole.model.parameters(), other.model.parameters(), strict=True)
        gaps.append(max((a - b).abs().max().item() for a, b in pairs))
    assert gaps[0] < 2e-6
    assert gaps[1] > 1e-3


def test_the_gradient_of_a_part_counts_half() -> None:
    training = replace(TEXT, precision="fp32", batch=4, accumulate=2, clip=None)
    run, task = new_run(training), find_task(training)
    losses = [task.loss(run.model, task.batch(training, 0, part)).item() for part in (0, 1)]
    assert losses[0] != losses[1]
    assert run.advance().loss == pytest.approx(sum(losses) / 2, rel=1e-6)


def test_two_equal_trainings_have_the_same_bits_whatever_else_is_drawn() -> None:
    one = trained(BASE)
    run = new_run(BASE)
    for _ in range(BASE.steps):
        torch.randn(7)
        run.advance()
        observe(run)
    assert_same_bits(state(run), state(one))


def test_dropout_is_of_the_noise_seed_and_the_step() -> None:
    training = replace(TEXT, change=add_dropout)
    torch.manual_seed(1)
    one = [new_run(training).advance().loss for _ in range(2)]
    assert one[0] == one[1] != new_run(replace(training, noise_seed=1)).advance().loss
    assert one[0] != new_run(TEXT).advance().loss


@pytest.mark.parametrize(
    "training",
    [
        BASE,
        replace(BASE, precision="fp16"),
        replace(BASE, precision=SKIPPING, learning_rate=1e-2),
        replace(BASE, precision="bf16_pure", optimizer="sgd"),
        replace(BASE, precision="fp8"),
        replace(TEXT, optimizer="muon", accumulate=2),
        replace(TEXT, change=add_dropout),
    ],
    ids=["bf16", "fp16", "skipping", "pure, sgd", "fp8", "muon", "dropout"],
)
def test_restored_it_goes_on_with_the_same_bits(training: Training) -> None:
    expected = trained(training)
    half = trained(training, steps=3)
    tensors, numbers = state(half), half.numbers()
    fresh = new_run(training)
    fresh.restore(tensors, numbers)
    assert_same_bits(state(fresh), tensors)
    for _ in range(3):
        fresh.advance()
    assert_same_bits(state(fresh), state(expected))
    assert fresh.numbers() == expected.numbers()
    assert (fresh.step, fresh.skipped) == (6, expected.skipped)


def test_a_skipped_step_changes_nothing_and_is_counted() -> None:
    run = new_run(replace(BASE, precision="fp32"))
    run.advance()
    before, average = state(run), {name: value.clone() for name, value in run.average.items()}
    progress = run.advance(skip=True)
    assert progress.skipped
    assert_same_bits(state(run), before)
    assert_same_bits(run.average, average)
    assert (run.step, run.skipped) == (2, [1])
    assert run.advance().skipped is False


def test_overflowing_steps_are_skipped_with_a_static_scale() -> None:
    huge = POLICIES["fp16"].replace(loss_scale=2.0**30)
    run = new_run(replace(BASE, precision=huge))
    before = state(run)
    assert [run.advance().skipped for _ in range(3)] == [True] * 3
    assert run.skipped == [0, 1, 2]
    assert_same_bits(state(run), before)
    assert run.advance().scale == 2.0**30


def test_a_dynamic_scale_comes_down() -> None:
    run = new_run(replace(BASE, precision="fp16"))
    run.scaling.load_state_dict({**run.scaling.state_dict(), "scale": 2.0**24})
    found = [run.advance() for _ in range(6)]
    scales = [progress.scale for progress in found]
    assert [progress.skipped for progress in found] == [scale >= 2.0**20 for scale in scales]
    assert scales == [2.0**e for e in (24, 23, 22, 21, 20, 19)]


def test_a_change_is_made_before_training() -> None:
    def double(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("embedding.weight").mul_(2)

    plain, changed = (new_run(replace(TEXT, change=change)) for change in (None, double))
    weights: list[Tensor] = [run.model.get_parameter("embedding.weight") for run in (plain, changed)]
    assert torch.equal(2 * weights[0], weights[1])
    assert torch.equal(changed.average["embedding.weight"], weights[1])


def test_a_loss_that_is_no_number_leaves_the_weights() -> None:
    run = trained(replace(TEXT, precision="fp32"), steps=2)

    def spoil(module: nn.Module, given: object, output: Tensor) -> Tensor:
        return output * math.inf

    run.model.get_submodule("blocks.0.attention.out").register_forward_hook(spoil)
    before = state(run)
    with pytest.raises(Diverged, match=r"its loss was nan at step 3; it began in blocks\.0\.attention\.out") as caught:
        run.advance()
    assert (caught.value.step, run.step) == (2, 2)
    assert math.isnan(caught.value.loss)
    assert_same_bits(state(run), before)


def test_a_nan_in_an_earlier_part_is_found_too() -> None:
    run = new_run(replace(TEXT, precision="fp32", accumulate=2))
    bad = run.task.batch(run.training, 0, 0)[0]

    def spoil(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * math.nan if torch.equal(given[0], bad[:, :-1]) else output

    run.model.get_submodule("embedding").register_forward_hook(spoil)
    with pytest.raises(Diverged, match="it began in embedding"):
        run.advance()


def test_held_out_loss_is_of_the_probe() -> None:
    run = new_run(replace(BASE, precision="fp32"))
    images, _, noise, _ = run.task.probe()
    expected = (noise - images).square().mean().item()  # a new model says 0
    assert observe(run)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's tracer looks at it
@pytest.mark.parametrize("task", ["images", "text"])
@pytest.mark.parametrize("precision", POLICIES)
def test_compiled_it_trains_alike(precision: str, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and differentiated as `torch.compile` does, without its code generator, which may fuse and round less."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    base = replace(BASE if task == "images" else TEXT, precision=precision)
    eager, compiled = (new_run(replace(base, compile=compile)) for compile in (False, True))
    for _ in range(2):
        expected = eager.advance()
        found = compiled.advance()
        assert (found.loss, found.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-5)
