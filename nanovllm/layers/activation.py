"""SwiGLU's activation."""

import torch
import torch.nn.functional as F

from nanovllm.layers import kernels


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for x = [gate | up]: [T, 2 d] -> [T, d] (Shazeer 2020)."""
    if kernels.usable(x):
        from nanovllm.layers.fused_kernels import silu_and_mul_fused

        return silu_and_mul_fused(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
