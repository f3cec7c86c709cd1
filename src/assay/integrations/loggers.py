"""Where figures of a training go: TensorBoard, Weights & Biases or MLflow, behind one small interface.

Each takes a run that is there already, and leaves it open, or the place of a new one, which it opens with the first
figures and ends when it is closed. A library is imported when its logger is made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from assay.integrations.versions import needed

_STEP = "assay/step"


class Logger(Protocol):
    """What a callback needs; any object with these two will do."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Keep what was measured at a step."""

    def close(self) -> None:
        """All that was logged is kept; a run that the logger opened has ended."""


class TensorBoardLogger:
    """Into a SummaryWriter, or into events in a folder."""

    def __init__(self, to: Path | str | Any) -> None:
        self._folder = _path(to)
        if self._folder is not None:
            needed("tensorboard", (2, 18), (3,))
        elif not hasattr(to, "add_scalar"):
            raise ValueError(f"TensorBoardLogger takes a folder or a SummaryWriter, got {type(to).__name__}.")
        self._writer: Any = None if self._folder is not None else to

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """One scalar for each."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """On the disk."""
        if self._folder is None:
            self._writer.flush()
        elif self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbLogger:
    """Into a run of W&B, or into a new one in a folder, offline: `wandb sync` uploads it.

    Figures are drawn over `assay/step`, a figure of its own. In a run of yours they wait for its next row, so that the
    numbers of its rows stay yours.
    """

    def __init__(self, to: Path | str | Any) -> None:
        self._wandb = needed("wandb", (0, 20), (1,))
        self._folder = _path(to)
        if self._folder is None and not (hasattr(to, "log") and hasattr(to, "define_metric")):
            raise ValueError(f"WandbLogger takes a folder or a run, as wandb.init() gives it; got {type(to).__name__}.")
        self._run: Any = None if self._folder is not None else to
        self._defined: set[str] = set()

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """One row, or part of one."""
        if self._run is None and self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)  # or it takes another one
            self._run = self._wandb.init(dir=self._folder, project="assay", mode="offline", reinit="create_new")
        for name in figures.keys() - self._defined:
            self._run.define_metric(name, step_metric=_STEP)
            self._defined.add(name)
        self._run.log({**figures, _STEP: step}, commit=self._folder is not None)

    def close(self) -> None:
        """A run of yours goes on."""
        if self._folder is not None and self._run is not None:
            self._run.finish()
            self._run = None
            self._defined.clear()


class MLflowLogger:
    """Into a run of MLflow, or into a new one at a tracking URI: "http://…", "sqlite:///mlflow.db", or a folder.

    Databases such as sqlite need the whole `mlflow`, which `mlflow-skinny` is not. A folder is MLflow's file store,
    which its later versions take only where MLFLOW_ALLOW_FILE_STORE=true is set.
    """

    def __init__(self, to: Path | str | Any) -> None:
        needed("mlflow", (3,), (4,))
        from mlflow.tracking import MlflowClient
        from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException

        place, info = _path(to), getattr(to, "info", None)
        if place is None and not hasattr(info, "run_id"):
            raise ValueError(
                "MLflowLogger takes a run, as mlflow.start_run() gives it, a tracking URI or a folder; "
                f"got {type(to).__name__}."
            )
        self._mine = place is not None
        self._run: Any = None if info is None else info.run_id
        uri = None if place is None else str(to) if "://" in str(to) else place.absolute().as_uri()
        try:
            self._client = MlflowClient(tracking_uri=uri)
        except UnsupportedModelRegistryStoreURIException as error:
            raise ValueError(
                f"MLflowLogger takes a tracking URI that the installed MLflow knows, got {to}. mlflow-skinny knows "
                "http://… and folders; databases, such as sqlite:///…, need the whole of it: pip install mlflow."
            ) from error

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """All at once."""
        from mlflow.entities import Metric

        if self._run is None:
            experiment = self._client.get_experiment_by_name("assay")
            number = experiment.experiment_id if experiment else self._client.create_experiment("assay")
            self._run = self._client.create_run(number).info.run_id
        now = int(1000 * time.time())
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in figures.items()])

    def close(self) -> None:
        """A run of yours goes on."""
        if self._mine and self._run is not None:
            self._client.set_terminated(self._run)
            self._run = None


def _path(to: object) -> Path | None:
    return Path(to) if isinstance(to, str | os.PathLike) else None
