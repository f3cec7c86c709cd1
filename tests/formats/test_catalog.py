"""Formats by name."""

from __future__ import annotations

import pytest

from assay.formats import NAMED, Format, get


def test_names_give_the_formats_that_bear_them() -> None:
    for name, format in NAMED.items():
        assert get(name) is format
        assert format.name == name


def test_any_exmy_is_a_name() -> None:
    assert get("e8m13") == Format(exponent=8, mantissa=13)


def test_a_format_is_its_own_name() -> None:
    format = Format(exponent=4, mantissa=2)
    assert get(format) is format


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bfloat16", r"Unknown format 'bfloat16'\. Did you mean .*bf16"),
        ("zzz", r"Unknown format 'zzz'\. Known: fp64, fp32"),
        ("e20m3", "exponent must be 1 to 11"),
        (16, "must be a Format or a name such as 'bf16', got int"),
    ],
)
def test_unknown_names_are_refused_with_a_guess(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get(name)
