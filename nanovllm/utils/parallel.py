"""TensorParallel: one rank's place among the ranks, and the three exchanges that layers need.

column-parallel   W = [W0; W1]  (rows of the stored [out, in] weight)   y_r = x W_r^T
row-parallel      W = [W0, W1]  (its columns)      y = sum_r x_r W_r^T     <- all_reduce
vocabulary        rows of the embedding / LM head  y = sum_r, or [y0, y1]  <- gather
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Given to each layer that is split. size 1 needs no process group and exchanges nothing."""

    rank: int = 0
    size: int = 1

    def divide(self, number: int, what: str) -> int:
        """number / size. Raises ValueError naming both if it does not divide."""
        if number % self.size:
            raise ValueError(
                f"{what} ({number}) cannot be divided among tensor_parallel_size={self.size} "
                "ranks: choose a divisor of it"
            )
        return number // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; every rank has it afterwards."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Concatenate the ranks' x along the last dimension on rank 0; None elsewhere."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, parts, dst=0)
        return torch.cat(parts, dim=-1) if parts is not None else None
