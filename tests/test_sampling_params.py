"""SamplingParams: defaults, bounds, and that they are checked under `python -O` as well."""

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
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
    {"top_k": 1.0},
    {"top_k": True},
    {"top_k": None},
    {"top_p": "0.9"},
    {"top_p": True},
    {"top_p": None},
    {"min_p": "0"},
    {"min_p": False},
    {"seed": 1.0},
    {"seed": True},
    {"seed": "7"},
    {"min_tokens": 1.0},
    {"min_tokens": None},
    {"stop": 5},
    {"stop": ["a", 5]},
    {"stop": [None]},
    {"stop": {"a": 1}},
    {"stop": b"a"},
    {"stop_token_ids": 5},
    {"stop_token_ids": "5"},
    {"stop_token_ids": ["5"]},
    {"stop_token_ids": [5.0]},
    {"stop_token_ids": [True]},
    {"logprobs": 1.0},
    {"logprobs": True},
    {"logprobs": "1"},
]
# value -> the words with which the message gives the bounds
OUT_OF_BOUNDS = [
    ({"max_tokens": 0}, ">= 1"),
    ({"max_tokens": -1}, ">= 1"),
    ({"temperature": math.nan}, "finite and >= 0"),
    ({"temperature": math.inf}, "finite and >= 0"),
    ({"temperature": -1}, "finite and >= 0"),
    ({"temperature": -1e-9}, "finite and >= 0"),
    ({"temperature": 10**400}, "finite and >= 0"),
    ({"top_k": -2}, ">= -1"),
    ({"top_p": 0}, "in (0, 1]"),
    ({"top_p": -0.1}, "in (0, 1]"),
    ({"top_p": 1.0000001}, "in (0, 1]"),
    ({"top_p": math.nan}, "in (0, 1]"),
    ({"min_p": -1e-9}, "in [0, 1]"),
    ({"min_p": 1.01}, "in [0, 1]"),
    ({"min_p": math.nan}, "in [0, 1]"),
    ({"min_p": math.inf}, "in [0, 1]"),
    ({"seed": 2**64}, f"in {-(2**63)}..{2**64 - 1}"),
    ({"seed": -(2**63) - 1}, f"in {-(2**63)}..{2**64 - 1}"),
    ({"min_tokens": -1}, ">= 0"),
    ({"min_tokens": 65}, "in 0..max_tokens, got 65 with max_tokens=64"),
    ({"min_tokens": 6, "max_tokens": 5}, "with max_tokens=5"),
    ({"stop": ""}, "empty string"),
    ({"stop": ["a", ""]}, "empty string"),
    ({"stop_token_ids": [5, -1]}, ">= 0"),
    ({"logprobs": -1}, "in 0..20"),
    ({"logprobs": 21}, "in 0..20"),
]
AT_THE_BOUNDS = [
    {"max_tokens": 1},
    {"max_tokens": 10**9},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 1},
    {"top_p": 5e-324},
    {"top_p": 1},
    {"min_p": 0},
    {"min_p": 1},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"min_tokens": 0},
    {"min_tokens": 64},
    {"stop_token_ids": [0]},
    {"logprobs": 0},
    {"logprobs": 20},
]


def test_defaults() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "max_tokens": 64,
        "ignore_eos": False,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "logprobs": None,
    }


@pytest.mark.parametrize("good", AT_THE_BOUNDS, ids=str)
def test_values_at_the_bounds_are_taken(good: dict[str, Any]) -> None:
    ((name, value),) = good.items()
    kept = getattr(SamplingParams(**good), name)
    assert kept == (tuple(value) if isinstance(value, list) else value)


def test_stop_is_one_string_or_several() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == SamplingParams(stop=("ab", "c")).stop
    assert SamplingParams(stop=[]).stop == ()


def test_a_callers_list_is_copied() -> None:
    """It may change it while the request runs."""
    strings, ids = ["a"], [1]
    params = SamplingParams(stop=strings, stop_token_ids=ids)
    strings.append("b")
    ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-5, 0.6, 2])
def test_any_finite_temperature_from_zero_is_taken(temperature: float) -> None:
    assert SamplingParams(temperature, 1, True).temperature == temperature


@pytest.mark.parametrize("bad", WRONG_TYPE, ids=str)
def test_case_04_wrong_types_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize(("bad", "bounds"), OUT_OF_BOUNDS, ids=str)
def test_case_04_case_24_values_out_of_bounds_are_refused_by_name(
    bad: dict[str, Any], bounds: str
) -> None:
    """The message has the name and the bounds, and the value where it is short."""
    with pytest.raises(ValueError) as raised:
        SamplingParams(**bad)
    name, value = next(iter(bad.items()))
    assert name in str(raised.value) and bounds in str(raised.value)
    assert value == 10**400 or name.startswith("stop") or repr(value) in str(raised.value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_numpy_numbers_have_the_same_bounds(kind: type[np.floating[Any]]) -> None:
    """In the narrower types the largest float is infinite, and the smallest zero."""
    assert SamplingParams(temperature=kind(0.5), top_p=kind(1)).temperature == 0.5
    for bad in ({"temperature": kind(np.inf)}, {"temperature": kind(np.nan)}, {"top_p": kind(0)}):
        with pytest.raises(ValueError):
            SamplingParams(**bad)


def test_numpy_ints_become_plain_ones() -> None:
    """Such as a random generator draws."""
    params = SamplingParams(max_tokens=np.int64(5), seed=np.uint8(3), stop_token_ids=[np.int32(7)])
    assert repr(params) == repr(SamplingParams(max_tokens=5, seed=3, stop_token_ids=[7]))
    with pytest.raises(ValueError, match=">= 1"):
        SamplingParams(max_tokens=np.int8(-1))


def test_case_04_case_24_hold_without_asserts() -> None:
    """`python -O` strips assert statements; the checks must not go with them."""
    bad = WRONG_TYPE + [values for values, _ in OUT_OF_BOUNDS]
    script = f"""
from math import inf, nan
from nanovllm import SamplingParams
assert False, "this line must not run"
for bad in {bad}:
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
