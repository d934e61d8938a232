"""SamplingParams: defaults, bounds, and that they are checked under `python -O` as well."""

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest

from nanovllm import SamplingParams

WRONG_TYPE = [
    {"max_tokens": 1.5},
    {"max_tokens": True},
    {"max_tokens": "3"},
    {"max_tokens": None},
    {"temperature": True},
    {"temperature": "0.6"},
    {"temperature": None},
    {"temperature": 1j},
    {"ignore_eos": 1},
    {"ignore_eos": "yes"},
]
OUT_OF_BOUNDS = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": -1},
    {"temperature": -1e-9},
]


def test_defaults() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "max_tokens": 64,
        "ignore_eos": False,
    }


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-5, 0.6, 2])
def test_any_finite_temperature_from_zero_is_taken(temperature: float) -> None:
    assert SamplingParams(temperature, 1, True).temperature == temperature


@pytest.mark.parametrize("bad", WRONG_TYPE, ids=str)
def test_case_04_wrong_types_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize("bad", OUT_OF_BOUNDS, ids=str)
def test_case_04_case_24_values_out_of_bounds_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_case_04_case_24_hold_without_asserts() -> None:
    """`python -O` strips assert statements; the checks must not go with them."""
    script = f"""
from math import inf, nan
from nanovllm import SamplingParams
assert False, "this line must not run"
for bad in {WRONG_TYPE + OUT_OF_BOUNDS}:
    try:
        SamplingParams(**bad)
    except (TypeError, ValueError) as error:
        print(type(error).__name__)
    else:
        print("accepted", bad)
"""
    result = subprocess.run(
        [sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True
    )
    expected = ["TypeError"] * len(WRONG_TYPE) + ["ValueError"] * len(OUT_OF_BOUNDS)
    assert result.stdout.splitlines() == expected


def test_frozen() -> None:
    """One object may serve many requests, so nobody may change it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3


def test_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=3)
