"""What the callbacks share, without any library: the figures of a step, and one training after another."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from assay.integrations.attachment import Attachment
from assay.watching.watch import watch
from tests.watching.models import inputs, results, stack

pytestmark = pytest.mark.usefixtures("nothing_is_left_patched")
ORIGINAL = (F.scaled_dot_product_attention,)


def sloppy(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    out = ORIGINAL[0](query, key, value, **how)
    return out + out.mean(2, keepdim=True)


def broken(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    out = ORIGINAL[0](query, key, value, **how)
    return torch.where(torch.arange(out.shape[-1]) == 0, torch.nan, out)


def one_head(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    """One of the four is a little off: three times its error, but hardly more of all four's."""
    out = ORIGINAL[0](query, key, value, **how)
    return torch.where(torch.arange(4).view(4, 1, 1) == 2, out * (1 + 2**-8), out)


def step(attached: Attachment, model: torch.nn.Module, number: int = 0) -> dict[str, float]:
    attached.begin_step(number)
    results(model, inputs())
    assert not attached.end_step(number + 1)
    return attached.take()


def begun(model: torch.nn.Module, **options: Any) -> Attachment:
    attached = Attachment(True, None, options)  # type: ignore[arg-type]
    attached.begin(model, 0, True)
    return attached


def test_figures_of_a_good_kernel() -> None:
    model = stack()
    attached = begun(model)
    figures = step(attached, model)
    assert list(figures) == [f"assay/{name}" for name in (
        "error", "gradient_error", "gradient_ratio", "nonfinite", "over_budget", "ratio",
    )]  # fmt: skip
    assert figures["assay/over_budget"] == figures["assay/nonfinite"] == 0
    rows = [row for row in attached.watch.rows if row["head"] is None]  # type: ignore[union-attr]
    assert figures["assay/error"] == max(row["error_max"] for row in rows if row["tensor"] == "output")
    assert figures["assay/gradient_ratio"] == max(row["ratio_rmse"] for row in rows if row["tensor"] != "output")
    assert attached.take() == {}
    attached.close()


def test_a_bad_kernel_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack()
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", sloppy)
        attached = begun(model)
        figures = step(attached, model)
        attached.close()
    assert figures["assay/over_budget"] >= 3
    assert figures["assay/ratio"] > 10
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", broken)
        attached = begun(model)
        figures = step(attached, model)
        attached.close()
    assert figures["assay/nonfinite"] > 0
    assert figures["assay/error"] == float("inf")


def test_a_bad_head_is_counted_as_the_summary_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack()
    monkeypatch.setattr(F, "scaled_dot_product_attention", one_head)
    attached = begun(model)
    figures = step(attached, model)
    attached.close()
    assert attached.watch is not None
    rows = list(attached.watch.rows)
    assert not any(row["over"] for row in rows if row["head"] is None and row["tensor"] == "output")
    over = {(row["layer"], row["tensor"]) for row in rows if row["over"]}
    assert len(over) >= 3
    assert figures["assay/over_budget"] == len(over)
    table = [line.split() for line in attached.watch.summary().splitlines() if line.startswith("layers.")]
    assert sum(int(line[-1]) for line in table) == len(over)


def test_only_steps_are_compared_and_each_once() -> None:
    model = stack()
    attached = begun(model, golden=False)
    results(model, inputs())  # before the first
    for number in range(3):
        assert step(attached, model, number).keys() == {"assay/difference", "assay/gradient_difference"}
        results(model, inputs())  # between two
    assert attached.watch is not None
    assert attached.watch.calls == 9
    assert {row["step"] for row in attached.watch.rows} == {0, 1, 2}
    attached.close()


def test_the_next_training_of_a_thread_ends_the_last_and_only_that() -> None:
    model = stack()
    left = begun(model)
    attached = begun(model)
    assert step(attached, model)["assay/ratio"] > 0
    left.close()  # long gone: what is attached now stays
    assert step(attached, model, 1)["assay/ratio"] > 0
    refused: list[ValueError] = []

    def elsewhere() -> None:
        with pytest.raises(ValueError, match="being watched already") as error:
            begun(model)
        refused.append(error.value)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert step(attached, model, 2)["assay/ratio"] > 0
    attached.close()


def test_beside_a_watch_of_ones_own_it_is_refused() -> None:
    model = stack()
    with pytest.raises(ValueError, match="being watched already"), watch(model):
        begun(model)
