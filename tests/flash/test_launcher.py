"""What is reached for behind Triton's interface is there, and where it is not there is no launcher."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.backends.nvidia import driver

from assay.flash import descriptors, launcher

ENCODING = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [1, 1, 64, 64], "fp4_padded": False}
SIGNATURE = {0: "tensordesc<bf16[1, 1, 64, 64]>", 1: "*fp32", 2: "i32"}
start: Any = [].append
"""Some function in C."""


@pytest.fixture(autouse=True)
def _a_launcher_for_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Triton 3.6, whichever there is; `test_launched_again` runs the launchers of the one that there is."""
    monkeypatch.setattr(driver, "_BASE_ARGS_FORMAT", "iiiKKppOOOOOO", raising=False)


def by_triton(descriptor: Any, encoding: Any) -> list[Any]:
    """What Triton makes of a descriptor for its launcher; from 3.8 on what does that takes a third argument."""
    third = [None] * (len(inspect.signature(driver.make_tensordesc_arg).parameters) - 2)
    return list(driver.make_tensordesc_arg(descriptor, encoding, *third))


def compiled(signature: dict[int, str], encodings: list[Any], **other: Any) -> Any:
    """As much of a compiled kernel as Triton's own launcher has been put into."""
    run = {
        "launch": driver.wrap_handle_tensordesc(start, signature, encodings),
        "global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False, "launch_pdl": True,
    }  # fmt: skip
    return SimpleNamespace(
        run=SimpleNamespace(**{**run, **other}),
        function=17,
        packed_metadata=(4, 1, 1000),
        metadata=SimpleNamespace(tensordesc_meta=encodings),
    )


def test_behind_what_encodes_descriptors() -> None:
    found = launcher.launcher_of(compiled(SIGNATURE, [ENCODING]))
    assert found is not None
    assert found.launch is start
    assert found.rest == (17, False, True, None, None, (4, 1, 1000), None, None, None)
    assert found.encodings == [ENCODING]


def test_without_descriptors() -> None:
    found = launcher.launcher_of(compiled({0: "*fp32"}, []))
    assert found is not None
    assert found.launch is start
    assert found.encodings == []


@pytest.mark.parametrize(
    "kernel",
    [
        compiled(SIGNATURE, [ENCODING], global_scratch_size=128),
        compiled(SIGNATURE, [ENCODING], profile_scratch_size=128),
        compiled(SIGNATURE, [ENCODING], launch=lambda *_: None),
        SimpleNamespace(run=start),
    ],
    ids=["memory", "memory of a profiler", "another Python", "another Triton"],
)
def test_none_to_be_had(kernel: Any) -> None:
    assert launcher.launcher_of(kernel) is None


@pytest.mark.parametrize("name", ["_BASE_ARGS_FORMAT", "make_tensordesc_arg"])
def test_what_triton_has_no_more(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kernel = compiled(SIGNATURE, [ENCODING])
    monkeypatch.delattr(driver, name)
    assert launcher.launcher_of(kernel) is None


def test_another_order_of_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_BASE_ARGS_FORMAT", "iiiKKppOOOOO")
    assert launcher.launcher_of(compiled(SIGNATURE, [ENCODING])) is None


@pytest.mark.parametrize("known", [True, False])
def test_one_launcher_for_all_kernels(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """From Triton 3.7 on: arguments come in a list, behind what they are."""
    monkeypatch.setattr(launcher, "_takes_all", lambda: known)
    taken: list[Any] = []
    monkeypatch.setattr(launcher, "BuiltinFunctionType", type(take := lambda *args: taken.append(args)))
    found = launcher.launcher_of(compiled({}, [], launch=take, arg_annotations=["which"], kernel_signature=b"types"))
    assert (found is not None) is known
    if found is not None:
        found.launch(1, 2, 3, 7, *found.rest, "q", 5)
        numbers = (17, False, True, (4, 1, 1000), None, None, None, None, None)
        assert taken == [(1, 2, 3, 7, *numbers, ["which"], b"types", ("q", 5))]


def test_who_watches() -> None:
    def hook(*_: Any) -> None: ...

    assert not launcher.is_watched()
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        assert launcher.is_watched()
        chain.remove(hook)
    assert not launcher.is_watched()


def test_a_descriptor_is_encoded_once_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton encodes one of a tensor there."""
    asked: list[Any] = []

    def fill(*arguments: Any) -> int:
        asked.append(arguments)
        return len(asked)

    active = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill))
    monkeypatch.setattr("triton.runtime.driver._active", active)
    x = torch.empty(1, 2, 100, 64, dtype=torch.bfloat16)
    made = descriptors.gluon_tiles(x, 64)
    expected = by_triton(made, ENCODING)
    at, rest = launcher.taken(made, ENCODING)
    assert [at(x.data_ptr()), at(x.data_ptr()), at(4096)] == [2, 2, 3]
    assert asked[0] == asked[1]
    assert asked[2] == (4096, *asked[1][1:])
    assert expected[1:] == rest


def test_a_descriptor_where_there_is_no_copy_engine() -> None:
    """Is an address and numbers: as Triton gives them, with the tensor itself in front."""
    x = torch.empty(1, 2, 100, 64, dtype=torch.bfloat16)
    made = descriptors.tiles(x, 64)
    at, rest = launcher.taken(made, None)
    assert at(4096) == 4096
    assert by_triton(made, None) == [x, *rest]
