"""Triton kernel that writes a step's new K and V into the paged pool. Needs triton to import."""

import torch
import triton
import triton.language as tl


@triton.jit
def _store_kv_kernel(
    key_ptr,
    value_ptr,
    key_stride,
    value_stride,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per position: copy its WIDTH = kv_heads * head_dim numbers to its slot."""
    # 64-bit: slot * WIDTH passes 2^31 in a pool of a few GiB, and position * stride in a long step.
    position = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + position).to(tl.int64)
    if slot >= 0:  # -1 marks padding rows; skipping here needs no mask and no sync on the host
        offsets = tl.arange(0, BLOCK)
        mask = offsets < WIDTH
        key = tl.load(key_ptr + position * key_stride + offsets, mask=mask)
        value = tl.load(value_ptr + position * value_stride + offsets, mask=mask)
        tl.store(k_cache_ptr + slot * WIDTH + offsets, key, mask=mask)
        tl.store(v_cache_ptr + slot * WIDTH + offsets, value, mask=mask)


def store_kv_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write k and v [T, kv_heads, head_dim] (rows may be strided, a row itself is dense) into
    contiguous k_cache and v_cache [num_blocks, block_size, kv_heads, head_dim] at slot_mapping
    [T] int32; slot -1 is skipped."""
    num_positions, num_heads, head_dim = k.shape
    width = num_heads * head_dim
    for row in (k, v):
        assert row.stride(2) == 1 and row.stride(1) == head_dim
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert slot_mapping.numel() == num_positions
    _store_kv_kernel[(num_positions,)](
        k,
        v,
        k.stride(0),
        v.stride(0),
        k_cache,
        v_cache,
        slot_mapping,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
    )
