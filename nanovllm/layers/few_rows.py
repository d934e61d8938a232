"""Matrix products with few rows (small decode batches), a Triton kernel.

With so few rows the product is a read of the weight, and a general library's tiles leave much of
the memory bandwidth unused. Here each program reads a whole tile of the weight at once, the first
one before it waits for its input, and long sums are split over programs whose partial sums the
next kernel adds up. Needs triton to import.

Where it is used was measured on an H200 (us; cuBLAS -> this): one row of Qwen3-0.6B's qkv 5.0 ->
3.8, o 12.8 -> 2.3, gate_up 6.0 -> 4.9, down 6.7 -> 3.0; 8 rows of o 5.7 -> 3.1, down 7.0 -> 3.6, 64
rows 5.7 -> 4.7 and 7.5 -> 5.3; but 16 rows of qkv 5.0 -> 5.6 and gate_up 5.7 -> 7.3.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers import kernels
from nanovllm.layers.pdl import pdl_launch, pdl_wait, use_pdl

MAX_ROWS = 64
NARROW = 2048  # outputs up to which more than one row is worth it: cuBLAS fills the GPU from there


@triton.jit
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PER_PART: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of outputs, part of the inputs): out[part] = x[:, part] W[tile, part]^T.

    With SILU the weight is [gate; up], OUT counts both, and the program combines its rows of
    both: out = silu(gate) * up, of OUT / 2 columns."""
    col = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    part = tl.program_id(1)
    width: tl.constexpr = OUT // 2 if SILU else OUT
    k = part * PER_PART + tl.arange(0, TILE_IN)
    end = tl.minimum((part + 1) * PER_PART, IN)
    w_at = weight_ptr + col[:, None].to(tl.int64) * IN
    w_mask = (col < width)[:, None] & (k < end)[None, :]
    w = tl.load(w_at + k[None, :], mask=w_mask, other=0.0)
    if SILU:
        w2 = tl.load(w_at + width * IN + k[None, :], mask=w_mask, other=0.0)
    pdl_launch(PDL)
    pdl_wait(PDL)
    row = tl.arange(0, ROWS)
    acc = tl.zeros((TILE_OUT, ROWS), tl.float32)
    acc2 = tl.zeros((TILE_OUT, ROWS), tl.float32)
    for i in tl.static_range(0, PER_PART, TILE_IN):
        if i > 0:
            k = part * PER_PART + i + tl.arange(0, TILE_IN)
            w_mask = (col < width)[:, None] & (k < end)[None, :]
            w = tl.load(w_at + k[None, :], mask=w_mask, other=0.0)
            if SILU:
                w2 = tl.load(w_at + width * IN + k[None, :], mask=w_mask, other=0.0)
        if ROWS == 1:
            x = tl.load(x_ptr + k, mask=k < end, other=0.0).to(tl.float32)
            acc += tl.sum(w.to(tl.float32) * x[None, :], axis=1)[:, None]
            if SILU:
                acc2 += tl.sum(w2.to(tl.float32) * x[None, :], axis=1)[:, None]
        else:
            x_mask = (k < end)[:, None] & (row < num_rows)[None, :]
            x = tl.load(x_ptr + row[None, :] * IN + k[:, None], mask=x_mask, other=0.0)
            acc = tl.dot(w, x, acc, input_precision="ieee")
            if SILU:
                acc2 = tl.dot(w2, x, acc2, input_precision="ieee")
    if SILU:
        # Rounded in between, as the plain path's product is.
        gate = acc.to(x_ptr.dtype.element_ty).to(tl.float32)
        acc = gate / (1 + tl.exp(-gate)) * acc2
    to = out_ptr + part * num_rows * width + row[None, :] * width + col[:, None]
    mask = (col < width)[:, None] & (row < num_rows)[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=mask)


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x [T, in] times weight [out, in] is better done here than by cuBLAS."""
    if not kernels.usable(x) or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    return len(x) == 1 or (len(x) <= MAX_ROWS and weight.shape[0] <= NARROW)


def num_parts(weight: torch.Tensor) -> int:
    """Into how many parts to split the sum: of 512 inputs each, but at most about 512 programs."""
    out_features, in_features = weight.shape
    return max(1, min(512 * 16 // out_features, triton.cdiv(in_features, 512)))


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, silu: bool = False, parts: int = 1
) -> torch.Tensor:
    """x [T, in] contiguous, weight [out, in] -> x W^T [T, out] in x's dtype; with `silu` the
    weight is [gate; up] and the result silu(gate) * up [T, out / 2]; with parts > 1 the summands
    [parts, T, out] in float32, to be added by `add_rms_norm`."""
    assert x.is_contiguous() and not (silu and parts > 1)
    # One row is multiplied in registers, more by tensor cores, which want wider tiles of outputs.
    tile_out, tile_in = (16, 512) if len(x) == 1 else (32, 512)
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    width = out_features // 2 if silu else out_features
    per_part = triton.cdiv(triton.cdiv(in_features, parts), tile_in) * tile_in
    parts = triton.cdiv(in_features, per_part)
    shape = (num_rows, width) if parts == 1 else (parts, num_rows, width)
    out = torch.empty(shape, dtype=x.dtype if parts == 1 else torch.float32, device=x.device)
    pdl = use_pdl(x)
    _few_rows_kernel[(triton.cdiv(width, tile_out), parts)](
        x,
        weight,
        out,
        num_rows,
        IN=in_features,
        OUT=out_features,
        PER_PART=per_part,
        SILU=silu,
        ROWS=1 if num_rows == 1 else max(triton.next_power_of_2(num_rows), 16),
        TILE_OUT=tile_out,
        TILE_IN=tile_in,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
