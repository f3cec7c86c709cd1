"""Lightning: `Trainer(callbacks=[AssayCallback(every=100)])`."""

from __future__ import annotations

from typing import Any, Unpack

from assay.integrations.attachment import Attachment, WatchOptions
from assay.integrations.loggers import Logger
from assay.integrations.versions import needed
from assay.integrations.weight_deviation import WeightDeviation
from assay.watching.watch import Watch

needed("lightning", (2, 4), (3,))

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402


class AssayCallback(Callback):
    """Watches the attention of a training, and keeps or compares its weights; the training's bits stay as they are.

    Figures go to the trainer's own loggers, at its own rhythm, or to another: of the calls since the last time
    `assay/ratio`, the worst error over plain attention's (`assay/gradient_ratio` for gradients), `assay/error`, the
    largest from FP64, `assay/over_budget` and `assay/nonfinite`, how many were; and `assay/weights/…`, see
    `WeightDeviation`. Only training steps are watched. All is removed at the end, also after an exception.

    Args:
        watch: Whether attention is watched at all.
        weights: What to do with the weights.
        to: A logger instead of the trainer's; it is closed at the end.
        **options: Those of `assay.watch`: every, out, …
    """

    def __init__(
        self,
        *,
        watch: bool = True,
        weights: WeightDeviation | None = None,
        to: Logger | None = None,
        **options: Unpack[WatchOptions],
    ) -> None:
        self._attached = Attachment(watch, weights, options)
        self._to = to
        self._step = 0

    @property
    def watch(self) -> Watch | None:
        """What was seen: its `summary()`, `worst`, `rows`."""
        return self._attached.watch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach."""
        self._attached.begin(pl_module, trainer.global_step, trainer.is_global_zero)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A step begins, or goes on with its next batch."""
        self._attached.begin_step(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at it."""
        # Private, but where and when Lightning's own callbacks log: beside the loss of this batch.
        self._step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if self._attached.end_step(trainer.global_step) or trainer._logger_connector.should_update_logs:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What was not logged yet."""
        self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove all."""
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove all."""
        self.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove all; a training that Lightning's tuner stops has no other end."""
        self.close()

    def close(self) -> None:
        """Remove all; again nothing happens."""
        self._attached.close()
        if self._to is not None:
            self._to.close()

    def _log(self, trainer: Trainer) -> None:
        figures = self._attached.take()
        if not figures or not trainer.is_global_zero:
            return
        if self._to is not None:
            self._to.log(figures, self._step)
            return
        for logger in trainer.loggers:
            logger.log_metrics(figures, self._step)
