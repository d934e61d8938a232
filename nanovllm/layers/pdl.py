"""Programmatic dependent launch: a kernel may be set up while the one before it still runs.

Hopper and later only, with Triton 3.5 and later; elsewhere, and in Triton's interpreter, all of
this does nothing. A kernel that is launched so must call `pdl_wait` before it touches anything an
earlier kernel wrote or reads: the wait returns when the earlier kernels have ended and their
results can be seen.
"""

import functools

import torch
import triton
import triton.language as tl

# Triton 3.4 has the two instructions as well, but fails to compile them.
HAS_PDL = tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 5)
_launch_dependents = getattr(tl.extra.cuda, "gdc_launch_dependents", None)
_wait = getattr(tl.extra.cuda, "gdc_wait", None)


@functools.cache
def _has_dependent_launch(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index) >= (9, 0)


def pdl_options(x: torch.Tensor) -> dict[str, bool]:
    """Arguments for the launch on x's device of a kernel that has a parameter PDL."""
    if HAS_PDL and x.is_cuda and _has_dependent_launch(x.device.index):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def pdl_launch(PDL: tl.constexpr):
    """Let the next kernel be set up now."""
    if PDL:
        _launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the earlier kernels."""
    if PDL:
        _wait()
