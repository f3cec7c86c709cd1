"""The README's example runs and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
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
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    check = "print(out.shape == q.shape, q.grad.isfinite().all().item(), lse.shape == q.shape[:3])"
    done = subprocess.run([sys.executable, "-c", example + check], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "prints"),
    [
        ("watch", ["All within budget."]),
        (
            "integrations",
            ["Size([1, 4, 64])", "apart by", "Size([1, 4, 16, 16])", "output", "within budget.", "of the way", "RMSE"],
        ),
    ],
)
def test_the_examples_of_the_guides_run(page: str, prints: list[str], tmp_path: Path) -> None:
    text = (README.parent / f"docs/{page}.md").read_text(encoding="utf-8")
    outputs = [
        subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
        for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ]
    for promised, output in zip(prints, outputs, strict=True):
        assert promised in output


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
