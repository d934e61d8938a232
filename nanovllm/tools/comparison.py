"""Comparison: two ways to compute the same numbers, and how far apart they are and may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

FACTOR = 3  # two paths err independently, and not by the same amount

Numbers: TypeAlias = list[torch.Tensor]


class NotRun(Exception):
    """Why a comparison cannot be made here."""


class Errors(NamedTuple):
    """How far numbers are from their reference."""

    max_abs: float
    relative_l2: float
    top1_agreement: float  # share of rows with the same largest number


class Tolerance(NamedTuple):
    """How far they may be, and where that comes from."""

    max_abs: float
    relative_l2: float
    source: str

    def allows(self, errors: Errors) -> bool:
        """Whether both errors are within; NaN never is."""
        return errors.max_abs <= self.max_abs and errors.relative_l2 <= self.relative_l2


Comparison: TypeAlias = tuple[Numbers, Numbers, Tolerance]  # optimized, reference

EXACT = Tolerance(0.0, 0.0, "exact: nothing is rounded")


class Row(NamedTuple):
    """One line of the report. verdict: PASS, FAIL or "not run"; reason: why it is not PASS."""

    optimized: str
    reference: str
    verdict: str
    errors: Errors | None = None
    tolerance: Tolerance | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For json, with the names of all parts."""
        return self._asdict() | {
            "errors": self.errors and self.errors._asdict(),
            "tolerance": self.tolerance and self.tolerance._asdict(),
        }


def errors_between(actual: Numbers, expected: Numbers) -> Errors:
    """Over all rows of all tensors [rows, n]."""
    a, b = torch.cat(actual).double(), torch.cat(expected).double()
    difference = a - b
    return Errors(
        max_abs=difference.abs().max().item(),
        relative_l2=(difference.norm() / b.norm()).item(),
        top1_agreement=(a.argmax(-1) == b.argmax(-1)).double().mean().item(),
    )


def measured(actual: Numbers, exact: Numbers, source: str) -> Tolerance:
    """FACTOR times the errors of a plain computation in the same dtype."""
    own = errors_between(actual, exact)
    return Tolerance(FACTOR * own.max_abs, FACTOR * own.relative_l2, f"{FACTOR} x {source}")


def compare(optimized: str, reference: str, run: Callable[[], Comparison]) -> Row:
    """Judge what `run` returns. It raises NotRun if it cannot run here; any other exception is a
    failure of what is compared."""
    try:
        actual, expected, tolerance = run()
        errors = errors_between(actual, expected)
    except NotRun as why:
        return Row(optimized, reference, "not run", reason=str(why))
    except Exception as error:
        return Row(optimized, reference, "FAIL", reason=f"{type(error).__name__}: {error}")
    if tolerance.allows(errors):
        return Row(optimized, reference, "PASS", errors, tolerance)
    return Row(optimized, reference, "FAIL", errors, tolerance, "outside the tolerance")
