"""Triton kernel: where a decode step's new positions stand. Needs triton to import."""

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
