"""Matrix products with few rows (small decode batches), two Triton kernels.

With so few rows the product is a read of the weight, and a general library's tiles leave much of
the memory bandwidth unused. Where the outputs alone are too few programs for a GPU, the sums of
several rows are split over programs, and the next norm adds up their parts. Both kernels take in
SiLU; that for one row also the residual and the norm before a product, and it asks for its weights
before it waits for its input. Needs triton to import.

Which products are done here and which by cuBLAS, and with which tiles, is what was best in whole
decode steps on an H200 (docs/measurements.md).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanovllm.layers import kernels
from nanovllm.layers.decode_kernels import gpu_limits
from nanovllm.layers.fused_kernels import add_rms_norm
from nanovllm.layers.pdl import pdl_launch, pdl_options, pdl_wait

# Several rows. Of a weight with at most NARROW outputs the sums are split into PARTS, of one with
# twice as many into half as many.
NARROW, PARTS, MAX_SPLIT_ROWS = 2048, 4, 256
# Others, while cuBLAS's tiles of them do not fill the GPU either: up to MAX_ROWS, half of them of a
# large weight, if it has outputs enough.
MAX_WEIGHTS, MAX_ROWS, WIDE = 8 << 20, 64, 6144
MULTIPLE = 32  # the inputs of several rows must be a multiple of it
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
    if norm_weight_ptr is not None:
        tl.static_assert(TILE_IN >= IN, "a norm takes the whole row in one tile")
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
        if norm_weight_ptr is not None:
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
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of rows, tile of outputs, part of the inputs): out[part] = x[:, part]
    W[:, part]^T, by tensor cores. `width` outputs, and with SILU as many of `up` behind them, as
    in _one_row_kernel. Tiles divide the inputs."""
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
    pdl_launch(PDL)
    pdl_wait(PDL)
    for i in tl.range(0, end - first, TILE_IN, num_stages=STAGES):
        x = tl.load(x_ptr + i)
        acc = tl.dot(tl.load(w_ptr + i), x, acc, input_precision="ieee")
        if SILU:
            up = tl.dot(tl.load(w2_ptr + i), x, up, input_precision="ieee")
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
    num_rows, (outputs, inputs) = len(x), weight.shape
    if num_rows == 1 or inputs % MULTIPLE:
        return num_rows == 1
    if outputs <= NARROW:
        return may_split and num_rows <= MAX_SPLIT_ROWS
    if weight.numel() <= MAX_WEIGHTS or (may_split and outputs <= 2 * NARROW):
        return num_rows <= MAX_ROWS
    return outputs >= WIDE and num_rows <= MAX_ROWS // 2


def num_parts(num_rows: int, weight: torch.Tensor) -> int:
    """Into how many parts to split the sum, where the outputs alone are too few programs for a GPU.
    One row is not split: every program of the next product would read all parts."""
    outputs, inputs = weight.shape
    if num_rows == 1 or outputs > 2 * NARROW:
        return 1
    return PARTS // 2 if outputs > NARROW or (num_rows > 128 and inputs <= 2048) else PARTS


class Tile(NamedTuple):
    """Of a program for several rows, and the stages of its pipeline."""

    rows: int
    outputs: int
    inputs: int
    stages: int


def few_rows_tile(
    num_rows: int, outputs: int, inputs: int, parts: int, silu: bool, shared: int
) -> Tile:
    """What was measured best on an H200 in the steps of Qwen3-0.6B and 8B, for a weight [outputs,
    inputs], cut to `shared` bytes of memory and to what divides the inputs."""
    is_large = outputs * inputs > MAX_WEIGHTS
    # A large weight is to come from memory once; a small one stays in L2, and more programs pay.
    rows = num_rows if is_large else triton.cdiv(num_rows, 2)
    rows = min(max(triton.next_power_of_2(rows), 16), 64)
    if silu:
        tile_in, stages = (64, 5) if num_rows <= 32 else (128, 3)
    elif num_rows <= 64:
        tile_in, stages = (128, 4) if is_large and parts == 1 else (256, 3)
    else:
        tile_in, stages = (128, 4) if num_rows <= 128 or inputs <= 2048 else (64, 4)
    row_bytes = 2 * (rows + (128 if silu else 64))
    while tile_in * stages * row_bytes > shared or inputs % tile_in:
        tile_in //= 2
    return Tile(rows, 64, tile_in, stages)


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
        num_warps=num_warps,
        **pdl_options(x),
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
    `one_row_linear`. Several rows have a multiple of MULTIPLE inputs, and may have parts > 1: then
    it is the summands [parts, T, out] for `add_rms_norm`. Each is rounded to x's dtype, so where
    parts cancel, the error is relative to them, not to their sum."""
    num_rows, in_features = x.shape
    assert x.is_contiguous()
    assert in_features % MULTIPLE == 0 if num_rows > 1 else parts == 1
    if num_rows == 1:
        return one_row_linear(x, weight, silu, out=out)[0]
    width = len(weight) // 2 if silu else len(weight)
    shared = gpu_limits(x.device)[1]
    tile = few_rows_tile(num_rows, *weight.shape, parts, silu, shared)
    per_part = triton.cdiv(triton.cdiv(in_features, parts), tile.inputs) * tile.inputs
    parts = triton.cdiv(in_features, per_part)
    if out is None:
        shape = (num_rows, width) if parts == 1 else (parts, num_rows, width)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
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
        TILE_ROWS=tile.rows,
        TILE_OUT=tile.outputs,
        TILE_IN=tile.inputs,
        STAGES=tile.stages,
        num_warps=4,
        **pdl_options(x),
    )
    return out
