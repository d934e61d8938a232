"""TensorParallel: one rank's place among the ranks, and the exchanges that the model needs.

column-parallel   W = [W0; W1]  (rows of the stored [out, in] weight)   y_r = x W_r^T
row-parallel      W = [W0, W1]  (its columns)      y = sum_r x_r W_r^T     <- all_reduce, or summand
vocabulary        rows of the embedding / LM head  y = sum_r, or [y0, y1]  <- gather
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from nanovllm.utils.process_group import ProcessGroup

if TYPE_CHECKING:
    from nanovllm.utils.symmetric_memory import SymmetricMemory


class Summand(NamedTuple):
    """This rank's part of a sum over the ranks that is still to be formed."""

    x: torch.Tensor  # [T, size], inside `memory`
    offset: int  # of x there, in bytes: the same on every rank
    memory: SymmetricMemory


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Given to each layer that is split. size 1 needs no process group and exchanges nothing."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = field(default=None, compare=False, repr=False)

    def divide(self, number: int, what: str) -> int:
        """number / size. Raises ValueError naming both if it does not divide."""
        if number % self.size:
            raise ValueError(
                f"{what} ({number}) cannot be divided among tensor_parallel_size={self.size} "
                "ranks: choose a divisor of it"
            )
        return number // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, for every rank. `x` may be overwritten, by the result or not."""
        return x if self.size == 1 else self.group.all_reduce(x)

    def summand(self, rows: int, size: int, dtype: torch.dtype, turn: int) -> Summand | None:
        """Memory for this rank's part of a sum [rows, size] that `RMSNorm.add_norm` forms; None if
        `all_reduce` must. Sums that follow each other need different turns, of 0, 1 and 2."""
        return self.group and self.group.summand(rows, size, dtype, turn)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Concatenate the ranks' x along the last dimension on rank 0; None elsewhere."""
        return x if self.size == 1 else self.group.gather(x)

    def broadcast(self, x: torch.Tensor) -> None:
        """Write rank 0's `x` into every rank's."""
        if self.size > 1:
            self.group.broadcast(x)

    def all_reduce_min(self, number: int) -> int:
        """The smallest of the ranks' numbers, for every rank."""
        return number if self.size == 1 else self.group.all_reduce_min(number)
