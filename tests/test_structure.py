"""The project's shape: who may import whom, what is public, what a bare install can do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import assay

SOURCE = Path(assay.__file__).parent

# Folder → folders of ours that it may import. cases/attention is the case, its files are checked below.
MAY_IMPORT: dict[str, set[str]] = {
    "formats": set(),
    "metrics": {"formats"},
    "flash": set(),
    "cases": {"flash", "formats", "metrics"},
    "bench": {"cases", "flash"},
    "results": set(),
    "executors": set(),
    "models": set(),
    "data": set(),
    "training": {"cases", "data", "executors", "flash", "formats", "metrics", "models", "results"},
    "sweeps": {"cases", "flash", "formats", "metrics", "results", "executors"},
    "recipes": {"sweeps", "training"},
    "report": {"metrics", "results"},
    "watching": {"cases", "flash", "formats", "metrics", "results"},
    "budgets": {"cases", "formats", "metrics"},
    "integrations": {"budgets", "cases", "flash", "formats", "metrics", "results", "watching"},
    "cli": {
        "bench",
        "flash",
        "recipes",
        "report",
        "sweeps",
        "executors",
        "results",
        "cases",
        "training",
        "watching",
        "integrations",
    },
}


def imports_of(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def files(folder: str) -> list[Path]:
    return sorted((SOURCE / folder).rglob("*.py"))


def test_every_folder_is_on_the_map() -> None:
    found = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert found == set(MAY_IMPORT)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_arrows(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder, "_version", "_suggest", "_files"}
    for path in files(folder):
        for module in imports_of(path):
            parts = module.split(".")
            if parts[0] == "assay":
                assert parts[1] in allowed, f"{path.relative_to(SOURCE)} may not import {module}"


@pytest.mark.parametrize("judged", ["tiled", "triton", "golden"])
def test_what_is_judged_never_imports_its_judge(judged: str) -> None:
    """Shared code hides shared bugs: tiled attention and the kernels know neither baseline nor golden."""
    judges = {"baseline", "golden", "tiled"} - {judged}
    if judged == "triton":
        judges = {"baseline", "golden"}
    for path in files("cases"):
        if path.name.startswith(judged):
            for module in imports_of(path):
                assert not judges & set(module.split(".")), f"{path.name} imports {module}"


def test_exports_are_all_there() -> None:
    assert assay.__all__ == sorted(assay.__all__)
    for name in assay.__all__:
        assert getattr(assay, name) is not None
    assert dir(assay) == assay.__all__
    with pytest.raises(AttributeError, match="its public names"):
        _ = assay.flash_attension


BLOCK = """
import sys, importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


def run_without(blocked: set[str], program: str) -> subprocess.CompletedProcess[str]:
    source = BLOCK.format(blocked=blocked) + program
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)


def test_import_needs_nothing_at_all() -> None:
    blocked = {"torch", "numpy", "triton", "typer", "rich", "scipy", "safetensors"}
    done = run_without(blocked, "import assay; assay.formats.get('bf16'); assay.Format(exponent=4, mantissa=3)")
    assert done.returncode == 0, done.stderr


def test_measuring_needs_only_torch_and_numpy() -> None:
    blocked = {"triton", "scipy", "typer", "rich", "ml_dtypes", "gfloat", "mpmath", "plotly", "duckdb", "transformers"}
    program = """
import torch, assay
q = torch.randn(1, 2, 32, 8)
plan = assay.Plan.uniform("bf16")
out = assay.tiled_attention(q, q, q, plan=plan, order="fa1", block=(8, 8))
print(assay.deviation(out, assay.golden_attention(q, q, q), "bf16").max < 0.1, assay.wasserstein(out, q) > 0)
"""
    done = run_without(blocked, program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_import_is_light() -> None:
    """No torch, numpy or typer is loaded by `import assay`, so `assay --help` stays instant."""
    program = "import sys, assay; print([m for m in ('torch', 'numpy', 'typer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    program = "import sys, assay.cli.app; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
