"""Checks of what a caller gives: numbers within bounds. Imports no torch."""

import operator
import sys
from numbers import Real


def as_int(value: object) -> int | None:
    """A plain int for an int, numpy's too; None for anything else. bool is an int in Python; a
    max_tokens of True is a mistake."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int: it may be numpy's. TypeError unless it is one, ValueError unless it is in
    low..high."""
    bounds = f">= {low}" if high is None else f"in {low}..{high}"
    number = as_int(value)
    if number is None:
        raise TypeError(f"{name} must be an int {bounds}, got {value!r}")
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {bounds}, got {value!r}")
    return number


def keep_int(settings: object, name: str, low: int, high: int | None = None) -> None:
    """`check_int` of a field of a frozen dataclass, which becomes a plain int."""
    object.__setattr__(settings, name, check_int(name, getattr(settings, name), low, high))


def check_number(
    name: str, value: object, bounds: str, low: float, high: float = sys.float_info.max
) -> None:
    """TypeError unless `value` is a number, ValueError unless it is in [low, high], which `bounds`
    puts in words."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number {bounds}, got {value!r}")
    # numpy would round the bounds to the value's own, narrower type.
    number = value.item() if hasattr(value, "item") else value
    if not low <= number <= high:  # NaN as well
        raise ValueError(f"{name} must be {bounds}, got {value!r}")


def check_bool(name: str, value: object) -> None:
    """TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
