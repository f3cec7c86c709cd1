"""The README's example runs and prints what the README says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FunctionType

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_example_prints_what_the_readme_says() -> None:
    text = README.read_text(encoding="utf-8")
    example, printed = re.findall(r"```(?:python)?\n(.*?)```", text[text.index("## Ten lines") :], re.DOTALL)[:2]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    for ours, promised in zip(done.stdout.splitlines(), printed.splitlines(), strict=True):
        name, figures = promised.rsplit(": ", 1)
        assert ours.startswith(f"{name}: ")
        # The order of FP32 sums differs between machines and moves the last digit.
        said, got = (float(re.findall(r"([\d.]+)×", line)[0]) for line in (figures, ours))
        assert got == pytest.approx(said, rel=0.1)


def test_the_example_of_flash_attention_runs() -> None:
    text = (README.parent / "docs/flash.md").read_text(encoding="utf-8")
    example, provider, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", provider], check=True)
    check = "print(out.shape == q.shape, q.grad.isfinite().all().item(), lse.shape == q.shape[:3])"
    done = subprocess.run([sys.executable, "-c", example + check], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3


def test_the_example_of_8_bits_runs() -> None:
    text = (README.parent / "docs/flash-fp8.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # Three bits of mantissa: half a unit in the last place is a 16th of a number at most, of subnormals 2⁻¹⁰.
    bound = "k.abs() / 16 + numbers.scales.max() * 2**-10"
    check = f"print(out.shape == q.shape, ((numbers.dequantized() - k.float()).abs() <= {bound}).all().item())"
    done = subprocess.run([sys.executable, "-c", example + check], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 2


GUIDES: dict[str, list[str]] = {
    "watch": ["All within budget.", "All within budget.", "times the error of plain attention", "SDPA math"],
    "integrations": [
        "Size([1, 4, 64])", "apart by", "Size([1, 4, 16, 16])", "output", "", "1 passed", "within budget.",
        "of the way", "RMSE", "2.5 0.3333", "2.5 FINISHED", "AssayBackend [64, 128]",
    ],
}  # fmt: skip
"""Page → what each of its examples prints, in their order."""
STAND_IN = "from tests.integrations import fake_vllm\nwith fake_vllm.installed(fake_vllm.RELEASE):\n"
"""vLLM itself is not installed where the tests run."""


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES)
def test_the_examples_of_the_guides_run(page: str, tmp_path: Path) -> None:
    """In their order, in one folder; python, and shell commands of ours and of pytest."""
    text = (README.parent / f"docs/{page}.md").read_text(encoding="utf-8")
    examples = re.findall(r"```(python|sh)\n(.*?)```", text, re.DOTALL)
    for (language, example), promised in zip(examples, GUIDES[page], strict=True):
        output = _commands(example, tmp_path) if language == "sh" else _program(example, tmp_path)
        assert promised in output, example


def _program(example: str, folder: Path) -> str:
    name = re.match(r"# (test_\w+\.py)\n", example)
    if name is not None:  # which a command runs
        (folder / name[1]).write_text(example, encoding="utf-8")
        return ""
    if "import vllm" in example or "from vllm" in example:
        example = STAND_IN + textwrap.indent(example, "    ")
    return _run(["-c", example], folder)


def _commands(example: str, folder: Path) -> str:
    return "".join(_run(["-m", *shlex.split(line)], folder) for line in example.splitlines())


def _run(arguments: list[str], folder: Path) -> str:
    path = os.pathsep.join(filter(None, (str(README.parent), os.environ.get("PYTHONPATH"))))
    quiet = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **quiet, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", ["sweeps", "training"])
def test_a_study_of_ones_own_is_one(page: str) -> None:
    text = (README.parent / f"docs/{page}.md").read_text(encoding="utf-8")
    [example] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "mine.py" in block]
    names: dict[str, object] = {}
    exec(example, names)
    [made] = [each() for each in names.values() if isinstance(each, FunctionType) and each.__globals__ is names]
    assert made.asked


def test_links_lead_somewhere() -> None:
    for page in (README, *README.parent.glob("docs/*.md"), README.parent / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
