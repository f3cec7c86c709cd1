"""A training by transformers' Trainer with our callback: its bits stay, its log has the figures, all is removed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from assay.integrations.loggers import TensorBoardLogger
from assay.integrations.trainer import AssayCallback
from assay.integrations.weight_deviation import WeightDeviation
from assay.results.lines import all_records
from assay.results.watch_record import WATCH
from assay.watching.watch import watch
from tests.integrations.events import tensorboard_scalars

# accelerate 1.15 asks DataLoader for pinned memory, of which torch says on a CPU that there is none.
pytestmark = [
    pytest.mark.usefixtures("nothing_is_left_patched"),
    pytest.mark.filterwarnings("ignore:.*pin_memory. argument is set as true"),
]
ORIGINAL = (F.scaled_dot_product_attention,)  # not by a name, where a watch would find and replace it
STEPS = 6
CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number == self.fails_at:
            raise RuntimeError("out of memory")
        ids = (torch.arange(12) * (number + 3)) % 29
        return {"input_ids": ids, "labels": ids}


class NoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.table(input_ids).flatten(0, 1), labels.flatten())}


def trainer(folder: Path, model: nn.Module | None = None, data: Data | None = None, **how: Any) -> Trainer:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "logging_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(**(settings | how))
    return Trainer(model or LlamaForCausalLM(CONFIG), arguments, train_dataset=data or Data(), eval_dataset=Data())


def logged(made: Trainer, name: str) -> dict[int, float]:
    return {int(entry["step"]): entry[name] for entry in made.state.log_history if name in entry}


def with_callback(made: Trainer, **how: Any) -> AssayCallback:
    callback = AssayCallback(made, **how)
    made.add_callback(callback)
    return callback


def test_bits_stay_and_figures_stand_beside_the_loss(tmp_path: Path) -> None:
    evaluated: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3}
    alone, watched = trainer(tmp_path, **evaluated), trainer(tmp_path, **evaluated)
    callback = with_callback(watched)
    alone.train()
    watched.train()
    for name in ("loss", "grad_norm", "eval_loss"):
        assert logged(alone, name) == logged(watched, name) != {}
    assert watched.model is not None
    assert alone.model is not None
    for mine, theirs in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    ratios = logged(watched, "assay/ratio")
    assert ratios.keys() == logged(watched, "loss").keys() == {2, 4, 6}
    assert all(0 < ratio < 2 for ratio in ratios.values())
    assert all(0 < ratio < 3 for ratio in logged(watched, "assay/gradient_ratio").values())
    assert set(logged(watched, "assay/over_budget").values()) == {0.0}
    assert callback.watch is not None
    assert callback.watch.calls == STEPS * 2  # not those of evaluation
    rows = [row for row in callback.watch.rows if row["head"] is None and row["tensor"] == "output"]
    assert ratios[4] == max(row["ratio_rmse"] for row in rows if row["step"] in (2, 3))


def test_whatever_it_reports_to_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    made = trainer(tmp_path, report_to="tensorboard")
    with_callback(made)
    made.train()
    found = tensorboard_scalars(tmp_path / "events")
    assert [step for step, _ in found["train/assay/ratio"]] == [step for step, _ in found["train/loss"]] == [2, 4, 6]


def test_steps_are_the_trainer_s_and_layers_take_turns(tmp_path: Path) -> None:
    made = trainer(tmp_path, gradient_accumulation_steps=2)
    with_callback(made, every=2, out=tmp_path / "rows")
    made.train()
    rows = [row for row in all_records(tmp_path / "rows", WATCH) if row["head"] is None and row["tensor"] == "dq"]
    seen = sorted((row["step"], row["call"], row["layer"]) for row in rows)
    layer = "model.layers.{}.self_attn"
    assert seen == [(step, call, layer.format(step % 2)) for step in range(STEPS) for call in range(2)]


def test_logged_by_epochs(tmp_path: Path) -> None:
    made = trainer(tmp_path, logging_strategy="epoch")
    with_callback(made)
    made.train()
    assert logged(made, "assay/ratio").keys() == logged(made, "loss").keys() == {4, 6}


def test_weights_against_those_of_another_training(tmp_path: Path) -> None:
    first, again, other = trainer(tmp_path), trainer(tmp_path), trainer(tmp_path, bf16=True)
    with_callback(first, watch=False, weights=WeightDeviation(keep=tmp_path / "kept", every=3))
    with_callback(again, watch=False, weights=WeightDeviation(against=tmp_path / "kept", every=3))
    with_callback(other, weights=WeightDeviation(against=tmp_path / "kept", every=3))
    for made in (first, again, other):
        made.train()
    assert logged(again, "assay/weights/max") == {3: 0.0, 6: 0.0}
    moved, found = (logged(other, f"assay/weights/{name}") for name in ("moved", "rmse"))
    assert moved == logged(first, "assay/weights/moved") == logged(again, "assay/weights/moved")
    assert 0 < found[3] < moved[3]
    assert logged(first, "loss").keys() == {2, 4, 6}  # what is logged in between does not move the trainer's own


def test_with_a_logger(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.add_callback(AssayCallback(made, to=TensorBoardLogger(tmp_path / "events"), golden=False))
    made.train()
    assert [step for step, _ in tensorboard_scalars(tmp_path / "events")["assay/difference"]] == [2, 4, 6]
    assert not logged(made, "assay/difference")


class FailingCallback(TrainerCallback):
    """At the event, in its second step."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._fail)

    def _fail(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 1 or state.max_steps == 1:
            raise RuntimeError("out of memory")


def failing(where: str, folder: Path) -> Trainer:
    if where == "model":
        model = LlamaForCausalLM(CONFIG)
        model.model.layers[1].mlp = nn.Linear(1, 1)  # of other shapes
        return trainer(folder, model)
    if where == "data":
        return trainer(folder, data=Data(fails_at=5))
    made = trainer(folder, max_steps=1 if where == "on_train_begin" else STEPS)
    made.callback_handler.callbacks.append(FailingCallback(where))
    return made


@pytest.mark.parametrize("where", ["model", "data", "on_train_begin", "on_step_begin", "on_step_end", "on_train_end"])
def test_after_an_exception_all_is_removed(where: str, tmp_path: Path) -> None:
    made = failing(where, tmp_path)
    callback = AssayCallback(made)
    made.callback_handler.callbacks.insert(0, callback)  # it has begun when another one fails
    with pytest.raises(RuntimeError, match=r"out of memory|cannot be multiplied") as kept:  # and its frames
        made.train()
    assert F.scaled_dot_product_attention is ORIGINAL[0]
    assert not torch.nn.modules.module._global_forward_hooks
    assert made.model is not None
    with watch(made.model) as after:  # nobody else watches
        pass
    assert callback.watch is not after
    del kept


class Kept:
    """A logger."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def test_a_logger_is_closed_after_an_exception(tmp_path: Path) -> None:
    made, kept = failing("on_train_end", tmp_path), Kept()
    made.callback_handler.callbacks.append(AssayCallback(made, to=kept, golden=False))  # not told of its end
    with pytest.raises(RuntimeError, match="out of memory"):
        made.train()
    assert kept.steps == [2, 4, 6]
    assert kept.closed
    assert F.scaled_dot_product_attention is ORIGINAL[0]


def test_a_trainer_trains_again_after_an_exception(tmp_path: Path) -> None:
    data = Data(fails_at=5)
    made = trainer(tmp_path, data=data)
    callback = with_callback(made)
    with pytest.raises(RuntimeError, match="out of memory"):
        made.train()
    data.fails_at = -1
    result = made.train()
    assert result.global_step == STEPS
    assert callback.watch is not None
    assert callback.watch.calls == STEPS * 2


def test_a_model_without_attention_is_refused_at_its_first_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, NoAttention())
    with_callback(made, every=100)
    with pytest.raises(ValueError, match="No attention was found in NoAttention"):
        made.train()
    assert F.scaled_dot_product_attention is ORIGINAL[0]


def test_bad_input(tmp_path: Path) -> None:
    made, other = trainer(tmp_path), trainer(tmp_path)
    with pytest.raises(ValueError, match=r"the trainer that it is added to.* got str\. A logger goes into to="):
        AssayCallback("runs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every must be a whole number"):
        AssayCallback(made, every=0)
    with pytest.raises(ValueError, match="watch=False needs weights="):
        AssayCallback(made, watch=False)
    other.add_callback(AssayCallback(made))
    with pytest.raises(ValueError, match="must be added to the trainer that it was made with"):
        other.train()


@pytest.mark.parametrize(("version", "error"), [("4.57.1", ValueError), (None, ImportError)])
def test_another_transformers(version: str | None, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "assay.integrations.trainer")
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(error, match=r"pip install 'transformers>=5,<6'"):
        import assay.integrations.trainer  # noqa: F401
