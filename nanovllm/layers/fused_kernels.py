"""Triton kernels for what stands between the matrix products: add + RMSNorm; q/k norm + RoPE + KV
store of a prefill; SiLU x up. Each replaces a chain of plain torch operations, which its caller
keeps beside it as the reference. Needs triton to import.

Kernels that take PDL may start while the kernel before them still runs (programmatic dependent
launch, Hopper and later): they load what no kernel wrote, then wait for its results.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers.pdl import pdl_launch, pdl_options, pdl_wait


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    part_stride,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    pdl_launch(PDL)
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64) * SIZE
    x = tl.load(x_ptr + row + offsets, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * part_stride + row + offsets, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row + offsets, mask=mask, other=0.0).to(tl.float32)
    # Rounded as the residual that later layers will read, so both see the same number.
    rounded = x.to(residual_ptr.dtype.element_ty)
    if HAS_RESIDUAL or PARTS > 1:
        tl.store(residual_ptr + row + offsets, rounded, mask=mask)
    x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + row + offsets, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual) for x [T, size], or [parts, T, size] whose sum over the
    parts is meant. The new residual overwrites the old one, if there was one."""
    assert x.is_contiguous()
    num_parts = x.shape[0] if x.dim() == 3 else 1
    num_rows, size = x.shape[-2:]
    out = torch.empty(num_rows, size, dtype=weight.dtype, device=x.device)
    has_residual = residual is not None
    if residual is None:
        residual = x if num_parts == 1 else torch.empty_like(out)
    _add_rms_norm_kernel[(num_rows,)](
        x,
        num_rows * size,
        residual,
        weight,
        out,
        eps,
        SIZE=size,
        PARTS=num_parts,
        HAS_RESIDUAL=has_residual,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8,
        **pdl_options(x),
    )
    return out, residual


@triton.jit
def load_halves(ptr, mask, DIM: tl.constexpr):
    """The numbers at `ptr`, and those half a head on that RoPE pairs with them, in float32."""
    a = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(ptr + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def norm_and_rotate(a, b, wa, wb, cos, sin, eps, DIM: tl.constexpr):
    """Rows of heads in two halves: RMS-normalized with weights wa and wb, then turned."""
    scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / DIM + eps)[:, None]
    a, b = a * scale * wa, b * scale * wb
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _norm_rope_store_kernel(
    qkv_ptr,
    qkv_stride,
    position_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    ROWS: tl.constexpr,
    KV_ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program per position. Its q and k heads are one tile, in two halves for RoPE."""
    token = tl.program_id(0).to(tl.int64)
    qkv_ptr += token * qkv_stride
    row = tl.arange(0, ROWS)[:, None]  # q heads, then k heads
    col = tl.arange(0, HALF)[None, :]
    mask = (row < HEADS + KV_HEADS) & (col < DIM // 2)
    at = row * DIM + col
    a, b = load_halves(qkv_ptr + at, mask, DIM)
    in_row = col < DIM // 2
    # The weights of q_norm for q rows, those of k_norm for k rows.
    q_wa, q_wb = load_halves(q_weight_ptr + col, in_row, DIM)
    k_wa, k_wb = load_halves(k_weight_ptr + col, in_row, DIM)
    wa, wb = tl.where(row < HEADS, q_wa, k_wa), tl.where(row < HEADS, q_wb, k_wb)
    angle = tl.load(position_ptr + token).to(tl.int64) * (DIM // 2) + col
    cos = tl.load(cos_ptr + angle, mask=in_row, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=in_row, other=0.0)
    a, b = norm_and_rotate(a, b, wa, wb, cos, sin, eps, DIM)
    dtype = qkv_ptr.dtype.element_ty
    rotated_a, rotated_b = a.to(dtype), b.to(dtype)
    tl.store(qkv_ptr + at, rotated_a, mask=mask)
    tl.store(qkv_ptr + at + DIM // 2, rotated_b, mask=mask)
    if HAS_CACHE:
        # 64-bit: slot * (KV_HEADS * DIM) passes 2^31 in a pool of a few GiB.
        slot = tl.load(slot_ptr + token).to(tl.int64)
        if slot >= 0:  # -1: padding, skipped without a wait on the host
            k_at = slot * (KV_HEADS * DIM) + at - HEADS * DIM
            is_k = mask & (row >= HEADS)
            tl.store(k_cache_ptr + k_at, rotated_a, mask=is_k)
            tl.store(k_cache_ptr + k_at + DIM // 2, rotated_b, mask=is_k)
            head = tl.arange(0, KV_ROWS)[:, None]
            v_mask = (head < KV_HEADS) & (col < DIM // 2)
            v_from = qkv_ptr + (HEADS + KV_HEADS + head) * DIM + col
            v_to = v_cache_ptr + slot * (KV_HEADS * DIM) + head * DIM + col
            tl.store(v_to, tl.load(v_from, mask=v_mask), mask=v_mask)
            tl.store(v_to + DIM // 2, tl.load(v_from + DIM // 2, mask=v_mask), mask=v_mask)


def norm_rope_store(
    qkv: torch.Tensor,
    num_kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Normalize and rotate the q and k heads of qkv [T, heads + 2 kv_heads, d] in place, and write
    k and v to their slots [T] of the caches [blocks, block_size, kv_heads, d] (empty before the
    pool exists: then nothing is stored; slot -1 is skipped). cos, sin: [max_position, d / 2]."""
    num_tokens, num_rows, head_dim = qkv.shape
    assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim
    _norm_rope_store_kernel[(num_tokens,)](
        qkv,
        qkv.stride(0),
        positions,
        cos,
        sin,
        q_weight,
        k_weight,
        eps,
        k_cache,
        v_cache,
        slot_mapping,
        HEADS=num_rows - 2 * num_kv_heads,
        KV_HEADS=num_kv_heads,
        DIM=head_dim,
        HAS_CACHE=k_cache.numel() > 0,
        ROWS=triton.next_power_of_2(num_rows - num_kv_heads),
        KV_ROWS=triton.next_power_of_2(num_kv_heads),
        HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < WIDTH
    gate = tl.load(x_ptr + row * (2 * WIDTH) + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * WIDTH) + WIDTH + col, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + col, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul_fused(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for contiguous x = [gate | up]: [T, 2 d] -> [T, d]."""
    assert x.dim() == 2 and x.is_contiguous()
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(width), 1024)
    _silu_and_mul_kernel[(num_rows, triton.cdiv(width, block))](x, out, WIDTH=width, BLOCK=block)
    return out
