"""`assay sweep inputs --from FILE`: a captured call made again by every plan and kernel, as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner, Result

from assay import deviation
from assay.cli.app import app
from assay.results.record import Record, from_json
from assay.watching.watch import watch
from tests.cli.test_cli import assay

KERNELS = {"SDPA flash (CPU)", "SDPA math"}


def here(*arguments: str) -> Result:
    """The same command in this process, which has loaded torch already."""
    return CliRunner().invoke(app, arguments)


class Attends(nn.Module):
    """Calls torch's attention with whatever it is told."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.how)


def draw(*shape: int, seed: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


HOW: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "padded": {"attn_mask": torch.arange(40) < torch.tensor([40, 23]).view(2, 1, 1, 1), "scale": 0.5},
    "biased": {"attn_mask": draw(1, 2, 40, 40, seed=9).half()},
}


@pytest.mark.parametrize("name", HOW)
def test_what_the_watch_saved_is_made_again(name: str, tmp_path: Path) -> None:
    """The kernel's error over that of plain attention, by the record, is the one computed from torch's two outputs."""
    model = Attends(**HOW[name])
    tensors = [draw(2, 2, 40, 16, seed=seed).half() for seed in range(3)]
    with watch(model) as w, torch.no_grad():
        out = model(*tensors)
    w.worst.save(tmp_path / "worst.safetensors")
    found = assay if name == "padded" else here  # once in a process of its own, as a user does
    done = found(
        "sweep", "inputs", "--from", str(tmp_path / "worst.safetensors"), "--out", str(tmp_path / "run"), "--device",
        "cpu", "--jobs", "1", "--json",
    )  # fmt: skip
    assert done.stderr == ""
    rows = [from_json(line) for line in done.stdout.splitlines()]
    assert {row["variant"] for row in rows} == {"flash", *KERNELS}
    assert len({row["plan"] for row in rows if row["variant"] == "flash"}) == 3
    assert {row["seed"] for row in rows} == {0, 1, 2, 3}  # every head of both batch entries
    assert {row["format"] for row in rows} == {"fp16"}  # its own
    assert {row["causal"] for row in rows} == {name == "causal"}
    q, k, v = (x.double() for x in tensors)
    golden = F.scaled_dot_product_attention(q, k, v, **_in_double(HOW[name]))
    for row in rows:
        if row["variant"] == "SDPA flash (CPU)":  # which is the one that the model called
            head = divmod(row["seed"], 2)
            assert row["error_max"] == pytest.approx(deviation(out[head], golden[head]).max, rel=1e-6)
        assert row["error_rmse"] < 3 * row["baseline_error_rmse"]


def _in_double(how: dict[str, Any]) -> dict[str, Any]:
    mask = how.get("attn_mask")
    return how | {"attn_mask": mask.double()} if mask is not None and mask.dtype != torch.bool else how


def captured(path: Path, notes: dict[str, str] | None = None, **sizes: tuple[int, ...]) -> str:
    save_file({name: draw(*size, seed=0) for name, size in sizes.items()}, path, metadata=notes)
    return str(path)


ONE = (1, 2, 24, 8)


def test_a_kernel_that_does_not_take_it_is_left_out_and_named(tmp_path: Path) -> None:
    path = captured(tmp_path / "call.safetensors", q=ONE, k=ONE, v=(1, 2, 24, 12))
    command = ("sweep", "inputs", "--from", path, "--out", str(tmp_path / "run"), "--device", "cpu", "--jobs", "1")
    for _ in range(2):  # and when it is asked for again
        done = here(*command)
        assert done.exit_code == 0, done.output
        told = "Not measured, since they do not take these inputs: SDPA flash (CPU)."
        assert " ".join(done.stderr.split()) == f"What do the inputs do? {told}"
        assert "SDPA math" in done.stdout
    rows = _rows(tmp_path / "run")
    assert {row["variant"] for row in rows} == {"flash", "SDPA math"}
    assert len(rows) == 4 * 2


def _rows(folder: Path) -> list[Record]:
    return [from_json(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


def test_seeds_and_formats_may_be_fewer_and_others(tmp_path: Path) -> None:
    path = captured(tmp_path / "call.safetensors", {"right": "0", "layer": "blocks.7"}, q=ONE, k=ONE, v=ONE)
    chosen = ("--seeds", "1", "--formats", "bf16", "--plan", "shipped", "--device", "cpu", "--jobs", "1")
    done = here("sweep", "inputs", "--from", path, *chosen, "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    rows = _rows(tmp_path / "run")
    assert [(row["variant"], row["format"], row["seed"], row["causal"]) for row in rows] == [
        (name, "bf16", 0, True) for name in ("flash", "SDPA flash (CPU)", "SDPA math")
    ]
    assert {row["distribution"] for row in rows} == {"captured: call.safetensors, blocks.7"}


def test_other_sweeps_take_it_too(tmp_path: Path) -> None:
    path = captured(tmp_path / "call.safetensors", {"left": "5", "right": "0"}, q=ONE, k=ONE, v=ONE)
    chosen = ("--formats", "bf16,fp32", "--device", "cpu", "--jobs", "1")
    done = here("sweep", "precision", "--from", path, *chosen, "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    assert "mask as captured" in " ".join(done.stdout.split())
    assert {row["format"] for row in _rows(tmp_path / "run")} == {"bf16", "fp32"}


BAD: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "missing": ({}, "call.safetensors is not a file"),
    "junk": ({}, "call.safetensors is not a safetensors file"),
    "no k": ({"q": ONE, "v": ONE}, "must have tensors q, k and v; it has q, v."),
    "shapes": ({"q": ONE, "k": (1, 2, 24, 4), "v": ONE}, "q and k their dim"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_exit_with_2(kind: str, tmp_path: Path) -> None:
    path, (tensors, says) = tmp_path / "call.safetensors", BAD[kind]
    if tensors:
        captured(path, None, **tensors)
    elif kind == "junk":
        path.write_bytes(b"q, k and v, but as prose")
    done = assay("sweep", "inputs", "--from", str(path), "--out", str(tmp_path / "run"))
    assert done.returncode == 2, done.stdout
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("notes", "says"),
    [({"scale": "0.0"}, "scale must be a positive finite number, got 0.0"), ({"softcap": "30.0"}, "had softcap")],
)
def test_calls_that_no_plan_can_make_exit_with_2(notes: dict[str, str], says: str, tmp_path: Path) -> None:
    path = captured(tmp_path / "call.safetensors", notes, q=ONE, k=ONE, v=ONE)
    done = here("sweep", "inputs", "--from", path, "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())


def test_both_ways_to_name_inputs_are_one_too_many(tmp_path: Path) -> None:
    path = captured(tmp_path / "call.safetensors", q=ONE, k=ONE, v=ONE)
    done = here("sweep", "inputs", "--from", path, "--inputs", "normal", "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert "--from takes the place of --inputs" in " ".join(done.stderr.split())
