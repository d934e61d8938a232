"""Triton kernel of the sampler's filters: the least logit that passes min_p, top_k and top_p.

It finds what `_filtered` in layers/sampler.py finds by sorting. Needs triton to import.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers.sampler import SamplingInputs

BLOCK = 8192  # candidates at a time
GROUP = tl.constexpr(32)  # of a block's places; the largest logits of the groups bound top_k's
PIVOTS = tl.constexpr(4)  # logits that one pass over a row compares with
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sort_key(x):
    """float32 -> uint32 whose unsigned order is the order of the numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    # Not ~bits, at which Triton 3.7 and 3.8's interpreter fails.
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _from_sort_key(key):
    bits = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(logits_ptr, start, vocab_size, BLOCK: tl.constexpr):
    """[1, BLOCK] float32, -inf beyond the vocabulary."""
    ids = start + tl.arange(0, BLOCK)[None, :]
    return tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(logits_ptr, vocab_size, pivots, best, scale, BLOCK: tl.constexpr):
    """pivots [P, 1] -> [P]: what the row's logits x that reach each of them weigh together. Each
    weighs 2^((x - best) * scale), or 1 where scale is None."""
    totals = tl.zeros((pivots.shape[0], BLOCK), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        x = _load(logits_ptr, start, vocab_size, BLOCK)
        reaches = tl.where(x >= pivots, 1.0, 0.0)
        if scale is None:
            totals += reaches
        else:
            totals += reaches * tl.exp2((x - best) * scale)
    return tl.sum(totals, axis=1)


@triton.jit
def _largest_reached(
    logits_ptr,
    vocab_size,
    lowest,
    best,
    wanted,
    scale,
    LOWEST_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest t of which the logits >= t weigh at least `wanted`; `lowest`, if none above it.

    It is the sort key that is looked for. Each pass over the row (which stays in L2, if there are
    not too many) leaves the part of the range between two of the pivots.
    """
    start = _sort_key(lowest) >> LOWEST_BIT
    low = start
    end = (_sort_key(best) >> LOWEST_BIT) + 1
    steps = 1 + tl.arange(0, PIVOTS).to(tl.uint32)[:, None]
    while low + 1 < end:
        step = tl.cdiv(end - low, PIVOTS + 1)
        pivots = _from_sort_key((low + step * steps) << LOWEST_BIT)
        weights = _weights(logits_ptr, vocab_size, pivots, best, scale, BLOCK)
        low += step * tl.sum((weights >= wanted).to(tl.uint32), axis=0)
        end = tl.minimum(end, low + step)
    return tl.where(low == start, lowest, _from_sort_key(low << LOWEST_BIT))


@triton.jit
def _threshold_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    threshold_ptr,
    vocab_size,
    LOWEST_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row. A filter that nobody uses is None; greedy rows need none."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    temperature = tl.load(temperature_ptr + row)
    threshold = tl.full((), float("-inf"), tl.float32)
    if temperature == 0:
        tl.store(threshold_ptr + row, threshold)
        return
    temperature = tl.minimum(tl.maximum(temperature, 1e-30), 1e30)  # 0 * inf must not come
    bests = tl.full((1, BLOCK), float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        bests = tl.maximum(bests, _load(logits_ptr, start, vocab_size, BLOCK))
    best = tl.max(bests)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0:
            threshold = best + temperature * tl.log(min_p)
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + row)
        if top_k < vocab_size:
            lowest = threshold
            groups = tl.max(tl.reshape(bests, (BLOCK // GROUP, GROUP)), axis=1)
            if top_k <= BLOCK // GROUP:  # in each group at least one candidate reaches this
                lowest = tl.maximum(lowest, tl.min(groups, axis=0))
            threshold = _largest_reached(
                logits_ptr, vocab_size, lowest, best, top_k, None, LOWEST_BIT, BLOCK
            )
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1:
            scale = LOG2_E / temperature
            pivot = threshold + tl.zeros((1, 1), tl.float32)
            total = tl.sum(_weights(logits_ptr, vocab_size, pivot, best, scale, BLOCK), axis=0)
            wanted = tl.maximum(total * top_p, 1e-30)  # a top_p that rounds to 0 keeps the best
            # The best one weighs 1. Those below this weigh less than 1 - top_p, however many.
            lowest = tl.maximum(threshold, best + temperature * tl.log((1 - top_p) / vocab_size))
            threshold = _largest_reached(
                logits_ptr, vocab_size, lowest, best, wanted, scale, LOWEST_BIT, BLOCK
            )
    tl.store(threshold_ptr + row, threshold)


def filter_thresholds(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor | None:
    """[N] float32, the least logit that passes min_p, top_k and top_p; None if nobody uses them."""
    if inputs.top_k is None and inputs.top_p is None and inputs.min_p is None:
        return None
    thresholds = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _threshold_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        inputs.temperatures,
        inputs.top_k,
        inputs.top_p,
        inputs.min_p,
        thresholds,
        logits.shape[1],
        LOWEST_BIT=16 if logits.dtype == torch.bfloat16 else 0,
        BLOCK=BLOCK,
        num_warps=32,
    )
    return thresholds
