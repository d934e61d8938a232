"""Matrix products with few rows (small decode batches), two Triton kernels.

With so few rows the product is a read of the weight, and a general library's tiles leave much of
the memory bandwidth unused. Here each program asks for a whole tile of the weight, the first one
before it waits for its input. Long sums of several rows are split over programs, and the next norm
adds up their partial sums. The kernel for one row takes in what stands before and after a product:
residual and norm, SiLU. Needs triton to import.

Where it is used was measured on an H200. One row, Qwen3-0.6B: o 2.3 us by a former kernel, 12.8 by
cuBLAS; a layer's products and norms 17.0 by the former, 12.7 now. Several (us; cuBLAS -> this): 8
rows of o 5.7 -> 3.1, down 7.0 -> 3.6, 64 rows 5.7 -> 4.7 and 7.5 -> 5.3; but 16 rows of qkv 5.0 ->
5.6 and gate_up 5.7 -> 7.3.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.layers import kernels
from nanovllm.layers.fused_kernels import add_rms_norm
from nanovllm.layers.pdl import pdl_launch, pdl_wait, use_pdl

MAX_ROWS, MAX_SPLIT_ROWS = 64, 256
MAX_WEIGHTS = 8 << 20  # of larger ones cuBLAS's tiles are enough to fill the GPU
NARROW, PARTS = 2048, 4  # outputs up to which several rows' sums are split, and into what
# Inputs up to which one row is normalized where it is multiplied: every program reads all of row,
# residual and norm weight, and the more inputs, the fewer outputs its registers have room for. With
# 4096 a layer of Qwen3-8B, without attention, takes 107 us on an H200, with its norms apart 98.
MAX_NORMED = 2048


@triton.jit
def _one_row_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    total_ptr,
    weight_ptr,
    out_ptr,
    eps,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SILU: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of outputs): out = x W[tile]^T, in registers.

    With a norm's weight: total = x + residual (None: x), and its norm is multiplied. Every program
    does so for itself. The first one stores the total, elsewhere than over the residual, which
    others may still have to read.

    With SILU the weight is [gate; up], OUT counts both, and the program combines its rows of
    both: out = silu(gate) * up, of OUT / 2 columns."""
    col = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    width: tl.constexpr = OUT // 2 if SILU else OUT
    row_at = weight_ptr + col[:, None].to(tl.int64) * IN
    out = tl.zeros((TILE_OUT,), tl.float32)
    up = tl.zeros((TILE_OUT,), tl.float32)
    for i in tl.static_range(0, IN, TILE_IN):
        k = i + tl.arange(0, TILE_IN)
        w_mask = (col < width)[:, None] & (k < IN)[None, :]
        w = tl.load(row_at + k[None, :], mask=w_mask, other=0.0)
        if SILU:
            w2 = tl.load(row_at + width * IN + k[None, :], mask=w_mask, other=0.0)
        if norm_weight_ptr is not None:
            norm_weight = tl.load(norm_weight_ptr + k, mask=k < IN, other=0.0)
        if i == 0:
            pdl_launch(PDL)
            pdl_wait(PDL)
        x = tl.load(x_ptr + k, mask=k < IN, other=0.0).to(tl.float32)
        if norm_weight_ptr is not None:  # of a row that the first tile has whole
            if residual_ptr is not None:
                x += tl.load(residual_ptr + k, mask=k < IN, other=0.0).to(tl.float32)
                total = x.to(total_ptr.dtype.element_ty)
                if tl.program_id(0) == 0:
                    tl.store(total_ptr + k, total, mask=k < IN)
                x = total.to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x) / IN + eps) * norm_weight
            # Rounded as the separate norm's result is.
            x = x.to(norm_weight.dtype).to(tl.float32)
        out += tl.sum(w.to(tl.float32) * x[None, :], axis=1)
        if SILU:
            up += tl.sum(w2.to(tl.float32) * x[None, :], axis=1)
    if SILU:
        # Rounded in between, as the plain path's product is.
        gate = out.to(out_ptr.dtype.element_ty).to(tl.float32)
        out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + col, out.to(out_ptr.dtype.element_ty), mask=col < width)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    in_features,
    width,
    per_part,
    SILU: tl.constexpr,
    WHOLE: tl.constexpr,
    HELD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of rows, tile of outputs, part of the inputs): out[part] = x[:, part]
    W[:, part]^T, by tensor cores. `width` outputs, and with SILU as many of `up` behind them, as
    in _one_row_kernel. WHOLE: tiles divide the inputs."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    col = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    part = tl.program_id(2)
    first = part * per_part
    end = tl.minimum(first + per_part, in_features)
    k = first + tl.arange(0, TILE_IN)
    # Instead of rows and outputs that are not there the last one is read again.
    w_at = tl.minimum(col, width - 1)[:, None].to(tl.int64) * in_features + k[None, :]
    w_ptr = weight_ptr + w_at
    w2_ptr = w_ptr + width * in_features
    x_ptr += tl.minimum(row, num_rows - 1)[None, :] * in_features + k[:, None]
    acc = tl.zeros((TILE_OUT, TILE_ROWS), tl.float32)
    up = tl.zeros((TILE_OUT, TILE_ROWS), tl.float32)
    if HELD:
        w = tl.load(w_ptr)
        if SILU:
            w2 = tl.load(w2_ptr)
    pdl_launch(PDL)
    pdl_wait(PDL)
    start = 0
    if HELD:
        x = tl.load(x_ptr)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if SILU:
            up = tl.dot(w2, x, up, input_precision="ieee")
        start = TILE_IN
    for i in tl.range(start, end - first, TILE_IN, num_stages=STAGES):
        if WHOLE:
            x = tl.load(x_ptr + i)
            w = tl.load(w_ptr + i)
        else:
            there = k + i < end
            x = tl.load(x_ptr + i, mask=there[:, None], other=0.0)
            w = tl.load(w_ptr + i, mask=there[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if SILU:
            if WHOLE:
                w2 = tl.load(w2_ptr + i)
            else:
                w2 = tl.load(w2_ptr + i, mask=there[None, :], other=0.0)
            up = tl.dot(w2, x, up, input_precision="ieee")
    if SILU:
        gate = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc = gate / (1 + tl.exp(-gate)) * up
    to = out_ptr + (part * num_rows + row[None, :]) * width + col[:, None]
    mask = (col < width)[:, None] & (row < num_rows)[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=mask)


def serves(x: torch.Tensor, weight: torch.Tensor, may_split: bool = False) -> bool:
    """Whether x [T, in] times weight [out, in] is better done here than by cuBLAS, when the sums
    may be split, or not."""
    if not kernels.usable(x) or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    most = MAX_SPLIT_ROWS if may_split and len(weight) <= NARROW else MAX_ROWS
    return len(x) == 1 or (len(x) <= most and weight.numel() <= MAX_WEIGHTS)


def num_parts(num_rows: int, weight: torch.Tensor) -> int:
    """Into how many parts to split the sum, where the outputs alone are too few programs for a GPU.
    One row is not split: every program of the next product would read all parts."""
    return PARTS if num_rows > 1 and len(weight) <= NARROW else 1


class Tile(NamedTuple):
    """Of a program for several rows, and the tiles of weights that are on their way in it."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    held: bool = False


def few_rows_tile(num_rows: int, silu: bool, parts: int) -> Tile:
    """The one measured best on an H200, for Qwen3-0.6B's products."""
    if num_rows <= 16:
        return Tile(16, 32, 256, 3, True) if silu else Tile(16, 64, 128, 4)
    if silu:
        return Tile(32, 64, 64, 4)
    if parts > 1:
        return Tile(64, 64, 64, 4)
    return Tile(32, 64, 128, 4) if num_rows <= 32 else Tile(64, 64, 128, 4)


def one_row_tile(in_features: int, width: int, silu: bool) -> tuple[int, int, int]:
    """(outputs, inputs, warps) of a program for one row: all inputs up to 4096, so that all weights
    are asked for before the wait; few warps, as each takes part in the sum of every output; at most
    128 weights a thread, half of it where the next tile's are held too; 256 programs or more."""
    tile_in = min(triton.next_power_of_2(in_features), 4096)
    warps = 2 if tile_in <= 1024 else 4
    most = min(16, warps * 4096 // tile_in // (2 if silu else 1), max(width // 256, 1))
    return 1 << (most.bit_length() - 1), tile_in, warps if in_features <= tile_in else 8


def one_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    silu: bool = False,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, x + residual) for x [1, in] contiguous and weight [out, in]. y [1, out] is the product of
    x, or with a norm's weight of the sum's RMSNorm; with `silu` the weight is [gate; up] and y
    silu(gate) * up [1, out / 2]. The residual given may be overwritten; y is in `out` if given."""
    out_features, in_features = weight.shape
    if norm_weight is not None and in_features > MAX_NORMED:
        x, total = add_rms_norm(x, residual, norm_weight, eps)
        return one_row_linear(x, weight, silu, out=out)[0], total
    width = out_features // 2 if silu else out_features
    tile_out, tile_in, num_warps = one_row_tile(in_features, width, silu)
    if out is None:
        out = torch.empty(1, width, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    pdl = use_pdl(x)
    _one_row_kernel[(triton.cdiv(width, tile_out),)](
        x,
        residual,
        norm_weight,
        total,
        weight,
        out,
        eps,
        IN=in_features,
        OUT=out_features,
        SILU=silu,
        TILE_OUT=tile_out,
        TILE_IN=tile_in,
        PDL=pdl,
        num_warps=num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out, total


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    parts: int = 1,
    out: torch.Tensor | None = None,
    silu: bool = False,
) -> torch.Tensor:
    """x [T, in] contiguous, weight [out, in] -> x W^T [T, out], in `out` if given; with `silu` as
    `one_row_linear`. With parts > 1, which several rows may have, the summands [parts, T, out] for
    `add_rms_norm`: each is rounded, which in all is no more than the whole's being rounded."""
    num_rows, in_features = x.shape
    assert x.is_contiguous() and (num_rows > 1 or parts == 1)
    if num_rows == 1:
        return one_row_linear(x, weight, silu, out=out)[0]
    width = len(weight) // 2 if silu else len(weight)
    tile = few_rows_tile(num_rows, silu, parts)
    per_part = triton.cdiv(triton.cdiv(in_features, parts), tile.inputs) * tile.inputs
    parts = triton.cdiv(in_features, per_part)
    if out is None:
        shape = (num_rows, width) if parts == 1 else (parts, num_rows, width)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    whole = in_features % tile.inputs == 0
    pdl = use_pdl(x)
    grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(width, tile.outputs), parts)
    _few_rows_kernel[grid](
        x,
        weight,
        out,
        num_rows,
        in_features,
        width,
        per_part,
        SILU=silu,
        WHOLE=whole,
        HELD=tile.held and whole,
        TILE_ROWS=tile.rows,
        TILE_OUT=tile.outputs,
        TILE_IN=tile.inputs,
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
