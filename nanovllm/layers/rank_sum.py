"""Decode on several GPUs: the sum over the ranks, the residual's addition and RMSNorm, one Triton
kernel that reads the other GPUs' memory. Needs triton to import.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers.pdl import pdl_launch, pdl_options, pdl_wait
from nanovllm.utils.parallel import Summand

SPINS = 2048  # looks at a signal between two at whether a rank is lost: a millisecond


@triton.jit
def _address(addresses_ptr, rank, offset, dtype: tl.constexpr):
    """Of what lies `offset` bytes, a multiple of 16, into a rank's memory."""
    there = (tl.load(addresses_ptr + rank) + offset).to(tl.pointer_type(dtype))
    return tl.multiple_of(there, 16)


@triton.jit
def _sum_add_rms_norm_kernel(
    addresses_ptr,
    offset,
    epoch_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    SPINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row. It waits for those of the same row on the other ranks, which is safe:
    programs start in order, so the first unfinished row has started everywhere."""
    cols = tl.arange(0, BLOCK)
    mask = cols < SIZE
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    row = tl.program_id(0)
    at = row.to(tl.int64) * SIZE + cols
    pdl_launch(PDL)
    pdl_wait(PDL)
    epoch = tl.load(epoch_ptr + row) + 1
    for i in tl.static_range(RANKS):  # here is mine: all of it was written by kernels before
        if i != RANK:
            signals = _address(addresses_ptr, i, 0, tl.int32)
            tl.atomic_xchg(signals + row * RANKS + RANK, epoch, sem="release", scope="sys")
    if HAS_RESIDUAL:
        total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
    signals = _address(addresses_ptr, RANK, 0, tl.int32) + row * RANKS
    is_lost_ptr = _address(addresses_ptr, RANKS, 0, tl.int32)
    for i in tl.static_range(RANKS):
        if i != RANK:
            spins, waits = 0, True
            while waits:
                come = tl.atomic_add(signals + i, 0, sem="acquire", scope="sys")
                waits = come - epoch < 0  # the difference: numbers wrap around
                spins += 1
                if spins % SPINS == 0:  # seldom: it is the host's memory
                    waits = waits and tl.load(is_lost_ptr, volatile=True) == 0
    tl.debug_barrier()  # what one thread has seen, all have
    x = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(RANKS):  # in this order on every rank: they must not drift apart
        part = _address(addresses_ptr, i, offset, out_ptr.dtype.element_ty)
        x += tl.load(part + at, mask=mask, other=0.0, volatile=True).to(tl.float32)
    rounded = (total + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + at, rounded, mask=mask)
    x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(epoch_ptr + row, epoch)


def sum_add_rms_norm(
    summand: Summand, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual) for x [T, size], the sum of all ranks' summands. Every
    rank calls it, with the same shapes. The new residual overwrites the old one, if there was
    one."""
    x, offset, memory = summand
    num_rows, size = x.shape
    out = torch.empty_like(x)
    has_residual = residual is not None
    if residual is None:
        residual = torch.empty_like(x)
    _sum_add_rms_norm_kernel[(num_rows,)](
        memory.addresses,
        offset,
        memory.epochs,
        residual,
        weight,
        out,
        eps,
        RANK=memory.rank,
        RANKS=memory.size,
        SIZE=size,
        HAS_RESIDUAL=has_residual,
        BLOCK=triton.next_power_of_2(size),
        SPINS=SPINS,
        num_warps=4 if size <= 2048 else 8,
        **pdl_options(x),
    )
    return out, residual
