"""A watched model: what is found, that its own bits stay, and that nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from assay.results.lines import all_records
from assay.results.record import Record
from assay.results.watch_record import WATCH
from assay.watching.watch import Watch, watch
from tests.watching import models
from tests.watching.models import Layer, Multihead, Stack, inputs, results, stack

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def nothing_is_left_patched() -> Any:
    yield
    assert F.scaled_dot_product_attention is ORIGINAL
    assert vars(models)["scaled_dot_product_attention"] is ORIGINAL
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def whole(w: Watch, tensor: str = "output") -> list[Record]:
    return [row for row in w.rows if row["head"] is None and row["tensor"] == tensor]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_stay_and_every_call_is_seen(dtype: torch.dtype, by_name: bool) -> None:
    model, x = stack(dtype, by_name=by_name), inputs(dtype)
    alone = results(model, x)
    with watch(model) as w:
        watched = results(model, x)
    same(watched, alone)
    assert w.calls == 3
    assert [row["layer"] for row in whole(w)] == ["layers.0", "layers.1", "layers.2"]
    assert [row["layer"] for row in whole(w, "dk")] == ["layers.2", "layers.1", "layers.0"]
    assert len(w.rows) == 3 * 4 * (4 + 1)
    for row in w.rows:
        assert 0 < row["error_rmse"] <= row["error_max"]
        assert row["over"] is False
        assert row["ratio_rmse"] < row["budget"] == (2.0 if row["tensor"] == "output" else 3.0)
        assert (row["batch"], row["heads"], row["queries"], row["keys"], row["dim"]) == (2, 4, 21, 21, 8)
    assert w.first_over is None
    assert w.summary().endswith("All within budget.")


@pytest.mark.parametrize("training", [True, False])
def test_torch_s_own_layer(training: bool) -> None:
    model, x = Stack(Multihead(), Multihead()).train(training), inputs(torch.float32)
    alone = results(model, x)
    with watch(model) as w:
        watched = results(model, x)
    same(watched, alone)
    assert [row["layer"] for row in whole(w)] == ["layers.0.inner", "layers.1.inner"]


def test_under_autocast_the_call_is_that_of_its_format() -> None:
    model, x = stack(torch.float32), inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        alone = results(model, x)
        with watch(model) as w:
            watched = results(model, x)
    same(watched, alone)
    assert {row["format"] for row in w.rows} == {"bf16"}
    assert not any(row["over"] for row in w.rows)
    assert {row["tensor"] for row in w.rows} == {"output", "dq", "dk", "dv"}


class Checkpointed(Stack):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_gradient_checkpointing(reentrant: bool) -> None:
    model, x = Checkpointed(Layer(), Layer()), inputs(torch.float32)
    model.reentrant = reentrant
    alone = results(model, x)
    with watch(model) as w:
        watched = results(model, x)
    same(watched, alone)
    assert len(whole(w)) == 4  # forward, and again in backward
    assert sorted(row["layer"] for row in whole(w, "dq")) == ["layers.0", "layers.1"]


@pytest.mark.parametrize("every", [4, 0.25])
def test_layers_take_turns(every: float) -> None:
    model, x = stack(torch.float32), inputs(torch.float32)
    with watch(model, every=every, golden=False) as w, torch.no_grad():
        for _ in range(8):
            model(x)
    seen = [(row["step"], row["layer"]) for row in whole(w)]
    assert seen == [(step, f"layers.{layer}") for step in range(8) for layer in range(3) if (step + layer) % 4 == 0]
    assert all(row["ratio_rmse"] is None and row["difference_rmse"] is not None for row in w.rows)


def test_a_bad_kernel_is_over_budget_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def sloppy(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        out = ORIGINAL(query, key, value, **how)
        return out + out.mean(2, keepdim=True)

    model, x = stack(), inputs()
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", sloppy)
        with watch(model, golden=True) as w, torch.no_grad():
            model(x)
    assert w.first_over is not None
    assert w.first_over["layer"] == "layers.0"
    assert w.worst.row is not None
    assert w.worst.row["ratio_rmse"] == max(row["ratio_rmse"] for row in w.rows)  # of a head
    assert "First over budget: output of layers.0 at step 0" in w.summary()


def test_nan_is_over_budget() -> None:
    model, x = stack(torch.float32), inputs(torch.float32)

    def broken(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        out = ORIGINAL(query, key, value, **how).clone()
        out[0, 2, 3, 1] = torch.nan
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", broken)
        with watch(model) as w, torch.no_grad():
            model.layers[0](x)
    bad = [row for row in w.rows if row["error_nonfinite"]]
    assert [row["head"] for row in bad] == [2, None]
    assert all(row["over"] and row["error_max"] == float("inf") for row in bad)


def test_rows_reach_a_folder_and_the_worst_call_is_saved(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, x = stack(), inputs()
    with watch(model, out=tmp_path) as w:
        results(model, x)
    found = all_records(tmp_path, WATCH)
    assert len(found) == len(w.rows)
    assert {row["id"] for row in found} == {row["id"] for row in w.rows}
    w.worst.save(tmp_path / "worst.safetensors")
    assert {name: tuple(t.shape) for name, t in load_file(tmp_path / "worst.safetensors").items()} == dict.fromkeys(
        "qkv", (2, 4, 21, 8)
    )


def gelu_fast(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return gelu_fast(self.inner(x))


def test_any_function_and_any_module() -> None:
    torch.manual_seed(0)
    model, x = Perceptron(), inputs(torch.float32)
    alone = results(model, x)
    norm = nn.LayerNorm(models.WIDTH)
    other = nn.Sequential(norm)
    with watch(model, also={gelu_fast: F.gelu}) as w:
        watched = results(model, x)
    same(watched, alone)
    found = [(row["layer"], row["tensor"], row["implementation"]) for row in whole(w) + whole(w, "d0")]
    assert found == [("", "output", "gelu_fast"), ("", "d0", "gelu_fast")]
    assert all(row["over"] for row in whole(w))  # tanh's approximation is far more than FP32's rounding
    with watch(other, also={norm: lambda y: F.layer_norm(y, (models.WIDTH,))}) as w:
        other(x)
    assert not whole(w)[0]["over"]
    assert "forward" not in vars(norm)
    assert gelu_fast.__name__ == "gelu_fast"


def test_bad_use() -> None:
    model, x = stack(torch.float32), inputs(torch.float32)
    with pytest.raises(ValueError, match="do not nest"), watch(model), watch(model):
        pass
    with pytest.raises(ValueError, match="against must be one of baseline, flash, got 'fast'"):
        watch(model, against="fast")
    for every in (0, -1, 1.5):
        with pytest.raises(ValueError, match="every must be"):
            watch(model, every=every)
    with (
        pytest.raises(ValueError, match=r"No attention was found in Linear: it ran 1 times"),
        watch(nn.Linear(2, 2)) as w,
    ):
        w._model(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="No loaded module has the function"), watch(model, also={lambda y: y: F.gelu}):
        pass
    with pytest.raises(RuntimeError, match="stop"), watch(model):  # noqa: PT012
        model(x)
        raise RuntimeError("stop")
    with pytest.raises(ValueError, match="Nothing was watched yet"):
        _ = watch(model).calls
    with watch(model) as w:  # the lock is free again
        F.scaled_dot_product_attention(*(x.unsqueeze(1),) * 3, dropout_p=0.5)
    assert w.skipped == {"dropout: its mask is torch's secret": 1}
    assert "Not compared: 1 call with dropout" in w.summary()


def test_against_flash() -> None:
    import assay.flash.attention  # noqa: F401  (loaded, it is watched too, but not when the watch calls it)

    model, x = stack(torch.float32), inputs(torch.float32)
    alone = results(model, x)
    with watch(model, against="flash") as w:
        same(results(model, x), alone)
    assert {row["against"] for row in w.rows} == {"flash"}
    assert w.calls == 3
    assert {row["tensor"] for row in w.rows} == {"output", "dq", "dk", "dv"}
