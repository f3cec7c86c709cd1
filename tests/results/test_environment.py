"""Where the columns of provenance come from, and which commit a row names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from assay._version import __version__
from assay.results.environment import code_version, environment
from assay.results.record import PROVENANCE, to_json
from tests.results.records import make_record


def test_it_fills_the_columns_of_provenance() -> None:
    found = environment("cpu")
    assert list(found) == [name for name in PROVENANCE if name not in ("schema", "id", "time", "seconds")]
    to_json(make_record(**found))  # types of the schema
    assert found["device"] == "CPU"
    assert found["threads"] == torch.get_num_threads()
    assert (found["torch"], found["numpy"]) == (torch.__version__, numpy.__version__)
    assert found["python"].split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    assert found["host_cpu"]
    assert found["code"].startswith(__version__)


def test_a_device_that_is_not_measured_on_is_refused() -> None:
    with pytest.raises(ValueError, match='"cpu" and "cuda", got device \'meta\''):
        environment("meta")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_code_names_the_commit_and_whether_the_package_differs_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "assay"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    code_version.cache_clear()
    assert code_version(package) == __version__  # no checkout

    git(tmp_path, "init", "-q")
    code_version.cache_clear()
    assert code_version(package) == __version__  # a copy that the checkout around it does not know

    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    clean = f"{__version__}+g{git(tmp_path, 'rev-parse', '--short', 'HEAD')}"
    (tmp_path / "results.txt").write_text("outside the package: not code")
    code_version.cache_clear()
    assert code_version(package) == clean

    (package / "new.py").write_text("")
    assert code_version(package) == clean  # once a process
    code_version.cache_clear()
    assert code_version(package) == f"{clean}.dirty"

    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as in a git hook
    code_version.cache_clear()
    assert code_version(package) == f"{clean}.dirty"

    monkeypatch.setenv("PATH", "")  # no git
    code_version.cache_clear()
    assert code_version(package) == __version__
    code_version.cache_clear()


def test_no_torch_until_it_is_asked_for() -> None:
    program = (
        "import sys, assay.results.environment, assay.results.store, assay.results.reader, assay.cli.compact; "
        "print([name for name in ('torch', 'numpy', 'duckdb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
