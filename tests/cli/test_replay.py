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
from assay.flash.attention import flash_attention
from assay.results.lines import all_records
from assay.results.record import Record, from_json
from assay.results.watch_record import WATCH
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
    [
        ({"scale": "0.0"}, "scale must be a positive finite number, got 0.0"),
        ({"softcap": "0.0"}, "softcap must be a positive finite number, got 0.0"),
        ({"softcap": "nan"}, "softcap must be a positive finite number, got nan"),
        ({"softcap": "__import__('os')"}, "softcap must be a number, got \"__import__('os')\""),
        ({"softcap": "3.0", "scale": "-1"}, "scale must be a positive finite number, got -1"),
        ({"softcap": "3.0", "left": "1.5"}, "left must be a whole number, got '1.5'"),
    ],
)
def test_calls_that_cannot_be_made_exit_with_2(notes: dict[str, str], says: str, tmp_path: Path) -> None:
    path = captured(tmp_path / "call.safetensors", notes, q=ONE, k=ONE, v=ONE)
    done = here("sweep", "inputs", "--from", path, "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())


def test_both_ways_to_name_inputs_are_one_too_many(tmp_path: Path) -> None:
    path = captured(tmp_path / "call.safetensors", q=ONE, k=ONE, v=ONE)
    done = here("sweep", "inputs", "--from", path, "--inputs", "normal", "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert "--from takes the place of --inputs" in " ".join(done.stderr.split())


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SCORED: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0, "causal": True},
    "sinks": {"sinks": SINKS, "causal": True},
    "sinks and others": {
        "sinks": SINKS, "window": (5, 1), "alibi_slopes": torch.tensor([0.5, 0.2, 0.1, 0.0]),
        "bias": draw(2, 1, 1, 29, seed=7),
    },
    "both": {"softcap": 3.0, "sinks": SINKS},
}  # fmt: skip


FP32 = 2**-20
"""What the FP32 softmax of transformers' attention makes of values up to 8."""


class Ours(nn.Module):
    """Calls our attention with whatever it is told."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_attention(q, k, v, **self.how)
        return out


def scored(path: Path, how: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """The inputs and the output of a call that the watch saved."""
    given = [draw(2, heads, 29, 16, seed=seed).bfloat16() for seed, heads in enumerate((4, 2, 2))]
    model = Ours(**how)
    with watch(model) as w, torch.no_grad():
        out = model(*given)
    w.worst.save(path)
    return given, out


def _truth(given: list[Tensor], how: dict[str, Any]) -> Tensor:
    """By transformers' own: GPT-OSS's attention has sinks, Gemma 2's has softcap; in FP64."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as sunk

    q, k, v = (x.double() for x in given)
    queries = torch.arange(29)[:, None]
    left, right = how.get("window", (None, 0 if how.get("causal") else None))
    ahead = torch.arange(29) - queries
    hidden = torch.zeros(29, 29, dtype=torch.bool)
    hidden |= (ahead > right) if right is not None else False
    hidden |= (ahead < -left) if left is not None else False
    mask = torch.zeros(2, 4, 29, 29, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    mask = mask + how.get("bias", torch.zeros(1)).double()
    mask = mask - how.get("alibi_slopes", torch.zeros(4)).double()[:, None, None] * ahead.abs()
    module = nn.Module().eval()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    if "sinks" not in how:
        out = capped(module, q, k, v, mask, scaling=0.25, softcap=how["softcap"])[0]
    else:
        module.sinks = how["sinks"].double()
        out = sunk(module, q, k, v, mask, scaling=0.25)[0]
    return out.transpose(1, 2)


@pytest.mark.parametrize("name", SCORED)
def test_softcap_and_sinks_are_made_again_by_who_can(name: str, tmp_path: Path) -> None:
    path, how = tmp_path / "worst.safetensors", SCORED[name]
    given, out = scored(path, how)
    found = assay if name == "softcap" else here
    done = found("sweep", "inputs", "--from", str(path), "--out", str(tmp_path / "run"), "--device", "cpu", "--json")
    rows = [WATCH.from_json(line) for line in done.stdout.splitlines()]
    whole = {row["implementation"]: row for row in rows if row["head"] is None}
    everybody = {"assay.flash_attention"}
    if "softcap" not in how:
        everybody |= KERNELS | {"plan uniform bf16", "plan uniform bf16, state in fp32", "plan shipped bf16"}
    assert set(whole) == everybody
    assert {row["head"] for row in rows} == {None, 0, 1, 2, 3}
    assert not any(row["over"] for row in whole.values())
    if name != "both":  # no model of transformers' has both
        expected = deviation(out, _truth(given, how))
        assert whole["assay.flash_attention"]["error_max"] == pytest.approx(expected.max, abs=FP32)
    assert {row["implementation"] for row in all_records(tmp_path / "run", WATCH)} == everybody


def test_who_cannot_is_named_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "worst.safetensors"
    scored(path, SCORED["softcap"])
    done = here("sweep", "inputs", "--from", str(path), "--out", str(tmp_path / "run"), "--device", "cpu")
    assert done.exit_code == 0
    assert "bf16 2 × 4 × 29 × 16, softcap 3" in " ".join(done.stdout.split())
    said = done.stderr.splitlines()
    assert "Not made again by SDPA math: it has no softcap." in said
    assert "Not made again by plan shipped bf16: plans have no step for softcap." in said


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("length",), "is made again by `assay sweep inputs`, not by length"),
        (("inputs", "--seeds", "2"), "as it was. Leave out --seeds"),
        (("inputs", "--plan", "best"), "Unknown plan 'best'"),
    ],
)
def test_what_has_no_meaning_for_them_is_refused(command: tuple[str, ...], says: str, tmp_path: Path) -> None:
    path = tmp_path / "worst.safetensors"
    scored(path, SCORED["sinks"])
    done = here("sweep", *command, "--from", str(path), "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())


@pytest.mark.parametrize("sinks", [torch.zeros(3), torch.tensor([0, 1]), torch.tensor([0.0, torch.nan])])
def test_sinks_that_are_none(sinks: Tensor, tmp_path: Path) -> None:
    three = {name: draw(*ONE, seed=0) for name in "qkv"}
    save_file(three | {"sinks": sinks}, tmp_path / "call.safetensors")
    done = here("sweep", "inputs", "--from", str(tmp_path / "call.safetensors"), "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert "sinks must be one finite number for each of the 2 heads" in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()
