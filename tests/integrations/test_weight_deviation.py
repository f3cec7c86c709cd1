"""Weights kept and compared: figures against torch's own, the null, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import wasserstein_distance
from torch import Tensor, nn

from assay.integrations.weight_deviation import WeightDeviation


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False))


def train(watched: WeightDeviation, net: nn.Module, rate: float = 0.1, steps: int = 4) -> dict[int, dict[str, float]]:
    """Step → figures, of a training that only shrinks the weights."""
    watched.begin(net, 0)
    found = {}
    for step in range(1, steps + 1):
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1 - rate)
        found[step] = watched.end_step(net, step)
    return found


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten().double() for x in tensors.values()])


def test_the_same_training_twice_is_at_zero(tmp_path: Path) -> None:
    kept = train(WeightDeviation(keep=tmp_path / "a", every=2), model())
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [f"step-{n}.safetensors" for n in (0, 2, 4)]
    again = train(WeightDeviation(against=tmp_path / "a", every=2), model())
    assert kept[1] == again[1] == kept[3] == again[3] == {}
    for step in (2, 4):
        assert again[step] == {"max": 0, "rmse": 0, "w1": 0, "share": 0, "moved": kept[step]["moved"]}
        assert kept[step]["moved"] > 0


def test_figures(tmp_path: Path) -> None:
    train(WeightDeviation(keep=tmp_path / "a", every=2), model())
    other = WeightDeviation(keep=tmp_path / "b", against=tmp_path / "a", every=4)
    found = train(other, model(), rate=0.11)[4]
    start, theirs, mine = (load_file(tmp_path / f"{name}.safetensors") for name in ("a/step-0", "a/step-4", "b/step-4"))
    gap, way = flat(mine) - flat(theirs), flat(theirs) - flat(start)
    rmse, moved = gap.square().mean().sqrt().item(), way.square().mean().sqrt().item()
    w1 = sum(x.numel() * wasserstein_distance(x.flatten(), theirs[name].flatten()) for name, x in mine.items())
    assert found["max"] == pytest.approx(gap.abs().max().item(), rel=1e-12)
    assert found["rmse"] == pytest.approx(rmse, rel=1e-6)
    assert found["moved"] == pytest.approx(moved, rel=1e-6)
    assert found["share"] == pytest.approx(rmse / moved, rel=1e-6)
    assert found["w1"] == pytest.approx(w1 / len(gap), rel=1e-6)
    assert other.last is not None
    assert [layer.name for layer in other.last.layers] == ["0.weight", "0.bias", "1.weight"]


def test_a_training_that_goes_on_repeats_its_steps(tmp_path: Path) -> None:
    net = model()
    train(WeightDeviation(keep=tmp_path, every=1), net, steps=3)
    WeightDeviation(keep=tmp_path, every=1).begin(net, 2)
    assert torch.equal(load_file(tmp_path / "step-2.safetensors")["0.bias"], dict(net.named_parameters())["0.bias"])
    with pytest.raises(ValueError, match="without weights of another training"):
        WeightDeviation(keep=tmp_path, every=1).begin(model(), 0)


def test_where_the_other_ended_nothing_is_compared(tmp_path: Path) -> None:
    train(WeightDeviation(keep=tmp_path, every=1), model(), steps=2)
    found = train(WeightDeviation(against=tmp_path, every=1), model(), steps=4)
    assert [bool(found[step]) for step in range(1, 5)] == [True, True, False, False]


def test_other_first_weights_are_mentioned(tmp_path: Path) -> None:
    train(WeightDeviation(keep=tmp_path, every=1), model())
    with pytest.warns(UserWarning, match="At step 0 the weights differ already"):
        found = train(WeightDeviation(against=tmp_path, every=1), model(seed=1))
    assert found[1]["share"] > 1


def test_weights_that_do_not_move(tmp_path: Path) -> None:
    train(WeightDeviation(keep=tmp_path, every=1), model(), rate=0.0)
    assert train(WeightDeviation(against=tmp_path, every=1), model(), rate=0.0)[1]["share"] == 0
    with torch.no_grad():
        net, watched = model(), WeightDeviation(against=tmp_path, every=1)
        watched.begin(net, 0)
        next(net.parameters()).fill_(math.nan)
        found = watched.end_step(net, 1)
    assert found["max"] == math.inf


def test_names_of_a_compiled_model_and_weights_in_one_storage(tmp_path: Path) -> None:
    net = model()
    flat_storage = torch.randn(8 * 16 + 16 * 4)
    net[0].weight = nn.Parameter(flat_storage[: 8 * 16].view(16, 8))  # type: ignore[index]
    net[1].weight = nn.Parameter(flat_storage[8 * 16 :].view(4, 16))  # type: ignore[index]
    WeightDeviation(keep=tmp_path).begin(torch.compile(net, backend="eager"), 0)  # type: ignore[arg-type]
    kept = load_file(tmp_path / "step-0.safetensors")
    assert kept.keys() == dict(net.named_parameters()).keys()
    assert torch.equal(kept["1.weight"], flat_storage[8 * 16 :].view(4, 16))


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("assay.integrations.kept_weights.save_file", fails)
    with pytest.raises(OSError, match="No space"):
        WeightDeviation(keep=tmp_path).begin(model(), 0)
    assert not list(tmp_path.iterdir())


class Sharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a folder"):
        WeightDeviation()
    with pytest.raises(ValueError, match="two folders"):
        WeightDeviation(keep=tmp_path, against=tmp_path / ".." / tmp_path.name)
    for every in (0, 0.5, True):
        with pytest.raises(ValueError, match="every must be a whole number"):
            WeightDeviation(keep=tmp_path, every=every)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has those of the steps none"):
        WeightDeviation(against=tmp_path / "nowhere").begin(model(), 0)
    with pytest.raises(ValueError, match="in one process, but those of Sharded"):
        WeightDeviation(keep=tmp_path).begin(Sharded(), 0)
    train(WeightDeviation(keep=tmp_path, every=2), model())
    with pytest.raises(ValueError, match=r"every=3 divides; .* has those of the steps \[0, 2, 4\]"):
        WeightDeviation(against=tmp_path, every=3).begin(model(), 0)
    with pytest.raises(ValueError, match="weights of the same model, but 5 names"):
        WeightDeviation(against=tmp_path, every=2).begin(nn.Linear(8, 16), 0)
    with pytest.raises(ValueError, match="one shape"):
        WeightDeviation(against=tmp_path, every=2).begin(
            nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 5, bias=False)), 0
        )
