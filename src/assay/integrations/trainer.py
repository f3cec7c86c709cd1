"""transformers' Trainer: `trainer.add_callback(AssayCallback(trainer, every=100))`."""

from __future__ import annotations

import functools
from typing import Any, Unpack

from torch import nn

from assay.integrations.attachment import Attachment, WatchOptions
from assay.integrations.loggers import Logger
from assay.integrations.versions import needed
from assay.integrations.weight_deviation import WeightDeviation
from assay.watching.watch import Watch

needed("transformers", (5,), (6,))

from transformers import (  # noqa: E402
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


class AssayCallback(TrainerCallback):
    """Watches the attention of a training, and keeps or compares its weights; the training's bits stay as they are.

    Figures go into the trainer's own log, with it to whatever it reports to, at its own rhythm, or to a logger: of the
    calls since the last time `assay/ratio`, the worst error over plain attention's (`assay/gradient_ratio` for
    gradients), `assay/error`, the largest from FP64, `assay/over_budget` and `assay/nonfinite`, how many were; and
    `assay/weights/…`, see `WeightDeviation`. Only training steps are watched. All is removed when `trainer.train()`
    ends, also by an exception.

    Args:
        trainer: The one that it is added to.
        watch: Whether attention is watched at all.
        weights: What to do with the weights.
        to: A logger instead of the trainer's log; it is closed at the end.
        **options: Those of `assay.watch`: every, out, …
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        watch: bool = True,
        weights: WeightDeviation | None = None,
        to: Logger | None = None,
        **options: Unpack[WatchOptions],
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise ValueError(
                "AssayCallback needs the trainer that it is added to, trainer.add_callback(AssayCallback(trainer)), "
                f"got {type(trainer).__name__}. A logger goes into to=."
            )
        self._trainer, self._to = trainer, to
        self._attached = Attachment(watch, weights, options)
        self._close_after_training()

    @property
    def watch(self) -> Watch | None:
        """What was seen: its `summary()`, `worst`, `rows`."""
        return self._attached.watch

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach."""
        if self._trainer.state is not state:
            raise ValueError("AssayCallback must be added to the trainer that it was made with, got another one.")
        model: nn.Module = kwargs["model"]
        self._attached.begin(model, state.global_step, state.is_world_process_zero)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Watch."""
        self._attached.begin_step(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at it."""
        if self._attached.end_step(state.global_step) or control.should_log:
            self._log(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What was not logged yet."""
        self._log(state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove all."""
        self.close()

    def close(self) -> None:
        """Remove all; again nothing happens."""
        self._attached.close()
        if self._to is not None:
            self._to.close()

    def _close_after_training(self) -> None:
        """However it ends: a trainer tells its callbacks of no exception, so its `train` must."""
        train = self._trainer.train

        @functools.wraps(train)
        def closing(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self.close()

        vars(self._trainer)["train"] = closing

    def _log(self, state: TrainerState, control: TrainerControl) -> None:
        figures = self._attached.take()
        if not figures:
            return
        if self._to is None:
            wanted = control.should_log
            # Not what a subclass makes of it: some add, and forget, their own figures with every log.
            Trainer.log(self._trainer, figures)
            control.should_log = wanted  # logging takes it for done
        elif state.is_world_process_zero:
            self._to.log(figures, state.global_step)
