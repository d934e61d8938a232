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

import torch
import triton
import triton.language as tl

from nanovllm.layers import kernels
from nanovllm.layers.fused_kernels import add_rms_norm
from nanovllm.layers.pdl import pdl_launch, pdl_wait, use_pdl

MAX_ROWS = 64
NARROW = 2048  # outputs up to which more than one row is worth it: cuBLAS fills the GPU from there
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


@triton.jit
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PER_PART: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of outputs, part of the inputs): out[part] = x[:, part] W[tile, part]^T, by
    tensor cores."""
    col = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    part = tl.program_id(1)
    end = tl.minimum((part + 1) * PER_PART, IN)
    row_at = weight_ptr + col[:, None].to(tl.int64) * IN
    row = tl.arange(0, ROWS)
    acc = tl.zeros((TILE_OUT, ROWS), tl.float32)
    for i in tl.static_range(0, PER_PART, TILE_IN):
        k = part * PER_PART + i + tl.arange(0, TILE_IN)
        w_mask = (col < OUT)[:, None] & (k < end)[None, :]
        w = tl.load(row_at + k[None, :], mask=w_mask, other=0.0)
        if i == 0:
            pdl_launch(PDL)
            pdl_wait(PDL)
        x_mask = (k < end)[:, None] & (row < num_rows)[None, :]
        x = tl.load(x_ptr + row[None, :] * IN + k[:, None], mask=x_mask, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    to = out_ptr + part * num_rows * OUT + row[None, :] * OUT + col[:, None]
    mask = (col < OUT)[:, None] & (row < num_rows)[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=mask)


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x [T, in] times weight [out, in] is better done here than by cuBLAS."""
    if not kernels.usable(x) or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    return len(x) == 1 or (len(x) <= MAX_ROWS and weight.shape[0] <= NARROW)


def num_parts(num_rows: int, weight: torch.Tensor) -> int:
    """Into how many parts to split the sum: of 512 inputs each, but at most about 512 programs.
    One row is not split: every program of the next product would read all parts."""
    out_features, in_features = weight.shape
    most = 512 * 16 // out_features if num_rows > 1 else 1
    return max(1, min(most, triton.cdiv(in_features, 512)))


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
    x: torch.Tensor, weight: torch.Tensor, parts: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, in] contiguous, weight [out, in] -> x W^T [T, out] in x's dtype, in `out` if given;
    with parts > 1, which several rows may have, the summands [parts, T, out] in float32, for
    `add_rms_norm`."""
    num_rows, in_features = x.shape
    assert x.is_contiguous() and (num_rows > 1 or parts == 1)
    if num_rows == 1:
        return one_row_linear(x, weight, out=out)[0]
    tile_out, tile_in = 32, 512
    out_features = weight.shape[0]
    per_part = triton.cdiv(triton.cdiv(in_features, parts), tile_in) * tile_in
    parts = triton.cdiv(in_features, per_part)
    shape = (num_rows, out_features) if parts == 1 else (parts, num_rows, out_features)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype if parts == 1 else torch.float32, device=x.device)
    pdl = use_pdl(x)
    _few_rows_kernel[(triton.cdiv(out_features, tile_out), parts)](
        x,
        weight,
        out,
        num_rows,
        IN=in_features,
        OUT=out_features,
        PER_PART=per_part,
        ROWS=max(triton.next_power_of_2(num_rows), 16),
        TILE_OUT=tile_out,
        TILE_IN=tile_in,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
