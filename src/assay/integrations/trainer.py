"""transformers' Trainer: `trainer.add_callback(AssayCallback(trainer, every=100))`."""

from __future__ import annotations

import weakref
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
    `assay/weights/…`, see `WeightDeviation`. Only training steps are watched.

    All is removed when training ends. If it ends by an exception, of which Trainer tells no callback, the model stays
    watched until another training of this thread begins, the trainer is garbage, or `close` is called:
    `with contextlib.closing(AssayCallback(trainer)) as callback:` around `trainer.train()` does that in any case.

    Args:
        to: The trainer that it is added to, or a logger, which is closed at the end.
        watch: Whether attention is watched at all.
        weights: What to do with the weights.
        **options: Those of `assay.watch`: every, out, …
    """

    def __init__(
        self,
        to: Trainer | Logger,
        *,
        watch: bool = True,
        weights: WeightDeviation | None = None,
        **options: Unpack[WatchOptions],
    ) -> None:
        if not isinstance(to, Trainer) and not (hasattr(to, "log") and hasattr(to, "close")):
            raise ValueError(
                "AssayCallback needs to know where its figures go: trainer.add_callback(AssayCallback(trainer)), or a "
                f"logger, such as TensorBoardLogger(folder); got {type(to).__name__}."
            )
        self._to = to
        self._attached = Attachment(watch, weights, options)
        weakref.finalize(self, self._attached.close)

    @property
    def watch(self) -> Watch | None:
        """What was seen: its `summary()`, `worst`, `rows`."""
        return self._attached.watch

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach."""
        if isinstance(self._to, Trainer) and self._to.state is not state:
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
        if not isinstance(self._to, Trainer):
            self._to.close()

    def _log(self, state: TrainerState, control: TrainerControl) -> None:
        figures = self._attached.take()
        if not figures:
            return
        if isinstance(self._to, Trainer):
            wanted = control.should_log
            # Not what a subclass makes of it: some add, and forget, their own figures with every log.
            Trainer.log(self._to, figures)
            control.should_log = wanted  # logging takes it for done
        elif state.is_world_process_zero:
            self._to.log(figures, state.global_step)
