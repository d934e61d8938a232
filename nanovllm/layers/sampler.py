"""Sampler: logits of each request's last position -> one token id each.

Sampling is the Gumbel-max trick: argmax(logits / T + Gumbel noise) is a draw from
softmax(logits / T) (Gumbel 1954), with no softmax, no cumulative sum and no sync with the host.
The noise is not drawn from a stream: it is a function (Philox 4x32-7, Salmon et al. 2011) of the
request's seed, the position of the token and the candidate id. So a request's randomness does not
depend on its row, its batch, or how it was chunked or preempted. `sample_torch` runs anywhere and
is the reference; layers/sampler_kernels.py computes the same in Triton kernels.
"""

from dataclasses import dataclass

import torch

from nanovllm.layers import kernels

PHILOX_ROUNDS = 7  # the fewest that pass BigCrush by that paper; 10 are customary
# 32 random bits -> (0, 1). An ulp below 2^-32: bits that float32 rounds to 2^32 would become 1, and
# the noise -inf. It would leave a candidate without rivals (top_k=1) no larger than those that were
# filtered out.
UNIT = 2.0**-32 - 2.0**-56
MAX_TEMPERATURE = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """What the N rows of a step ask for; a None costs nothing. Tensors [N] on the device.

    Filled by engine/inputs.py, or once and for all where a CUDA graph is recorded.
    """

    temperatures: torch.Tensor | None = None  # float32, 0: greedy row; None: all rows are
    seeds: torch.Tensor | None = None  # int64
    positions: torch.Tensor | None = None  # integers, where in its request the new token will stand
    top_k: torch.Tensor | None = None  # int32, vocab_size: off
    top_p: torch.Tensor | None = None  # float32, 1: off
    min_p: torch.Tensor | None = None  # float32, 0: off
    # (rows, ids), int64: candidates that must not be chosen (min_tokens).
    banned: tuple[torch.Tensor, torch.Tensor] | None = None


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """logits [N, vocab] -> integers [N]. A -inf logit is never chosen. Writes -inf to the banned
    candidates' logits."""
    if inputs.banned is not None:
        logits[inputs.banned] = -torch.inf
    if inputs.temperatures is None:
        return logits.argmax(dim=-1)
    if kernels.usable(logits):
        from nanovllm.layers.sampler_kernels import sample_triton

        return sample_triton(logits, inputs)
    return sample_torch(logits, inputs)


def sample_torch(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """The sampler in plain torch; `inputs.temperatures` must be there."""
    logits = logits.float()
    greedy = (inputs.temperatures == 0).unsqueeze(1)
    # With the maximum subtracted first, a tiny temperature sends the others to -inf instead of
    # overflowing the maximum to +inf. A huge one is kept finite: -inf / inf would be NaN.
    best = logits.max(dim=-1, keepdim=True).values
    temperatures = inputs.temperatures.masked_fill(inputs.temperatures == 0, 1.0)
    scaled = (logits - best) / temperatures.clamp_max(MAX_TEMPERATURE).unsqueeze(1)
    scaled = _filtered(scaled, inputs)
    noise = gumbel_noise(inputs.seeds, inputs.positions, logits.shape[1])
    return (scaled + noise.masked_fill(greedy, 0.0)).argmax(dim=-1)


def _filtered(scaled: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Send what min_p, top_k and top_p leave out to -inf. All three keep what reaches a threshold,
    so equal logits stay or go together. scaled [N, vocab], its row maxima 0."""
    if inputs.min_p is not None:
        out = scaled < inputs.min_p.log().unsqueeze(1)  # log 0 = -inf leaves nothing out
        scaled = scaled.masked_fill(out, -torch.inf)
    if inputs.top_k is None and inputs.top_p is None:
        return scaled
    ordered = scaled.sort(dim=-1, descending=True).values
    if inputs.top_k is not None:
        kth = ordered.gather(1, inputs.top_k.long().unsqueeze(1) - 1)
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
        ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    if inputs.top_p is not None:
        share = ordered.softmax(dim=-1).cumsum(dim=-1)
        # The first index whose share reaches top_p; rounding may keep the sum below 1.
        reached = (share < inputs.top_p.unsqueeze(1)).sum(dim=-1, keepdim=True)
        threshold = ordered.gather(1, reached.clamp_max(ordered.shape[1] - 1))
        # A row that does not use top_p must lose nothing to rounding either.
        out = (scaled < threshold) & (inputs.top_p < 1).unsqueeze(1)
        scaled = scaled.masked_fill(out, -torch.inf)
    return scaled


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise [N, vocab_size] float32 for seeds and positions [N] int64."""
    # One Philox call gives four 32-bit numbers, for four candidates in a row.
    counter = torch.arange(-(-vocab_size // 4), device=seeds.device)
    bits = _philox(
        seeds.unsqueeze(1), counter.expand(len(seeds), -1), positions.long().unsqueeze(1)
    )
    bits = bits.flatten(1)[:, :vocab_size]
    uniform = (bits.float() + 0.5) * UNIT
    # -log1p(-u) is an exponential variate with full precision near 0, where the largest noise
    # comes from.
    return -torch.log(-torch.log1p(-uniform))


def _philox(seed: torch.Tensor, counter: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Philox 4x32 with key `seed` (64 bits) and counter (counter, position, 0, 0), all int64
    and broadcastable to [N, C] -> [N, C, 4] in [0, 2^32). The products wrap modulo 2^64, whose
    upper and lower halves are still right."""
    low = 0xFFFFFFFF
    c0, c1 = counter & low, (position & low).expand_as(counter)
    c2 = c3 = torch.zeros_like(counter)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(PHILOX_ROUNDS):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((b >> 32) & low) ^ c1 ^ k0,
            b & low,
            ((a >> 32) & low) ^ c3 ^ k1,
            a & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack((c0, c1, c2, c3), dim=-1)


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: list[int]
) -> list[dict[int, float]]:
    """For each row {id: log-probability} of the counts[i] best ids, best first, and of the chosen
    one. logits [N, vocab], token_ids [N] the chosen ids."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
    best = logprobs.topk(min(max(counts), logits.shape[1]), dim=-1)
    columns = [column.tolist() for column in (best.indices, best.values, token_ids, chosen)]
    results = []
    for ids, values, own_id, own_value, count in zip(*columns, counts, strict=True):
        result = dict(zip(ids[:count], values[:count], strict=True))
        result.setdefault(own_id, own_value)
        results.append(result)
    return results
