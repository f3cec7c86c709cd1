"""When calls are compared, in which order their rows come, and what is held until then."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from assay.results.lines import all_records
from assay.results.watch_record import WATCH
from assay.watching import comparing, ledger
from assay.watching.call import AttentionCall
from assay.watching.part import Part
from assay.watching.watch import Watch, watch
from tests.watching.models import HEADS, Layer, Stack, inputs, stack


def told(w: Watch) -> list[tuple[int, str, str]]:
    return [(row["step"], row["layer"], row["tensor"]) for row in w.rows if row["head"] is None]


def in_order(step: int, gradients: bool = True) -> list[tuple[int, str, str]]:
    outputs = [(step, f"layers.{layer}", "output") for layer in range(3)]
    backward = [(step, f"layers.{layer}", name) for layer in (2, 1, 0) for name in ("dq", "dk", "dv")]
    return outputs + backward if gradients else outputs


def test_rows_come_in_the_order_in_which_things_happened(tmp_path: Path) -> None:
    model, x = stack(), inputs()
    with watch(model, out=tmp_path) as w:
        for _ in range(2):
            model(x).float().square().mean().backward()
    assert told(w) == in_order(0) + in_order(1)
    assert [row["id"] for row in all_records(tmp_path, WATCH)] == [row["id"] for row in w.rows]


def test_who_looks_earlier_sees_all_that_was_called() -> None:
    model, x = stack(), inputs()
    with watch(model) as w:
        out = model(x)
        assert told(w) == in_order(0, gradients=False)
        assert w.calls == 3
        early = list(w.rows)
        out.float().square().mean().backward()
    assert told(w) == in_order(0)
    assert w.calls == 3
    with watch(model) as late:
        model(x).float().square().mean().backward()
    names = ("error_rmse", "baseline_rmse", "ratio_rmse", "error_w1", "entropy", "tied", "difference_max")
    for a, b in zip(early + list(w.rows)[len(early) :], late.rows, strict=True):
        assert {name: a[name] for name in names} == {name: b[name] for name in names}


def test_without_a_backward_pass_outputs_are_compared_all_the_same() -> None:
    model, x = stack(), inputs()
    with watch(model) as w:
        for _ in range(3):
            model(x)
    assert told(w) == [row for step in range(3) for row in in_order(step, gradients=False)]


def test_a_graph_that_is_gone_through_twice_is_told_once(tmp_path: Path) -> None:
    model, x = stack(), inputs()
    with watch(model, out=tmp_path) as w:
        out = model(x).float().square().mean()
        out.backward(retain_graph=True)
        out.backward()
    assert told(w) == in_order(0)


def test_what_comes_after_the_watch_is_not_looked_at(tmp_path: Path) -> None:
    model, x = stack(), inputs()
    with watch(model, out=tmp_path) as w:
        out = model(x).float().square().mean()
    out.backward()
    assert told(w) == in_order(0, gradients=False)
    assert len(all_records(tmp_path, WATCH)) == len(w.rows)


class InPlace(Layer):
    """Goes on in the output's own memory."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y: Tensor = plainly(q, k, v)
        y.mul_(2.0)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def plainly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention whose gradients do not need its output."""
    return torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, -1) @ value


def test_a_model_that_goes_on_in_place() -> None:
    torch.manual_seed(0)
    model, x = Stack(InPlace()), inputs(torch.float32)
    with watch(model, also={plainly: plainly}) as w:
        model(x).square().mean().backward()
    assert {row["difference_max"] for row in w.rows} == {0}


def bytes_of_tensors() -> int:
    gc.collect()
    # Other tests may have left sparse ones, which have no storage.
    dense = (x for x in gc.get_objects() if type(x) is Tensor and x.layout is torch.strided and not x.is_nested)
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in dense}
    return sum(found.values())


@pytest.mark.parametrize("kind", ["training", "no backward", "inference", "outside of the model"])
def test_memory_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEPT", 100)
    monkeypatch.setattr(ledger, "AT_ONCE", 10)
    model, x = stack(torch.float32), inputs(torch.float32)

    def step() -> None:
        model.zero_grad()
        with torch.set_grad_enabled(kind != "inference"):
            run: Any = model.layers[0] if kind == "outside of the model" else model
            out = run(x).square().mean()
        if kind == "training":
            out.backward()

    held, waiting = [], []
    with watch(model) as w:
        for number in range(1, 36):
            step()
            waiting.append(len(w._entered()._waiting) + len(w._entered()._compared))
            if number in (15, 25, 35):
                held.append(bytes_of_tensors())
        assert len(w.rows) == 100
    assert held[0] == held[1] == held[2]
    assert max(waiting) <= 10


def test_one_transfer_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack(), inputs()
    with watch(model) as w:
        model(x).float().square().mean().backward()  # the worst call so far is kept, on the CPU
        before, sent, fetched = w.calls, 0, 0
        send, fetch = comparing._sent, Tensor.cpu

        def sends(*tensors: Tensor) -> list[Tensor]:
            nonlocal sent
            sent += 1
            return send(*tensors)

        def fetches(self: Tensor) -> Tensor:
            nonlocal fetched
            fetched += 1
            return fetch(self)

        monkeypatch.setattr(comparing, "_sent", sends)
        monkeypatch.setattr(Tensor, "cpu", fetches)
        model(x).float().square().mean().backward()
        assert (w.calls - before, sent, fetched) == (3, 3, 0)


def test_a_device_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made while it is at the next call; they are the same, also of a model that goes on in place."""
    model, x = stack(torch.float32), inputs(torch.float32)
    with watch(model) as w:
        model(x).square().mean().backward()
    late: list[int] = []

    def finish(self: ledger.Ledger, left: int) -> None:
        late.append(len(self._under_way))
        at_once(self, left if len(late) % 4 == 0 else len(self._under_way))

    at_once = ledger.Ledger._finish
    monkeypatch.setattr(ledger.Ledger, "_finish", finish)
    with watch(model) as slow:
        model(x).square().mean().backward()
    assert max(late) == 3
    assert told(slow) == told(w)
    for a, b in zip(slow.rows, w.rows, strict=True):
        assert {name: a[name] for name in WATCH.columns if name.startswith("error")} == {
            name: b[name] for name in WATCH.columns if name.startswith("error")
        }


def test_the_plain_function_itself_is_not_watched() -> None:
    """It may be computed when the next step begins, outside of any call that was caught."""

    def slow(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    torch.manual_seed(0)
    model, x = Stack(InPlace()), inputs(torch.float32)
    with watch(model, also={plainly: slow}) as w:
        for _ in range(2):
            model(x)
    assert {row["implementation"] for row in w.rows} == {"plainly"}
    assert w.found == w.calls == 2


def test_of_a_large_batch_some_sequences_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five sequences, each 1.5 times as large as the one before, two at a time; gradients of the same two."""
    model = stack()
    x = torch.cat([inputs()[:1] * 1.5**i for i in range(5)])
    monkeypatch.setitem(ledger.SCORES, "cpu", 2 * HEADS * x.shape[1] ** 2)
    with watch(model, every=2) as w:
        for _ in range(8):
            model(x).float().square().mean().backward()
    seen = [row for row in w.rows if row["layer"] == "layers.0" and row["head"] is None]
    outputs, keys = ([row for row in seen if row["tensor"] == name] for name in ("output", "dk"))
    assert [row["batch"] for row in outputs] == [row["batch"] for row in keys] == [2, 2, 1, 2]
    for part, row in enumerate(outputs):
        with watch(model) as alone, torch.no_grad():
            model(x[2 * (part % 3) :][:2])
        assert row["logit_max"] == pytest.approx(alone.rows[HEADS]["logit_max"], rel=2**-7)
        assert row["logit_min"] == pytest.approx(alone.rows[HEADS]["logit_min"], rel=2**-7)
    assert not any(row["over"] for row in seen)  # gradients of other sequences would be far off


def test_of_a_long_sequence_some_heads_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four, then the fourth; errors are those that a watch of all finds for the same heads."""
    model, x = stack(), inputs()[:1]
    monkeypatch.setitem(ledger.SCORES, "cpu", 3 * x.shape[1] ** 2)

    def errors(every: int, steps: int) -> list[dict[tuple[str, int | None], float]]:
        with watch(model, every=every) as w:
            for _ in range(steps):
                model(x).float().square().mean().backward()
        rows = [row for row in w.rows if row["layer"] == "layers.0"]
        return [
            {(row["tensor"], row["head"]): row["error_rmse"] for row in rows if row["step"] == step}
            for step in sorted({row["step"] for row in rows})
        ]

    (every_head,), parts = errors(1, 1), errors(2, 6)
    for part, heads in zip(parts, ([0, 1, 2], [3], [0, 1, 2]), strict=True):
        assert list(part) == [(name, head) for name in ("output", "dq", "dk", "dv") for head in (*heads, None)]
        for name, head in part:
            if head is not None:
                assert part[name, head] == pytest.approx(every_head[name, head], rel=1e-9)


def test_parts_of_a_call() -> None:
    """Masks, slopes and sinks of its sequences and heads; four heads of Q share two of K and V."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, heads, 5, 8, generator=generator).double() for heads in (4, 2, 2))
    bias, slopes, sinks = torch.randn(6, 4, 5, 5).double(), torch.rand(6, 4), torch.randn(4)
    some, one = slice(2, 4), slice(1, 2)
    two_sequences, one_head = Part(some, slice(0, 2), 2), Part(one, one, 2)
    assert [one_head.first_head(count) for count in (2, 1)] == [2, 1]  # of Q's and of K's
    hows: list[dict[str, Any]] = [
        {"bias": bias, "slopes": slopes, "sinks": sinks},
        {"bias": bias[:1], "slopes": slopes[0]},
        {"bias": bias[:, :1]},
        {"bias": bias[0]},
    ]
    for own in hows:
        call = AttentionCall(q=q, k=k, v=v, scale=0.3, **own)
        assert call.some(turn=4, scores=2 * 4 * 25) == two_sequences
        assert call.some(turn=3, scores=3 * 25) == call.some(turn=15, scores=1) == one_head
        (whole,) = call.plain(None)
        assert torch.equal(call.of(two_sequences).plain(None)[0], whole[some])
        assert torch.equal(call.of(one_head).plain(None)[0], whole[one, 2:])
