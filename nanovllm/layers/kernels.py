"""Whether the Triton kernels of layers/ serve a tensor; if not, the layer's plain torch does."""

import importlib.util

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


def usable(x: torch.Tensor) -> bool:
    """On CPU tensors the kernels would only run in Triton's interpreter, as they do in tests."""
    return HAS_TRITON and x.is_cuda
