"""Triton: what decode attention needs around it. Once a step, where the new positions stand and how
the contexts are cut into parts; inside the kernel, how those parts are merged. Needs triton to
import.
"""

import functools

import torch
import triton
import triton.language as tl

LONG = 1024  # positions that a program had better read alone than in two halves
# (positions of a tile, stages of the pipeline): all but one of its stages are tiles of k and of v
# on their way.
DEEP, LARGE, SMALL = (64, 4), (128, 2), (32, 4)
MANY = (64, 2), (32, 3)  # with either, as many programs run at once


@functools.cache
def gpu_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a GPU, and the bytes of shared memory that a program can have there."""
    if device.type == "cpu":  # in Triton's interpreter: those of an H200
        return 132, 227 << 10
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


def tile_shape(programs: int, group: int, row_bytes: int, device: torch.device) -> tuple[int, int]:
    """The tile and stages for so many programs, query heads of each, and positions of so many
    bytes. The fewer programs there are, the more of the memory's latency each must cover; where not
    all run at once it counts how full the last wave is. Chosen by whole decode steps of Qwen3-0.6B
    on an H200; for groups of four, and so for larger ones, of Qwen3-8B (docs/measurements.md)."""
    multiprocessors, shared = gpu_limits(device)
    if row_bytes > 256:  # not every GPU has the shared memory for more
        return (32, 3) if row_bytes <= 512 else (16, 3)

    def at_once(tile: tuple[int, int]) -> int:
        keys, stages = tile
        return multiprocessors * (shared // ((stages - 1) * keys * row_bytes * 2 + (7 << 10)))

    if programs <= min(multiprocessors, at_once(DEEP)):
        return DEEP
    if group >= 4 and programs > 2 * multiprocessors:
        return DEEP if programs <= 2 * at_once(DEEP) else MANY[0]
    for tile, waves in ((LARGE, 1), (SMALL, 1), (LARGE, 2)):
        if programs <= waves * at_once(tile):
            return tile
    empty = -programs / at_once(MANY[0]) % 1  # of the last wave
    return MANY[0] if empty < 0.5 else MANY[1]


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


@triton.jit(do_not_specialize=["num_seqs"])
def _work_list_kernel(
    context_len_ptr,
    work_ptr,
    num_seqs,
    SHARES: tl.constexpr,
    LONG: tl.constexpr,
    KEYS: tl.constexpr,
    SEQS: tl.constexpr,
):
    """A program for each sequence, which finds its place among all others. Hundreds of sequences
    are few numbers, so every program adds up all of them."""
    seq, each = tl.program_id(0), tl.arange(0, SEQS)
    context_lens = tl.load(context_len_ptr + each, mask=each < num_seqs, other=0)
    past = tl.maximum(context_lens - 1, 0)
    share = tl.cdiv(tl.sum(past.to(tl.int64), axis=0), SHARES)
    longest = tl.maximum(share, tl.minimum(2 * share, LONG))
    longest = tl.maximum(tl.cdiv(longest, KEYS), 1).to(tl.int32) * KEYS  # of a part
    parts = tl.maximum(tl.cdiv(past, longest), 1)  # before each is rounded up to whole tiles
    tiles = tl.maximum(tl.cdiv(tl.cdiv(past, parts), KEYS), 1)
    parts = tl.where(context_lens > 0, tl.maximum(tl.cdiv(past, tiles * KEYS), 1), 0)
    my_parts = tl.sum(tl.where(each == seq, parts, 0), axis=0)
    my_tiles = tl.sum(tl.where(each == seq, tiles, 0), axis=0)
    earlier = (tiles > my_tiles) | ((tiles == my_tiles) & (each < seq))
    first = tl.sum(tl.where(earlier, parts, 0), axis=0)
    part = tl.arange(0, 2 * SEQS)
    item = (seq.to(tl.int64) << 40) | (my_tiles.to(tl.int64) << 24) | (part << 12) | my_parts
    tl.store(work_ptr + first + part, item, mask=part < my_parts)
    if seq == 0:  # the rest of the list
        rest = tl.sum(parts, axis=0) + part
        tl.store(work_ptr + rest, rest * 0, mask=rest < num_seqs + SHARES)


def work_list(context_lens: torch.Tensor, shares: int, keys: int) -> torch.Tensor:
    """context_lens [N] -> int64 [N + shares], the parts of contexts that there are to attend to, as
    `work_item` reads them: the longest first, those of one context side by side and in order, 0 for
    what is left of the list. The length of a part is a multiple of `keys`.

    Merging parts costs, so a context is cut only if the GPU would otherwise end up waiting for it:
    if it is longer than its fair share, 1 / `shares` of all that is to be read, or than two such
    shares while these are below LONG. That is the length of its parts. So there are never more than
    N + shares parts, `shares` of one context."""
    num_seqs = len(context_lens)
    work = torch.empty(num_seqs + shares, dtype=torch.int64, device=context_lens.device)
    # One size, so one compilation, for all batches of CUDA graphs.
    size = triton.next_power_of_2(max(num_seqs, shares, 512))
    _work_list_kernel[(num_seqs,)](
        context_lens, work, num_seqs, SHARES=shares, LONG=LONG, KEYS=keys, SEQS=size, num_warps=4
    )
    return work


@triton.jit
def work_item(work_ptr, item, KEYS: tl.constexpr):
    """An item of a `work_list`, in one load: (sequence, part, parts, positions of each); no parts
    if there is nothing to do."""
    packed = tl.load(work_ptr + item)
    seq, tiles = packed >> 40, ((packed >> 24) & 0xFFFF).to(tl.int32)
    return seq, ((packed >> 12) & 0xFFF).to(tl.int32), (packed & 0xFFF).to(tl.int32), tiles * KEYS


@triton.jit
def merged_parts(
    part_ptr,
    part_stats_ptr,
    first_part,
    num_parts,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Attention over a whole context, [GROUP_PADDED, DIM_PADDED], of which GROUP rows count, from
    that over its parts: of each the weighted sums of values [GROUP_PADDED, DIM_PADDED], and the
    maximum and the sum of the weights [2, GROUP_PADDED]. Several in one load, from L2 (.cg), where
    the other programs' stores are; no more than leave the kernel the registers that `tile_shape`
    counts on."""
    CHUNK: tl.constexpr = 32 // GROUP_PADDED if GROUP_PADDED < 32 else 1
    head = tl.arange(0, GROUP_PADDED)[None, :]
    dim = tl.arange(0, DIM_PADDED)[None, None, :]
    row_max = tl.full((GROUP_PADDED,), -1e30, tl.float32)
    row_sum = tl.zeros((GROUP_PADDED,), tl.float32)
    acc = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
    for start in tl.range(0, num_parts, CHUNK, num_stages=1):
        each = start + tl.arange(0, CHUNK)[:, None]
        there = (each < num_parts) & (head < GROUP)
        each += first_part
        at = part_stats_ptr + each * (2 * GROUP_PADDED) + head
        maxima = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(at + GROUP_PADDED, mask=there, other=0.0, cache_modifier=".cg")
        at = part_ptr + (each * GROUP_PADDED + head)[:, :, None] * DIM_PADDED + dim
        parts = tl.load(at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, tl.max(maxima, axis=0))
        alpha = tl.exp2(row_max - new_max)
        share = tl.exp2(maxima - new_max[None, :])
        row_sum = row_sum * alpha + tl.sum(sums * share, axis=0)
        acc = acc * alpha[:, None] + tl.sum(parts * share[:, :, None], axis=0)
        row_max = new_max
    return acc / row_sum[:, None]
