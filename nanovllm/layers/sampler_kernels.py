"""Triton kernels of the sampler: Gumbel argmax over the raw logits.

They compute what `sample_torch` in layers/sampler.py does, with the same noise, reading the
logits in the model's dtype without a sorted or a float copy. (But for a temperature so small that
noise times it is lost beside the logits: of equal ones the lowest id is taken. And a NaN is no
candidate here, while in torch it makes NaN of the whole row.) Needs triton to import.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from nanovllm.layers import sampler
from nanovllm.layers.filter_kernels import LOG2_E, filter_thresholds
from nanovllm.layers.sampler import SamplingInputs

BLOCK = 2048  # candidates at a time
PROGRAMS = 1024  # of the first kernel, in all: about what fills a GPU
ROUNDS = tl.constexpr(sampler.PHILOX_ROUNDS)
UNIT = tl.constexpr(sampler.UNIT)


@triton.jit
def _philox(seed, counter, position):
    """counter [Q] -> four tensors [Q] of uint32, as `_philox` of layers/sampler.py computes them.
    `tl.philox` takes the halves of each product apart, at the price of two multiplications."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = counter.to(tl.uint32), position.to(tl.uint32)
    c2, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(ROUNDS):
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = b.to(tl.uint32), a.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _log2(x, ON_GPU: tl.constexpr):
    """One instruction on a GPU, where `tl.log2` is twenty. Its error is below 2^-22: absolute for x
    in (0.5, 2), relative elsewhere. Triton's interpreter does not know it."""
    if ON_GPU:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def _log2_exponential(bits, ON_GPU: tl.constexpr):
    """32 random bits -> log2(-log2(1 - u)), u = (bits + 0.5) * UNIT. The noise that `gumbel_noise`
    computes is -ln 2 times this, plus a constant that drops out of an argmax."""
    n = bits.to(tl.float32)
    exponential = -_log2(1 - n * UNIT, ON_GPU)
    # Where u < 2^-7 this is close to 0, and the error of `_log2` large beside it; there the series
    # log2(e) (u + u^2 / 2 + ...) will do. At the seam both are good to 2^-15.
    small = n * (n * (LOG2_E * 2.0**-65) + LOG2_E * 2.0**-32) + LOG2_E * 2.0**-33
    return _log2(tl.where(n < 2.0**25, small, exponential), ON_GPU)


@triton.jit
def _scores(
    logits_ptr, vocab_size, calls, seed, position, temperature, threshold, ON_GPU: tl.constexpr
):
    """logit + temperature * noise of the four candidates of each Philox call: calls [Q] -> [Q, 4].
    Said like this a temperature of 0 is greedy, and a tiny one makes nothing overflow."""
    ids = calls[:, None] * 4 + tl.arange(0, 4)[None, :]
    x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    if threshold is not None:
        x = tl.where(x >= threshold, x, float("-inf"))
    a, b, c, d = _philox(seed, calls, position)
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), ids.shape)  # a b c d of each call
    return x - temperature / LOG2_E * _log2_exponential(bits, ON_GPU)


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
    ON_GPU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, split): the largest score of its part of the row, and where. No thresholds:
    nobody filters."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    logits_ptr += row * logits_stride
    temperature = tl.minimum(tl.load(temperature_ptr + row), 1e30)  # temperature * noise is finite
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    threshold = None
    if threshold_ptr is not None:
        threshold = tl.load(threshold_ptr + row)
    lanes = tl.arange(0, BLOCK // 4)
    # The best score of each lane, and the first Philox call of the block it came from.
    best = tl.full((BLOCK // 4,), float("-inf"), tl.float32)
    best_block = lanes * 0
    first = split * per_split
    for start in range(first, min(first + per_split, vocab_size), BLOCK):
        block = start // 4
        scores = _scores(
            logits_ptr, vocab_size, block + lanes, seed, position, temperature, threshold, ON_GPU
        )
        score = tl.max(scores, axis=1)
        better = score > best  # of equal ones the first stays; NaN never is
        best_block = tl.where(better, block, best_block)
        best = tl.where(better, score, best)
    top = tl.max(best, axis=0)
    # Of equal ones the first call, and its first candidate: the lowest id, as argmax takes. Which
    # of the call's four it is costs least to find out by computing them again.
    call = tl.min(tl.where(best == top, best_block + lanes, 0x7FFFFFFF), axis=0)
    one = tl.arange(0, 1)
    scores = _scores(
        logits_ptr, vocab_size, call + one, seed, position, temperature, threshold, ON_GPU
    )
    scores = tl.where(scores > float("-inf"), scores, float("-inf"))  # NaN neither
    tl.store(value_ptr + row * num_splits + split, top)
    tl.store(index_ptr + row * num_splits + split + one, call * 4 + tl.argmax(scores, axis=1))


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
        ON_GPU=logits.is_cuda,
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
