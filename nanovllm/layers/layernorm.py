"""RMSNorm, with the residual addition before it and the product after it in a transformer block."""

import torch
from torch import nn

from nanovllm.layers import kernels
from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.linear import MergedColumnParallelLinear, set_replicated_loader
from nanovllm.utils.parallel import Summand


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

    Statistics are taken in float32, and the product with the weight in the input's dtype, as
    transformers does; the kernels round once, after the product.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        set_replicated_loader(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]"""
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight

    def add_norm(
        self, x: torch.Tensor | Summand, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); residual None stands for zero, and x may be summands
        [parts, T, size] (see layers/few_rows.py) or one of each rank. The residual given may be
        overwritten."""
        if isinstance(x, Summand):
            from nanovllm.layers.rank_sum import sum_add_rms_norm

            return sum_add_rms_norm(x, residual, self.weight, self.eps)
        if kernels.usable(x):
            from nanovllm.layers.fused_kernels import add_rms_norm

            return add_rms_norm(x, residual, self.weight, self.eps)
        if residual is not None:
            x = x + residual
        return self(x), x

    def add_norm_linear(
        self,
        x: torch.Tensor | Summand,
        residual: torch.Tensor | None,
        proj: MergedColumnParallelLinear,
        silu: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(proj(norm(x + residual)), x + residual), for a single row by one kernel; with `silu`
        silu_and_mul of the first, for few rows by the product's. x and residual as in `add_norm`.
        """
        has_kernels = proj.bias is None and kernels.usable(proj.weight)
        if has_kernels:
            from nanovllm.layers.few_rows import few_rows_linear, one_row_linear, serves

            if isinstance(x, torch.Tensor) and len(x) == 1 and serves(x, proj.weight):
                return one_row_linear(x, proj.weight, silu, residual, self.weight, self.eps)
        x, residual = self.add_norm(x, residual)
        if has_kernels and silu and serves(x, proj.weight):
            return few_rows_linear(x, proj.weight, silu=True), residual
        y = proj(x)
        return silu_and_mul(y) if silu else y, residual
