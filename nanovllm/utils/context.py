"""Context: what a step's attention and last layer need to know, without passing it through a model.

The runner opens it around one forward pass; the layers read it with `get_context()`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Context:
    """N sequences, T new positions in all (T == N in decode). All tensors int32, on the device.

    Filled by `engine/inputs.py`, or once and for all where a CUDA graph is recorded; nobody changes
    it afterwards.
    """

    is_prefill: bool
    slot_mapping: torch.Tensor  # [T] pool slot of each new position; -1: store nothing
    # Prefill only.
    cu_seqlens_q: torch.Tensor | None = None  # [N + 1] prefix sums of the new positions
    cu_seqlens_k: torch.Tensor | None = None  # [N + 1] prefix sums of cached + new positions
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    # Decode only.
    context_lens: torch.Tensor | None = None  # [N] positions to attend to, the new one included
    # Decode, and prefill in which some sequence has history: [N, max blocks], padded with -1.
    block_tables: torch.Tensor | None = None


_context: ContextVar[Context] = ContextVar("nanovllm_context")


@contextmanager
def use_context(context: Context) -> Iterator[None]:
    """Make `context` the current one inside the `with` block; it is gone after, also on error."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def get_context() -> Context:
    """The current step's context. Raises RuntimeError outside a step."""
    try:
        return _context.get()
    except LookupError:
        raise RuntimeError("no step is running: get_context() only works inside one") from None
