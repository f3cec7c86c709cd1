"""Where the Hopper kernels run: on that GPU, with a Triton that they are made for."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("triton")

import triton

from assay.flash import gpu


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0) if index == 0 else (8, 0))
    monkeypatch.setattr(gpu, "_HOPPERS", {})


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.9.1+git1234"])
def test_with_a_triton_that_they_are_made_for(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gpu.takes_hopper_kernels(0)
        assert not gpu.takes_hopper_kernels(1)


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_with_another_triton(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.warns(RuntimeWarning, match=rf"Triton 3.6 to 3.9, this is {version[:-2]}: .*Install Triton 3.9"):
        assert not gpu.takes_hopper_kernels(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough, and on other GPUs nothing is to be said
        assert not gpu.takes_hopper_kernels(0)
        assert not gpu.takes_hopper_kernels(1)


@pytest.mark.parametrize(("version", "takes"), [("3.9.0", True), ("3.10.0", False)])
def test_in_compiled_code(monkeypatch: pytest.MonkeyPatch, version: str, takes: bool) -> None:
    """In one graph, and without a warning of torch's, before anything else has asked and after."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x if gpu.takes_hopper_kernels(0) else x

    monkeypatch.setattr(triton, "__version__", version)
    for _ in range(2):
        torch.compiler.reset()
        compiled = torch.compile(doubled, fullgraph=True, backend="eager")
        assert compiled(torch.ones(1)).tolist() == [1 + takes]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert gpu.takes_hopper_kernels(0) is takes


def test_amds_gpus_tell_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not gpu.takes_hopper_kernels(0)
