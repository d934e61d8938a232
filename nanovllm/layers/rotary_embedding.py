"""Rotary position embedding (Su et al. 2021) in the two-halves pairing of Hugging Face models."""

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    """Rotates dimension i with i + d/2 by the angle position * theta^(-2i/d)."""

    def __init__(self, head_dim: int, max_position: int, theta: float) -> None:
        super().__init__()
        # The table is float32 whatever the model's dtype: in bfloat16 neighbouring positions
        # beyond 256 would share an angle.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inverse_frequencies = 1.0 / theta**exponents
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies)  # [max_position, d / 2]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] int; q [T, heads, d] and k [T, kv_heads, d] -> the same, rotated."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)  # [T, 1, d/2]
        return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of x [T, heads, d]; computed in float32, returned in x's dtype."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
