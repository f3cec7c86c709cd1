"""vLLM: Assay's kernels as its attention backend `CUSTOM`.

vLLM has one place for a backend from elsewhere, called CUSTOM. `plugin` is an entry point of the group
`vllm.general_plugins`, which vLLM calls in each of its processes: then `--attention-backend CUSTOM` means Assay.
Nothing changes for who does not ask for it. The backend itself is in `vllm_backend`, which only vLLM imports.

Written from vLLM's source: the releases 0.26.0, 0.27.1 and 0.28.0rc2, and the main branch at commit a014e35f38c. The
tests run it against stand-ins for vLLM's base classes, over random paged caches, on the CPU and, where there is one, on
a CUDA device. It has not been run inside vLLM, nor with a model, and its speed there has not been measured.
"""

from __future__ import annotations

import logging
import re
from importlib import import_module
from typing import Any

BACKEND = "assay.integrations.vllm_backend.AssayBackend"
"""Where vLLM finds the class."""
_FIRST, _BEYOND = (0, 26), (0, 29)
_SUPPORTED = "0.26 to 0.28"
_REGISTRY = "vllm.v1.attention.backends.registry"
_NEEDED = {
    "vllm.v1.attention.backend": (
        "AttentionBackend",
        "AttentionImpl",
        "AttentionMetadataBuilder",
        "AttentionType",
        "MultipleOf",
    ),
    _REGISTRY: ("AttentionBackendEnum", "register_backend"),
}


def register_vllm() -> None:
    """Make CUSTOM mean Assay's backend, in this process; again changes nothing.

    vLLM's workers are processes of their own: they get it from the entry point.
    """
    registry = _registry()
    custom = registry.AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        raise ValueError(
            f"vLLM has one place for a backend from elsewhere, CUSTOM, and {custom.get_path()} has it already. "
            "Load one of the two: VLLM_PLUGINS names the plugins that vLLM loads."
        )
    registry.register_backend(custom, BACKEND)


def unregister_vllm() -> None:
    """Give CUSTOM back, if it is Assay's. A model that runs keeps the backend it has."""
    custom = _registry().AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() == BACKEND:
        custom.clear_override()


def plugin() -> None:
    """The entry point: `register_vllm`, but what is wrong is logged. vLLM would not start after an exception."""
    try:
        register_vllm()
    except ValueError as error:
        logging.getLogger(__name__).warning("Assay is not among vLLM's attention backends. %s", error)


def _registry() -> Any:
    """vLLM's registry of backends, once all that the backend needs has been found."""
    try:
        vllm = import_module("vllm")
    except ImportError as error:
        raise ImportError(
            f"vLLM is not installed. Supported are {_SUPPORTED}: pip install 'vllm>=0.26,<0.29'."
        ) from error
    version = str(vllm.__version__)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not _FIRST <= (int(numbers[1]), int(numbers[2])) < _BEYOND:
        raise ValueError(f"vLLM must be {_SUPPORTED}, whose interface Assay's backend is written for; got {version}.")
    for module, names in _NEEDED.items():
        _check_has(version, module, names)
    return import_module(_REGISTRY)


def _check_has(version: str, module: str, names: tuple[str, ...]) -> None:
    try:
        found = import_module(module)
    except ImportError as error:
        raise ValueError(f"vLLM {version} has no {module}, as {_SUPPORTED} have. Install one of these.") from error
    for name in names:
        if not hasattr(found, name):
            raise ValueError(f"vLLM {version} has no {module}.{name}, as {_SUPPORTED} have. Install one of these.")
