"""A training by Lightning with our callback: its bits stay, its loggers get the figures, nothing is left behind."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from assay.integrations.lightning_ import AssayCallback
from assay.integrations.loggers import TensorBoardLogger
from assay.integrations.weight_deviation import WeightDeviation
from assay.results.lines import all_records
from assay.results.watch_record import WATCH
from tests.integrations.events import tensorboard_scalars
from tests.watching.models import Layer, Stack, inputs

pytestmark = [
    pytest.mark.usefixtures("nothing_is_left_patched"),
    pytest.mark.filterwarnings(
        "ignore:.*isinstance.treespec, LeafSpec:FutureWarning",  # Lightning 2.6 uses what torch 2.13 deprecates
        "ignore:.*does not have many workers",  # its advice for larger data, on machines with more cores
    ),
]
ORIGINAL = (F.scaled_dot_product_attention,)  # not by a name, where a watch would find and replace it


def lit(base: Any = pl.LightningModule, net: nn.Module | None = None, fails_at: int = -1) -> Any:
    """A module that never calls itself, only what is inside, as most do."""

    class Lit(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net or Stack(Layer(), Layer())

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            if number == fails_at:
                raise RuntimeError("out of memory")
            loss: Tensor = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Tensor, number: int) -> None:
            self.log("held_out", self.net(batch).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    return Lit()


def fit(folder: Path, module: Any, *callbacks: Any, trainer: Any = pl.Trainer, **how: Any) -> Any:
    data: Any = [inputs(torch.float32, seed)[0] for seed in range(6)]
    made = trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=how.pop("logger", None) or CSVLogger(folder, "", ""),
        log_every_n_steps=how.pop("log_every_n_steps", 2),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        **how,
    )
    made.fit(module, DataLoader(data, batch_size=1), DataLoader(data, batch_size=3))
    return made


def logged(folder: Path, name: str) -> dict[int, float]:
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def test_bits_stay_and_figures_stand_beside_the_loss(tmp_path: Path) -> None:
    alone, watched, callback = lit(), lit(), AssayCallback()
    fit(tmp_path / "alone", alone)
    fit(tmp_path / "watched", watched, callback)
    assert logged(tmp_path / "alone", "loss") == logged(tmp_path / "watched", "loss")
    assert logged(tmp_path / "alone", "held_out") == logged(tmp_path / "watched", "held_out")
    for mine, theirs in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    ratios = logged(tmp_path / "watched", "assay/ratio")
    assert ratios.keys() == logged(tmp_path / "watched", "loss").keys() == {1, 3, 5}
    assert all(0 < ratio < 2 for ratio in ratios.values())
    assert all(0 < ratio < 3 for ratio in logged(tmp_path / "watched", "assay/gradient_ratio").values())
    assert set(logged(tmp_path / "watched", "assay/over_budget").values()) == {0.0}
    assert set(logged(tmp_path / "watched", "assay/nonfinite").values()) == {0.0}
    assert callback.watch is not None
    assert callback.watch.calls == 6 * 2  # not those of validation
    worst = [row for row in callback.watch.rows if row["head"] is None and row["tensor"] == "output"]
    assert ratios[3] == max(row["ratio_rmse"] for row in worst if row["step"] in (2, 3))


def test_steps_are_the_trainer_s_and_layers_take_turns(tmp_path: Path) -> None:
    fit(tmp_path, lit(), AssayCallback(every=2, out=tmp_path / "rows"), accumulate_grad_batches=2)
    rows = [row for row in all_records(tmp_path / "rows", WATCH) if row["head"] is None and row["tensor"] == "dq"]
    seen = sorted((row["step"], row["call"], row["layer"]) for row in rows)
    assert seen == [(step, call, f"net.layers.{step % 2}") for step in range(3) for call in range(2)]


def test_what_was_not_logged_yet_is_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    fit(tmp_path, lit(), AssayCallback(golden=False), log_every_n_steps=4)
    assert logged(tmp_path, "assay/difference").keys() == {3, 5}


def test_weights_against_those_of_another_training(tmp_path: Path) -> None:
    keep, same = WeightDeviation(keep=tmp_path / "kept", every=3), WeightDeviation(against=tmp_path / "kept", every=3)
    fit(tmp_path / "first", lit(), AssayCallback(watch=False, weights=keep))
    fit(tmp_path / "again", lit(), AssayCallback(watch=False, weights=same))
    fit(tmp_path / "in bf16", lit(), AssayCallback(weights=same), precision="bf16-mixed")
    assert logged(tmp_path / "again", "assay/weights/max") == {2: 0.0, 5: 0.0}
    moved, found = (logged(tmp_path / "in bf16", f"assay/weights/{name}") for name in ("moved", "rmse"))
    assert (
        moved == logged(tmp_path / "first", "assay/weights/moved") == logged(tmp_path / "again", "assay/weights/moved")
    )
    assert 0 < found[2] < moved[2]
    assert logged(tmp_path / "in bf16", "assay/weights/share")[5] == pytest.approx(found[5] / moved[5])


def test_with_a_logger_and_the_trainer_of_the_other_package(tmp_path: Path) -> None:
    callback = AssayCallback(to=TensorBoardLogger(tmp_path / "events"))
    logger = pytorch_lightning.loggers.CSVLogger(tmp_path, "", "")
    module = lit(pytorch_lightning.LightningModule)
    fit(tmp_path, module, callback, trainer=pytorch_lightning.Trainer, logger=logger)
    assert [step for step, _ in tensorboard_scalars(tmp_path / "events")["assay/ratio"]] == [1, 3, 5]
    assert not logged(tmp_path, "assay/ratio")


@pytest.mark.parametrize("fails_at", [0, 3])
def test_removed_after_an_exception(fails_at: int, tmp_path: Path) -> None:
    callback = AssayCallback()
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(tmp_path, lit(fails_at=fails_at), callback)
    assert F.scaled_dot_product_attention is ORIGINAL[0]
    fit(tmp_path / "again", lit(), callback)
    assert callback.watch is not None
    assert callback.watch.calls == 12


def test_a_model_without_attention_is_refused_at_its_first_step(tmp_path: Path) -> None:
    net = nn.Linear(32, 32)
    with pytest.raises(ValueError, match="No attention was found in Lit"):
        fit(tmp_path, lit(net=net), AssayCallback(every=100))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="watch=False needs weights="):
        AssayCallback(watch=False)
    with pytest.raises(ValueError, match=r"no options of a watch; got .* every"):
        AssayCallback(watch=False, weights=WeightDeviation(keep="kept"), every=3)
    with pytest.raises(ValueError, match="every must be a whole number"):
        AssayCallback(every=-1)
    with pytest.raises(TypeError, match="evry"):
        AssayCallback(evry=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(("version", "error"), [("1.9.5", ValueError), (None, ImportError)])
def test_another_lightning(version: str | None, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "assay.integrations.lightning_")
    if version is None:
        monkeypatch.setitem(sys.modules, "lightning", None)
    else:
        monkeypatch.setattr("lightning.__version__", version)
    with pytest.raises(error, match=r"pip install 'lightning>=2.4,<3'"):
        import assay.integrations.lightning_  # noqa: F401
