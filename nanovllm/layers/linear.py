"""Linear layers split over tensor-parallel ranks, and how each takes its part of a stored weight.

A stored weight is [out_features, in_features]. Every parameter has a `weight_loader(source,
shard_id)`: `source` is a safetensors slice (or anything with `get_shape()` and indexing), of which
only this rank's part is read; `shard_id` says which of several stored weights fused into one
parameter this is.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers import kernels
from nanovllm.utils.parallel import Summand, TensorParallel


class WeightSource(Protocol):
    """One stored tensor, not read yet."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


def check_shape(source: WeightSource, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless the stored tensor has exactly the expected shape."""
    if tuple(source.get_shape()) != expected:
        raise ValueError(
            f"has shape {tuple(source.get_shape())}, but config.json implies {expected}"
        )


def set_replicated_loader(param: nn.Parameter) -> None:
    """Let `param` be loaded whole on every rank."""

    def load(source: WeightSource, shard_id: Hashable = None) -> None:
        check_shape(source, tuple(param.shape))
        param.data.copy_(source[:])

    param.weight_loader = load


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    may_split: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + bias, by the few-row kernel where that is faster, in `out` if it is given. With
    `may_split` the result may be summands [parts, T, out], which `RMSNorm.add_norm` adds up."""
    if bias is None and kernels.usable(x):
        from nanovllm.layers import few_rows

        if few_rows.serves(x, weight, may_split):
            parts = few_rows.num_parts(len(x), weight) if may_split else 1
            return few_rows.few_rows_linear(x, weight, parts, out)
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


class MergedColumnParallelLinear(nn.Module):
    """Several column-parallel projections of one input, fused: y = x [W_0; W_1; ...]^T.

    Each output part is split over the ranks on its own, so the fused output of a rank is
    [part_0 / size, part_1 / size, ...], in that order. No communication.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[Hashable, int],
        bias: bool,
        tp: TensorParallel,
        what: str = "the layer's width",
    ) -> None:
        """parts: shard id -> whole width. Raises ValueError if `tp.size` does not divide one."""
        super().__init__()
        # shard id -> (rows stored, first row read, first row here, rows here)
        self.shards: dict[Hashable, tuple[int, int, int, int]] = {}
        offset = 0
        for shard_id, width in parts.items():
            local = tp.divide(width, what)
            self.shards[shard_id] = (width, tp.rank * local, offset, local)
            offset += local
        self._make_parameters(in_features, offset, bias)

    def _make_parameters(self, in_features: int, out_features: int, bias: bool) -> None:
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        for param in self.parameters():
            param.weight_loader = partial(self._load, param)

    def _load(self, param: nn.Parameter, source: WeightSource, shard_id: Hashable) -> None:
        stored, first, offset, rows = self.shards[shard_id]
        check_shape(source, (stored, *param.shape[1:]))
        param.data[offset : offset + rows].copy_(source[first : first + rows])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)  # [T, in] -> [T, out / size]


class QKVParallelLinear(MergedColumnParallelLinear):
    """Fused q, k and v projections, split by heads: shard ids "q", "k", "v".

    With fewer KV heads than ranks each KV head is kept on size / num_kv_heads neighbouring ranks,
    which are just the ranks that hold its query heads.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        tp: TensorParallel,
    ) -> None:
        nn.Module.__init__(self)
        self.num_heads = tp.divide(num_heads, "num_attention_heads")
        if num_kv_heads >= tp.size:
            self.num_kv_heads = tp.divide(num_kv_heads, "num_key_value_heads")
        elif tp.size % num_kv_heads == 0:
            self.num_kv_heads = 1
        else:
            raise ValueError(
                f"num_key_value_heads ({num_kv_heads}) does not divide "
                f"tensor_parallel_size={tp.size}, so the heads cannot be replicated evenly"
            )
        q, kv = self.num_heads * head_dim, self.num_kv_heads * head_dim
        first_kv = tp.rank * num_kv_heads // tp.size * head_dim
        self.shards = {
            "q": (num_heads * head_dim, tp.rank * q, 0, q),
            "k": (num_kv_heads * head_dim, first_kv, q, kv),
            "v": (num_kv_heads * head_dim, first_kv, q + kv, kv),
        }
        self._make_parameters(hidden_size, q + 2 * kv, bias)


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_r W_r^T: the input is split, the output is whole on every rank, or
    will be where the next norm forms the sum."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        tp: TensorParallel,
        turn: int,
        what: str = "the layer's input width",
    ) -> None:
        """turn: as in `TensorParallel.summand`. Raises ValueError if `tp.size` does not divide
        in_features."""
        super().__init__()
        self.tp = tp
        self.turn = turn
        local = tp.divide(in_features, what)
        first = tp.rank * local
        self.weight = nn.Parameter(torch.empty(out_features, local), requires_grad=False)

        def load(source: WeightSource, shard_id: Hashable = None) -> None:
            check_shape(source, (out_features, in_features))
            self.weight.data.copy_(source[:, first : first + local])

        self.weight.weight_loader = load
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False)
            set_replicated_loader(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor | Summand:
        # The sum over ranks would count the bias `size` times: only rank 0 adds it.
        bias = self.bias if self.tp.rank == 0 else None
        # [T, in / size] -> [T, out]
        if self.tp.size == 1:
            return linear(x, self.weight, bias, may_split=True)
        summand = self.tp.summand(len(x), len(self.weight), x.dtype, self.turn)
        if summand is not None:
            linear(x, self.weight, bias, out=summand.x)
            return summand
        return self.tp.all_reduce(linear(x, self.weight, bias))
