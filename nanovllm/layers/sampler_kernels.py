"""Triton kernels of the sampler: filter thresholds, and Gumbel argmax over the raw logits.

They compute what `sample_torch` in layers/sampler.py does, with the same noise, reading the
logits in the model's dtype without a sorted or a float copy. Needs triton to import.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers.sampler import NOISE_BLOCK, SamplingInputs

BLOCK = NOISE_BLOCK
PROGRAMS = 512  # of the second kernel, in all: about what fills a GPU


@triton.jit
def _sort_key(x):
    """float32 -> uint32 whose unsigned order is the order of the numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def _from_sort_key(key):
    bits = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, ~key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _row_max(logits_ptr, vocab_size, BLOCK: tl.constexpr):
    running = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        running = tl.maximum(running, x.to(tl.float32))
    return tl.max(running, axis=0)


@triton.jit
def _count_from(logits_ptr, vocab_size, key, BLOCK: tl.constexpr):
    """How many of the row's logits have at least this sort key."""
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        reaches = (_sort_key(x.to(tl.float32)) >= key) & (ids < vocab_size)
        count += reaches.to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _mass_from(logits_ptr, vocab_size, key, floor, best, temperature, BLOCK: tl.constexpr):
    """sum of exp((x - best) / temperature) over the row's logits x that have at least this sort key
    and reach `floor`."""
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        x = x.to(tl.float32)
        reaches = (_sort_key(x) >= key) & (x >= floor)
        mass += tl.where(reaches, tl.exp((x - best) / temperature), 0.0)
    return tl.sum(mass, axis=0)


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
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_MIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: the logit that a candidate must reach to pass min_p, top_k and top_p.

    The k-th largest logit is the largest t that at least k candidates reach; it is found bit by
    bit from the top, each bit with one pass over the row (which stays in L2). A bfloat16 logit
    has only 16 bits to find. top_p is the same search with probabilities instead of a count.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    temperature = tl.load(temperature_ptr + row)
    best = _row_max(logits_ptr, vocab_size, BLOCK)
    threshold = tl.full((), float("-inf"), tl.float32)
    if HAS_MIN:
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0:
            threshold = best + temperature * tl.log(min_p)
    if HAS_K:
        top_k = tl.load(top_k_ptr + row)
        if top_k < vocab_size:
            key = tl.zeros((), tl.uint32)
            bit = tl.full((), 0x80000000, tl.uint32)
            for _ in range(32 - LOWEST_BIT):
                if _count_from(logits_ptr, vocab_size, key | bit, BLOCK) >= top_k:
                    key = key | bit
                bit >>= 1
            threshold = tl.maximum(threshold, _from_sort_key(key))
    if HAS_P:
        top_p = tl.load(top_p_ptr + row)
        if (top_p < 1) & (temperature > 0):
            key = tl.zeros((), tl.uint32)
            mass = _mass_from(logits_ptr, vocab_size, key, threshold, best, temperature, BLOCK)
            wanted = tl.maximum(mass * top_p, 1e-30)  # a top_p that rounds to 0 keeps the best
            bit = tl.full((), 0x80000000, tl.uint32)
            for _ in range(32 - LOWEST_BIT):
                above = _mass_from(
                    logits_ptr, vocab_size, key | bit, threshold, best, temperature, BLOCK
                )
                if above >= wanted:
                    key = key | bit
                bit >>= 1
            threshold = tl.maximum(threshold, _from_sort_key(key))
    # Rounding in min_p's log must not leave out the best candidate itself.
    tl.store(threshold_ptr + row, tl.minimum(threshold, best))


@triton.jit
def _gumbel(bits):
    """32 random bits -> Gumbel noise, as `gumbel_noise` computes it."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    u = tl.minimum(u, 0.99999994)  # 1 - 2^-24
    # The hardware's log is poor near 1, so -log(1 - u) is a series where u is small.
    series = u * (1 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    return -tl.log(tl.where(u < 0.01, series, -tl.log(1 - u)))


@triton.jit(do_not_specialize=["num_splits"])  # compiled once for batches of any size
def _gumbel_argmax_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    threshold_ptr,
    value_ptr,
    index_ptr,
    vocab_size,
    num_splits,
    per_split,
    HAS_THRESHOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, split): the largest logit / T + noise of its part of the row, and where."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    logits_ptr += row * logits_stride
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0
    inverse = 1 / tl.maximum(temperature, 1e-20)  # x * inverse must stay finite
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row).to(tl.uint32)
    threshold = tl.full((), float("-inf"), tl.float32)
    if HAS_THRESHOLD:
        threshold = tl.load(threshold_ptr + row)
    quads = tl.arange(0, BLOCK // 4)
    # The best of each lane, over the blocks; reduced once at the end.
    best_value = tl.full((BLOCK // 4,), float("-inf"), tl.float32)
    best_index = quads * 0
    first = split * per_split
    for start in range(first, min(first + per_split, vocab_size), BLOCK):
        counter = (start // 4 + quads).to(tl.uint32)
        zero = counter * 0
        n0, n1, n2, n3 = tl.philox(seed, counter, zero + position, zero, zero)
        for j in tl.static_range(4):  # number j of call i is candidate j Q + i of the block
            ids = start + j * (BLOCK // 4) + quads
            x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
            x = x.to(tl.float32)
            number = n0 if j == 0 else n1 if j == 1 else n2 if j == 2 else n3
            value = tl.where(greedy, x, x * inverse + _gumbel(number))
            value = tl.where((x >= threshold) & (x > float("-inf")), value, float("-inf"))
            better = value > best_value  # strictly: of equal ones the first stays
            best_index = tl.where(better, ids, best_index)
            best_value = tl.where(better, value, best_value)
    top = tl.max(best_value, axis=0)
    # The lowest id among equal ones, as argmax takes.
    first_id = tl.min(tl.where(best_value == top, best_index, 0x7FFFFFFF), axis=0)
    tl.store(value_ptr + row * num_splits + split, top)
    tl.store(index_ptr + row * num_splits + split, first_id)


@triton.jit(do_not_specialize=["num_splits"])
def _pick_kernel(
    value_ptr,
    index_ptr,
    token_ptr,
    num_splits,
    next_id_ptr,
    context_len_ptr,
    ADVANCE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program per row: the best split's id. With ADVANCE it becomes the row's next input and
    the context grows by it; a row of context length 0 is padding and stays so."""
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    mask = split < num_splits
    values = tl.load(value_ptr + row * num_splits + split, mask=mask, other=float("-inf"))
    token = tl.load(index_ptr + row * num_splits + tl.argmax(values, axis=0))
    tl.store(token_ptr + row, token)
    if ADVANCE:
        tl.store(next_id_ptr + row, token)
        context_len = tl.load(context_len_ptr + row)
        tl.store(context_len_ptr + row, tl.where(context_len > 0, context_len + 1, 0))


def sample_triton(
    logits: torch.Tensor,
    inputs: SamplingInputs,
    advance: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """As `sample_torch`: logits [N, vocab], rows dense, -> int32 [N]. `advance`: (next input ids,
    context lengths), both int32 [N], to be moved on by one token."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    thresholds = filter_thresholds(logits, inputs)
    # Each program takes whole BLOCKs.
    most_splits = triton.cdiv(vocab_size, BLOCK)
    num_splits = min(triton.cdiv(PROGRAMS, num_rows), most_splits)
    per_split = triton.cdiv(triton.cdiv(vocab_size, num_splits), BLOCK) * BLOCK
    values = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_rows, num_splits, dtype=torch.int32, device=logits.device)
    _gumbel_argmax_kernel[(num_rows, num_splits)](
        logits,
        logits.stride(0),
        inputs.temperatures,
        inputs.seeds,
        inputs.positions,
        thresholds,
        values,
        indices,
        vocab_size,
        num_splits,
        per_split,
        HAS_THRESHOLD=thresholds is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    next_ids, context_lens = advance if advance is not None else (token_ids, token_ids)
    _pick_kernel[(num_rows,)](
        values,
        indices,
        token_ids,
        num_splits,
        next_ids,
        context_lens,
        ADVANCE=advance is not None,
        SPLITS=triton.next_power_of_2(most_splits),
        num_warps=1,
    )
    return token_ids


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
        HAS_K=inputs.top_k is not None,
        HAS_P=inputs.top_p is not None,
        HAS_MIN=inputs.min_p is not None,
        BLOCK=BLOCK,
        num_warps=16,
    )
    return thresholds
