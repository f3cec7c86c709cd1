"""Figures given to a logger are found again by the library itself, or in its files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from assay.integrations.loggers import Logger, MLflowLogger, TensorBoardLogger, WandbLogger
from assay.integrations.versions import needed
from tests.integrations.events import tensorboard_scalars, wandb_rows

FIGURES = [(0, {"assay/ratio": 0.5, "assay/over_budget": 0.0}), (7, {"assay/ratio": float("inf")})]
FOUND = {"assay/ratio": [(0, 0.5), (7, float("inf"))], "assay/over_budget": [(0, 0.0)]}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_SILENT", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def told(logger: Logger) -> None:
    for step, figures in FIGURES:
        logger.log(figures, step)
    logger.close()
    logger.close()


def of_wandb(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in wandb_rows(folder):
        for name in FOUND.keys() & row.keys():
            found.setdefault(name, []).append((row["assay/step"], row[name]))
    return found


def of_mlflow(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=folder.as_uri())
    experiment = client.get_experiment_by_name("assay")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    return {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in FOUND}


@pytest.mark.parametrize(
    ("make", "read"),
    [(TensorBoardLogger, tensorboard_scalars), (WandbLogger, of_wandb), (MLflowLogger, of_mlflow)],
)
def test_a_folder(make: Callable[[Any], Logger], read: Callable[[Path], Any], tmp_path: Path) -> None:
    told(make(tmp_path / "new"))
    assert read(tmp_path / "new") == FOUND


@pytest.mark.parametrize("make", [TensorBoardLogger, WandbLogger, MLflowLogger])
def test_nothing_is_opened_before_the_first_figure(make: Callable[[Any], Logger], tmp_path: Path) -> None:
    make(str(tmp_path / "new")).close()
    assert not list(tmp_path.rglob("*.wandb")) + list(tmp_path.rglob("events*")) + list(tmp_path.rglob("metrics"))


def test_a_writer_of_ones_own_stays_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        told(TensorBoardLogger(writer))
        assert tensorboard_scalars(tmp_path) == FOUND  # on the disk, and
        writer.add_scalar("mine", 1.0, 8)
    assert tensorboard_scalars(tmp_path)["mine"] == [(8, 1.0)]


def test_a_run_of_ones_own_keeps_its_rows_in_wandb(tmp_path: Path) -> None:
    import wandb

    with wandb.init(dir=tmp_path, project="mine") as run:
        logger = WandbLogger(run)
        for step in range(4):
            logger.log({"assay/ratio": step / 2}, step)
            assert run.step == step  # still the user's row: what is logged to a step that is over is lost
            run.log({"loss": 10.0 - step}, step=step, commit=True)
        logger.close()
        run.log({"last": 1.0})
    assert wandb_rows(tmp_path) == [
        *({"assay/ratio": step / 2, "assay/step": step, "loss": 10.0 - step} for step in range(4)),
        {"last": 1.0},
    ]


def test_another_run_is_not_taken_over_in_wandb(tmp_path: Path) -> None:
    import wandb

    with wandb.init(dir=tmp_path, project="mine") as run:
        told(WandbLogger(tmp_path / "new"))
        assert wandb.run is run
        run.log({"loss": 1.0})
    assert of_wandb(tmp_path / "new") == FOUND
    assert wandb_rows(tmp_path) == [{"loss": 1.0}]


def test_a_run_of_ones_own_goes_on_in_mlflow(tmp_path: Path) -> None:
    import mlflow

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "new").as_uri())
    try:
        with mlflow.start_run() as run:
            told(MLflowLogger(run))
            mlflow.log_metric("mine", 1.0, step=8)
            found = mlflow.MlflowClient().get_run(run.info.run_id)
        assert found.info.status == "RUNNING"
        assert found.data.metrics == {"assay/ratio": float("inf"), "assay/over_budget": 0.0, "mine": 1.0}
    finally:
        mlflow.set_tracking_uri(before)


def test_a_folder_that_mlflow_refuses_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.exceptions import MlflowException

    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    with pytest.raises(MlflowException, match="sqlite"):
        MLflowLogger(tmp_path)


@pytest.mark.parametrize("scheme", ["sqlite:///", "nosuch://"])
def test_a_place_that_mlflow_does_not_know_is_refused_with_what_to_install(scheme: str, tmp_path: Path) -> None:
    if scheme == "sqlite:///" and find_spec("sqlalchemy") is not None:
        pytest.skip("the whole mlflow, with databases, is installed")
    with pytest.raises(ValueError, match=rf"got {scheme}{tmp_path}/mlflow.db\..*pip install mlflow\."):
        MLflowLogger(f"{scheme}{tmp_path}/mlflow.db")


@pytest.mark.parametrize("make", [TensorBoardLogger, WandbLogger, MLflowLogger])
def test_other_things_are_refused(make: Callable[[Any], Logger]) -> None:
    with pytest.raises(ValueError, match=rf"{make.__name__} takes .*got int"):
        make(3)


@pytest.mark.parametrize(
    ("make", "name"), [(TensorBoardLogger, "tensorboard"), (WandbLogger, "wandb"), (MLflowLogger, "mlflow")]
)
def test_a_library_that_is_missing_or_of_another_version_is_named(
    make: Callable[[Any], Logger], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{name}.__version__", "0.1.2")
    with pytest.raises(ValueError, match=rf"{name}>=[\d.]+,<\d, got 0.1.2: pip install"):
        make(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"not installed: pip install '{name}>="):
        make(tmp_path)


def test_a_folder_by_the_name_of_a_library_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_library").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="not installed"):
        needed("no_such_library", (1,), (2,))


def test_what_a_library_misses_itself_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_there.py").write_text("import no_such_part")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_part"):
        needed("half_there", (1,), (2,))


def test_importing_imports_none_of_them() -> None:
    program = """
import sys, assay.integrations.loggers
print({"torch", "tensorboard", "wandb", "mlflow"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
