"""What is learnt: its data, its model, its loss. A batch is a function of the seeds and the step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor, nn

from assay._suggest import did_you_mean
from assay.data import images as image_data
from assay.data import text as text_data
from assay.data.images import Captioned
from assay.data.order import held_out, indices
from assay.data.text import Text
from assay.data.vocabulary import Vocabulary
from assay.models.arithmetic import Arithmetic
from assay.models.gpt import Gpt, gpt_sizes, next_token_loss
from assay.models.text_to_image import TextToImage, flow_loss, sample, text_to_image_sizes
from assay.training.attention import Attention
from assay.training.determinism import generator

if TYPE_CHECKING:
    from assay.training.training import Training

Batch = tuple[Tensor, ...]
_Config = TypeVar("_Config")
_Data = TypeVar("_Data")
_HELD_OUT = 0.05
_PROBE = 16
"""Examples of the probe: looking at it costs as much as a third of a step."""
_DROPPED = 0.1
"""The share of captions that are left out, so that the model also learns images without one."""


class Task(Protocol):
    """Something to learn."""

    attribution: str
    """Whose data it is."""
    data: str

    def model(self, attention: Attention, arithmetic: Arithmetic, seed: int) -> nn.Module:
        """A new one; its weights depend on the seed alone."""
        ...

    def batch(self, training: Training, step: int, part: int = 0) -> Batch:
        """The part-th batch of a step, on the CPU."""
        ...

    def probe(self) -> Batch:
        """A batch that is held out, always the same one."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """One number in FP32."""
        ...


class TextToImageTask:
    """Images from captions, by rectified flow."""

    def __init__(self, training: Training) -> None:
        found = _captioned(training.data, training.image)
        config = _size(text_to_image_sizes, training)
        words = Vocabulary.from_captions(found.captions, most=config.words)
        self.config = replace(config, image=training.image)
        self.attribution, self.data = found.attribution, found.name
        self.captions = found.captions
        self._images = found.images
        self._words = torch.tensor([words.encode(caption, config.caption) for caption in found.captions])
        self._train, self._rest = held_out(len(found.captions), _HELD_OUT, 0)

    def model(self, attention: Attention, arithmetic: Arithmetic, seed: int) -> nn.Module:
        """See `Task`."""
        return TextToImage(self.config, attention, arithmetic, seed)

    def batch(self, training: Training, step: int, part: int = 0) -> Batch:
        """Images, captions, noise, times."""
        number = step * training.accumulate + part
        chosen = self._train[indices(len(self._train), training.batch, training.order_seed, number)]
        return self._drawn(chosen, generator(training.noise_seed, "batch", number), _DROPPED)

    def probe(self) -> Batch:
        """See `Task`."""
        return self._drawn(self._rest[:_PROBE], generator("held out"), 0.0)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """See `Task`."""
        images, words, noise, time = batch
        return flow_loss(model, images, words, noise, time)

    def samples(self, model: nn.Module, count: int, device: torch.device, steps: int = 16) -> tuple[list[str], Tensor]:
        """Captions that were held out, and what the model paints for them, (count, 3, S, S) from −1 to 1."""
        chosen = self._rest[:count]
        noise = torch.randn((len(chosen), *self._images.shape[1:]), generator=generator("samples")).to(device)
        painted = sample(model, self._words[chosen].to(device), noise, steps, guidance=3.0)
        return [self.captions[i] for i in chosen.tolist()], painted.cpu()

    def _drawn(self, chosen: Tensor, source: torch.Generator, dropped: float) -> Batch:
        images = self._images[chosen].float() / 127.5 - 1
        noise = torch.randn(images.shape, generator=source)
        time = torch.randn(len(chosen), generator=source).sigmoid()
        kept = torch.rand(len(chosen), 1, generator=source) >= dropped
        return images, self._words[chosen] * kept, noise, time


class GptTask:
    """The next byte of a text."""

    def __init__(self, training: Training) -> None:
        found = _text(training.data)
        self.config = replace(_size(gpt_sizes, training), context=training.context)
        self.attribution, self.data = found.attribution, found.name
        windows = (len(found.tokens) - 1) // training.context
        if windows < 20:
            raise ValueError(
                f"{found.name} has {len(found.tokens)} bytes: too few for 20 pieces of {training.context}. Give more "
                "text, or a smaller context."
            )
        self._tokens, self._context = found.tokens, training.context
        self._train, self._rest = held_out(windows, _HELD_OUT, 0)

    def model(self, attention: Attention, arithmetic: Arithmetic, seed: int) -> nn.Module:
        """See `Task`."""
        return Gpt(self.config, attention, arithmetic, seed)

    def batch(self, training: Training, step: int, part: int = 0) -> Batch:
        """Tokens, one more than the context."""
        number = step * training.accumulate + part
        return self._windows(self._train[indices(len(self._train), training.batch, training.order_seed, number)])

    def probe(self) -> Batch:
        """See `Task`."""
        return self._windows(self._rest[:_PROBE])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """See `Task`."""
        return next_token_loss(model, batch[0])

    def _windows(self, chosen: Tensor) -> Batch:
        places = chosen[:, None] * self._context + torch.arange(self._context + 1)
        return (self._tokens[places].long(),)


TASKS: dict[str, Callable[[Training], Task]] = {"text_to_image": TextToImageTask, "gpt": GptTask}


def find_task(training: Training) -> Task:
    """The task of a training, with its data loaded: once for all trainings that share it."""
    return _task(training.task, training.size, training.data, training.image, training.context)


@cache
def _task(task: str, size: str, data: str, image: int, context: int) -> Task:
    from assay.training.training import Training

    return TASKS[task](Training(task=task, size=size, data=data, image=image, context=context))


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Whose outputs are compared: the blocks, one after the other, and the model itself."""
    for number, block in enumerate(model.get_submodule("blocks").children()):
        yield f"block {number}", block
    yield "output", model


def _size(sizes: dict[str, _Config], training: Training) -> _Config:
    if training.size not in sizes:
        hint = did_you_mean(training.size, sizes)
        raise ValueError(f"Unknown size {training.size!r} of {training.task}. {hint}There are: {', '.join(sizes)}.")
    return sizes[training.size]


def _captioned(data: str, size: int) -> Captioned:
    kind, _, path = data.partition(":")
    sources: dict[str, Callable[[], Captioned]] = {
        "openmoji": lambda: image_data.openmoji(size),
        "folder": lambda: image_data.from_folder(Path(path), size),
        "tar": lambda: image_data.from_tar(Path(path), size),
        "hugging_face": lambda: image_data.from_hugging_face(Path(path), size),
        "saved": lambda: image_data.saved(Path(path)),
        "synthetic": lambda: image_data.synthetic(256, size, 0),
    }
    return _found(sources, kind, data)


def _text(data: str) -> Text:
    kind, _, path = data.partition(":")
    sources: dict[str, Callable[[], Text]] = {
        "python": text_data.python_source,
        "file": lambda: text_data.from_file(Path(path)),
        "synthetic": lambda: text_data.synthetic(100_000, 0),
    }
    return _found(sources, kind, data)


def _found(sources: dict[str, Callable[[], _Data]], kind: str, data: str) -> _Data:
    if kind not in sources:
        hint = did_you_mean(kind, sources)
        raise ValueError(
            f"Unknown data {data!r}. {hint}There are: {', '.join(sources)}; with a path where it is yours, as in "
            "folder:my_images."
        )
    return sources[kind]()
