"""`assay info`: what this machine can run."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from assay._version import __version__

_OPTIONAL = {
    "triton": ("our CUDA kernels", "pip install 'assay[triton]'"),
    "duckdb": ("reports, Parquet", "pip install 'assay[report]'"),
    "plotly": ("reports", "pip install 'assay[report]'"),
    "matplotlib": ("figures for a paper", "pip install 'assay[report]'"),
    "flash-attn": ("its kernels in `kernels` and `validate`", "pip install flash-attn (needs CUDA)"),
}


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON and nothing else.")] = False,
) -> None:
    """Tell what this machine can run: devices, kernels, packages, and how to get the missing ones."""
    found = _collect()
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    console.print(f"assay {found['assay']}, torch {found['torch']}, Python {found['python']}, {found['cores']} cores")
    for device in found["devices"]:
        console.print(f"\n[bold]{escape(device['name'])}[/] (--device {device['device']}): {device['memory']}")
        for kernel in device["kernels"]:
            console.print(f"  {escape(kernel)}")
    console.print("\n[bold]Optional packages[/]")
    for package in found["packages"]:
        there = package["version"] or f"[yellow]missing[/]: {escape(package['get'])}"
        console.print(f"  {package['name']}: {there} — {package['for']}")
    if len(found["devices"]) == 1:
        console.print(
            "\nNo CUDA device: everything runs on the CPU; the kernels of a GPU are not there to be measured."
        )


def _collect() -> dict[str, Any]:
    import platform

    import torch

    from assay.cases.attention.kernels import available_kernels
    from assay.executors.local import cores

    devices = [{"device": "cpu", "name": platform.processor() or platform.machine(), "memory": _host_memory()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        devices.append({"device": f"cuda:{index}", "name": properties.name, "memory": memory})
    return {
        "assay": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": cores(),
        "devices": [
            {**device, "kernels": [k.name for k in available_kernels(torch.device(device["device"]))]}
            for device in devices
        ],
        "packages": [
            {"name": name, "version": _version(name), "for": purpose, "get": how}
            for name, (purpose, how) in _OPTIONAL.items()
        ],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _host_memory() -> str:
    import os

    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (ValueError, OSError, AttributeError):
        return "memory unknown"
