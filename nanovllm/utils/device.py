"""Where and in what a rank computes: its device and dtype."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def resolve_device(name: str, rank: int, size: int) -> torch.device:
    """The device of one of `size` ranks, made torch's current one. Raises ValueError if it, or one
    of the others', is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no GPU: use device='cpu' or 'auto'")
    num_gpus = torch.cuda.device_count()
    if size > num_gpus:
        raise ValueError(
            f"tensor_parallel_size={size}, but torch sees {num_gpus} GPU(s): use at most that many"
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def resolve_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype to run in; `checkpoint`: that of the weights."""
    if name == "auto":
        # CPUs are slow or inexact in half precision, and float32 is what results are checked in.
        name = checkpoint if device.type == "cuda" else "float32"
    return getattr(torch, name)


@contextmanager
def defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """New tensors are made on `device` in `dtype` inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
