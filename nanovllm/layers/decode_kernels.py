"""Triton: where a decode step's new positions stand, and how the parts of an attention are merged.

Needs triton to import.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _positions_and_slots_kernel(
    context_len_ptr, table_ptr, table_stride, position_ptr, slot_ptr, BLOCK_SIZE: tl.constexpr
):
    row = tl.program_id(0)
    context_len = tl.load(context_len_ptr + row)
    position = tl.maximum(context_len - 1, 0)
    block = tl.load(table_ptr + row * table_stride + position // BLOCK_SIZE)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(position_ptr + row, position)
    tl.store(slot_ptr + row, tl.where(context_len > 0, slot, -1))


def positions_and_slots(
    context_lens: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """context_lens [N], block_tables [N, width] int32 -> the last position of each context and
    its slot in the pool, int32 [N]; position 0 and slot -1 for a context of length 0."""
    positions, slots = torch.empty_like(context_lens), torch.empty_like(context_lens)
    _positions_and_slots_kernel[(len(context_lens),)](
        context_lens,
        block_tables,
        block_tables.stride(0),
        positions,
        slots,
        BLOCK_SIZE=block_size,
        num_warps=1,
    )
    return positions, slots


@triton.jit
def merged_parts(
    part_ptr,
    part_stats_ptr,
    first_part,
    num_parts,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    SMALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attention over a whole context, [SMALL, WIDE], of which GROUP rows count, from that over its
    parts: of each, the weighted sums of values [SMALL, WIDE], and the maximum and the sum of the
    weights [2, SMALL]. All in one load, from L2 (.cg), where the other programs' stores are."""
    each = first_part + tl.arange(0, SPLITS)[:, None]
    small = tl.arange(0, SMALL)[None, :]
    there = (each < first_part + num_parts) & (small < GROUP)
    at = part_stats_ptr + each * (2 * SMALL) + small
    bests = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(at + SMALL, mask=there, other=0.0, cache_modifier=".cg")
    overall = tl.max(tl.where(there, bests, -1e30), axis=0)
    share = tl.exp2(bests - overall[None, :])
    whole = tl.sum(totals * share, axis=0)
    at = (each * SMALL + small)[:, :, None] * WIDE + tl.arange(0, WIDE)[None, None, :]
    parts = tl.load(part_ptr + at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
    return tl.sum(parts * share[:, :, None], axis=0) / whole[:, None]
