"""What is learnt: batches that depend on seeds and steps alone, and data that is refused kindly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.data.order import indices
from assay.models.arithmetic import Arithmetic
from assay.training.attention import find_attention
from assay.training.tasks import TextToImageTask, find_task, layers
from assay.training.training import Training
from tests.training.small import BASE, TEXT


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def test_a_batch_depends_on_the_seeds_and_the_step_alone() -> None:
    task = find_task(BASE)
    torch.manual_seed(1)
    first = task.batch(BASE, 3)
    torch.manual_seed(2)
    task.batch(BASE, 1)
    again = task.batch(replace(BASE, attention="sdpa", precision="fp32", init_seed=7, learning_rate=1.0), 3)
    assert same(first, again) == [True] * 4
    assert not any(same(first, task.batch(BASE, 4)))
    images, words, noise, time = same(first, task.batch(replace(BASE, order_seed=1), 3))
    assert (images, words, noise, time) == (False, False, True, True)
    images, _, noise, time = same(first, task.batch(replace(BASE, noise_seed=1), 3))
    assert (images, noise, time) == (True, False, False)


def test_images_are_from_minus_1_to_1_and_some_captions_are_left_out() -> None:
    many = replace(BASE, batch=500)
    images, words, noise, time = find_task(BASE).batch(many, 0)
    assert -1 <= images.min() < -0.8
    assert images.max() == 1  # the ground is white
    assert images.shape == noise.shape == (500, 3, 8, 8)
    assert ((time > 0) & (time < 1)).all()
    assert 0.05 < (words == 0).all(1).float().mean() < 0.15
    assert words.shape == (500, 4)


def test_the_probe_is_held_out_and_complete() -> None:
    task = find_task(BASE)
    assert isinstance(task, TextToImageTask)
    images, words, *_ = task.probe()
    assert same(task.probe(), task.probe()) == [True] * 4
    assert not (words == 0).all(1).any()
    assert len(images) == 13  # 5% of 256
    assert sorted(torch.cat((task._train, task._rest)).tolist()) == list(range(256))
    kept = {image.numpy().tobytes() for image in task._images[task._train].float() / 127.5 - 1}
    epoch = {image.numpy().tobytes() for image in task.batch(replace(BASE, batch=243), 0)[0]}
    assert epoch == kept


def test_every_image_once_an_epoch() -> None:
    steps = [indices(243, 4, 5, step) for step in range(61)]
    assert sorted(torch.cat(steps)[:243].tolist()) == list(range(243))


def test_text_is_windows_with_one_byte_more() -> None:
    task = find_task(TEXT)
    (tokens,) = task.batch(TEXT, 0)
    assert tokens.shape == (4, 17)
    assert tokens.dtype == torch.int64
    assert bytes(tokens[0].tolist()).decode("ascii").isprintable()
    assert same(task.batch(TEXT, 5), task.batch(replace(TEXT, noise_seed=3), 5)) == [True]
    assert same(task.batch(TEXT, 5), task.batch(replace(TEXT, order_seed=3), 5)) == [False]


def test_a_step_in_parts_sees_what_a_larger_batch_sees() -> None:
    whole, parts = replace(TEXT, batch=8), replace(TEXT, batch=4, accumulate=2)
    task = find_task(TEXT)
    for step in (0, 3):
        halves = [task.batch(parts, step, part)[0] for part in (0, 1)]
        assert torch.equal(torch.cat(halves), task.batch(whole, step)[0])


@pytest.mark.parametrize("training", [BASE, TEXT], ids=["images", "text"])
def test_a_new_model_depends_on_its_seed_alone(training: Training) -> None:
    task = find_task(training)
    one, same_seed, other = (task.model(find_attention("sdpa"), Arithmetic(), seed) for seed in (0, 0, 1))
    pairs = list(zip(one.parameters(), same_seed.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)
    names = [name for name, _ in layers(one)]
    assert names == [*(f"block {i}" for i in range(len(one.get_submodule("blocks")._modules))), "output"]


def test_samples_are_images_for_held_out_captions() -> None:
    task = find_task(BASE)
    assert isinstance(task, TextToImageTask)
    model = task.model(find_attention("sdpa"), Arithmetic(), 0)
    captions, painted = task.samples(model, 3, torch.device("cpu"), steps=2)
    assert painted.shape == (3, 3, 8, 8)
    assert captions == [task.captions[i] for i in task._rest[:3]]
    assert torch.equal(painted, task.samples(model, 3, torch.device("cpu"), steps=2)[1])


def test_bad_data(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("no image")
    few = tmp_path / "few.txt"
    few.write_text("a few bytes")
    cases = (
        (replace(BASE, data=f"folder:{empty}"), "image"),
        (replace(BASE, data=f"folder:{tmp_path / 'nowhere'}"), "nowhere"),
        (replace(BASE, data="opnemoji"), r"Unknown data 'opnemoji'\. Did you mean openmoji"),
        (replace(TEXT, data="pyhton"), r"Unknown data 'pyhton'\. Did you mean python"),
        (replace(TEXT, data=f"file:{few}"), "11 bytes: too few for 20 pieces of 16"),
        (replace(TEXT, data=f"file:{tmp_path / 'nowhere.txt'}"), "nowhere"),
        (replace(BASE, size="dott"), r"Unknown size 'dott' of text_to_image\. Did you mean dot"),
        (replace(TEXT, size="1b"), "Unknown size '1b' of gpt"),
        (replace(BASE, image=10), "image.*patch"),
    )
    for training, says in cases:
        with pytest.raises(ValueError, match=says):
            find_task(training)


def test_images_without_captions(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    with pytest.raises(ValueError, match="caption"):
        find_task(replace(BASE, data=f"folder:{tmp_path}"))
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"a red square, {number}")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    (tmp_path / "broken.txt").write_text("a broken one")
    task = find_task(replace(BASE, data=f"folder:{tmp_path}"))
    assert isinstance(task, TextToImageTask)
    assert task.captions == tuple(f"a red square, {number}" for number in range(3))
