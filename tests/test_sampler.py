"""The sampler: argmax where it must be, the exact distribution where it may not be."""

import math

import pytest
import torch
from sampling import assert_frequencies, exact_probabilities, sampling_inputs

from nanovllm.layers import sampler
from nanovllm.layers.sampler import SamplingInputs, gumbel_noise, sample, top_logprobs

INF = float("inf")
DRAWS = 20_000
# A peak, a plateau of equals, a tail, and one that must never come.
LOGITS = [2.0, 1.5, 1.0, 0.5, 0.5, 0.5, 0.0, -0.5, -INF, 0.25, -1.0, -1.5]


def draw(
    logits: list[float], device: torch.device, count: int = DRAWS, **settings: object
) -> torch.Tensor:
    """`count` draws from one row of logits, each with its own seed."""
    rows = torch.tensor(logits, device=device).expand(count, -1)
    return sample(rows, sampling_inputs(count, device, **settings))


# --- argmax ---------------------------------------------------------------------------------------


def test_case_23_cold_and_greedy_rows_beside_a_warm_one(device: torch.device) -> None:
    """Temperatures 0, 0.7 and 1e-5 in one batch, -inf among the logits: rows 0 and 1e-5 are argmax
    in every draw, and a -inf token never comes."""
    logits = torch.tensor([[1.0, 3.0, -INF, 2.0], [0.5, -INF, 0.2, 0.1], [2.0, 1.0, -INF, 2.5]])
    inputs = sampling_inputs(1500, device, [0, 0.7, 1e-5])
    tokens = sample(logits.to(device).repeat(500, 1), inputs)
    assert not tokens.is_floating_point() and tokens.shape == (1500,)
    assert (tokens[0::3] == 1).all() and (tokens[2::3] == 3).all()
    assert set(tokens[1::3].tolist()) == {0, 2, 3}  # a real draw, without the -inf token


@pytest.mark.parametrize("scale", [1e4, -1e4, 1e8])
def test_case_23_logits_of_any_scale(scale: float, device: torch.device) -> None:
    """1e4 / 1e-5 = 1e9, and 1e8 / 1e-10 = 1e18: argmax, whatever the noise."""
    logits = torch.tensor([[0.1, 0.9, 0.3, 0.7, -INF]], device=device) * abs(scale)
    if scale < 0:
        logits -= 2 * abs(scale)  # far below zero altogether
    inputs = sampling_inputs(200, device, [0, 1e-5, 1e-10, 0.7])
    assert (sample(logits.expand(200, 5), inputs) == 1).all()


def test_case_23_the_plain_form_has_no_overflow_at_all() -> None:
    """1e30 / 1e-10 is beyond float32: argmax, not NaN's index."""
    logits = torch.tensor([[0.1, 0.9, 0.3, 0.7, -INF]]) * 1e30
    inputs = sampling_inputs(200, "cpu", [1e-10, 1e-40])
    assert (sampler.sample_torch(logits.expand(200, 5), inputs) == 1).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e-5, 1e-40, 1e30, 1e39])
def test_a_single_possible_token_is_always_taken(temperature: float, device: torch.device) -> None:
    """All other logits -inf: also at temperatures that are denormal, huge, or beyond float32."""
    logits = torch.full((64, 9), -INF, device=device)
    logits[:, 4] = -3.0
    assert (sample(logits, sampling_inputs(64, device, temperature)) == 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_temperatures_means_argmax(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randperm(240, device=device).view(8, 30).to(dtype)
    assert torch.equal(sample(logits, SamplingInputs()), logits.argmax(-1))
    assert torch.equal(sample(logits, sampling_inputs(8, device, 0.0)), logits.argmax(-1))


def test_filters_change_nothing_about_greedy_rows(device: torch.device) -> None:
    logits = torch.randn(50, 100, device=device)
    inputs = sampling_inputs(50, device, 0.0, top_k=[1, 100, 7], top_p=[0.1, 1], min_p=[0.9, 0])
    assert torch.equal(sample(logits, inputs), logits.argmax(-1))


# --- distributions --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float, device: torch.device) -> None:
    """Neither argmax nor a sampler that forgets the temperature passes."""
    tokens = draw(LOGITS, device, temperature=temperature)
    assert_frequencies(tokens, exact_probabilities(LOGITS, temperature))


FILTERS = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 11},
    {"top_k": 12},
    {"top_p": 0.05},
    {"top_p": 0.4},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.8},
    {"top_k": 2, "min_p": 0.2},
    {"top_p": 0.7, "min_p": 0.15},
    {"top_k": 8, "top_p": 0.85, "min_p": 0.12},
]


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies_with_filters(
    filters: dict[str, float], temperature: float, device: torch.device
) -> None:
    """Alone and together: min_p first, then top_k, then top_p of what is left, all after the
    temperature. Candidates that are left out never come."""
    tokens = draw(LOGITS, device, temperature=temperature, **filters)
    assert_frequencies(tokens, exact_probabilities(LOGITS, temperature, **filters))


def test_candidates_with_equal_logits_stay_or_go_together(device: torch.device) -> None:
    """top_k=4 reaches into the plateau of three: all three stay. So with top_p and min_p."""
    plateau = {3, 4, 5}
    for filters in ({"top_k": 4}, {"top_p": 0.7}):
        tokens = draw(LOGITS, device, temperature=1.0, **filters)
        assert set(tokens.tolist()) == {0, 1, 2} | plateau, filters
    # Nor does min_p leave out the best themselves, which need not come first.
    tokens = draw([1.0, 3.0, 2.9, 3.0, -1.0], device, temperature=0.7, min_p=1.0)
    assert set(tokens.tolist()) == {1, 3}


def test_each_row_of_a_batch_has_its_own_settings(device: torch.device) -> None:
    """Five kinds of rows alternate in one batch; each keeps its own distribution."""
    kinds = [
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.3, "min_p": 0.3},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ]
    columns = {
        name: [kind.get(name, off) for kind in kinds]
        for name, off in (("temperature", 1.0), ("top_k", 12), ("top_p", 1.0), ("min_p", 0.0))
    }
    tokens = draw(LOGITS, device, count=5 * DRAWS, **columns)
    for i, kind in enumerate(kinds):
        assert_frequencies(tokens[i::5], exact_probabilities(LOGITS, **kind))


def test_half_precision_logits_are_sampled_in_float32(device: torch.device) -> None:
    """bfloat16 noise would take too few values for the tails to come out right."""
    logits = torch.tensor([LOGITS], device=device).to(torch.bfloat16)
    tokens = sample(logits.expand(DRAWS, -1), sampling_inputs(DRAWS, device))
    assert_frequencies(tokens, exact_probabilities(LOGITS))


def test_rows_that_do_not_filter_lose_nothing_to_others_that_do(device: torch.device) -> None:
    """In float32 the shares of 60,000 candidates sum up to 1 before the last; a row with top_p=1
    must not lose its tail to that. The same draws in a batch without any filter."""
    logits = torch.randn(8, 60_000, device=device)
    off = {"top_k": 60_000, "top_p": 1.0, "min_p": 0.0}
    plain = sample(logits, sampling_inputs(8, device, 3.0))
    assert torch.equal(sample(logits, sampling_inputs(8, device, 3.0, **off)), plain)
    beside = {"top_k": [60_000, 1], "top_p": [1.0, 0.1], "min_p": [0.0, 0.9]}
    mixed = sample(logits, sampling_inputs(8, device, 3.0, **beside))
    assert torch.equal(mixed[0::2], plain[0::2]) and not torch.equal(mixed[1::2], plain[1::2])


def test_the_tail_survives_beside_a_row_with_top_p() -> None:
    """The rounding of the test above, made large: a tail of 1e-9 that has all the noise."""
    logits = torch.tensor([[0.0] + [-21.0] * 50] * 2)
    inputs = sampling_inputs(2, "cpu", top_p=[1.0, 0.5])
    kept = sampler._filtered(logits, inputs)
    assert torch.isfinite(kept[0]).all() and kept[1].isfinite().sum() == 1


# --- randomness -----------------------------------------------------------------------------------


def philox_by_the_book(counter: list[int], key: list[int], rounds: int) -> list[int]:
    """Philox 4x32 of Salmon et al. 2011, in Python's own integers."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_philox_is_the_published_one(device: torch.device) -> None:
    """First the formula against the known answers of its authors, for the customary 10 rounds and
    for our 7, then the tensors against it."""
    digits_of_pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    known = [
        (10, [0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, [2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, *digits_of_pi, "d16cfe09 94fdcceb 5001e420 24126ea1"),
        (7, [0] * 4, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, [2**32 - 1] * 4, [2**32 - 1] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, *digits_of_pi, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ]
    for rounds, counter, key, answer in known:
        words = philox_by_the_book(counter, key, rounds)
        assert " ".join(f"{word:08x}" for word in words) == answer
    seeds = [0, 1, 2**32, 2**63 - 1, -1, -(2**63), 0x299F31D0A4093822]
    positions = [0, 1, 4095, 40_960, 2**31, 5, 6]
    counters = [0, 1, 37_983]
    seed, position, counter = (
        torch.tensor(values, device=device) for values in (seeds, positions, counters)
    )
    words = sampler._philox(
        seed.unsqueeze(1), counter.expand(len(seeds), -1), position.unsqueeze(1)
    )
    for i, (s, p) in enumerate(zip(seeds, positions, strict=True)):
        key = [s % 2**32, (s % 2**64) >> 32]
        for j, c in enumerate(counters):
            assert words[i, j].tolist() == philox_by_the_book([c, p, 0, 0], key, 7)


def test_noise_depends_on_seed_position_and_candidate_alone(device: torch.device) -> None:
    """Not on the row, the batch, or the size of the vocabulary."""
    seeds = torch.tensor([5, 5, 6, 5], device=device)
    positions = torch.tensor([1, 2, 1, 1], device=device)
    noise = gumbel_noise(seeds, positions, 1001)
    assert noise.shape == (4, 1001) and noise.dtype == torch.float32
    assert torch.equal(noise[0], noise[3])
    assert torch.equal(gumbel_noise(seeds[2:3], positions[2:3], 37), noise[2:3, :37])
    different = torch.cat((noise[0], noise[1], noise[2]))
    assert len(different.unique()) > 0.999 * 3003


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_a_request_alone_draws_from_the_distribution(varied: str, device: torch.device) -> None:
    """One seed at 20,000 positions, as a long completion does; 20,000 seeds at one position."""
    numbers = torch.arange(DRAWS, device=device)
    fixed = torch.full_like(numbers, 12345)
    seeds, positions = (numbers, fixed) if varied == "seed" else (fixed, numbers)
    inputs = SamplingInputs(torch.ones(DRAWS, device=device), seeds, positions)
    tokens = sample(torch.tensor(LOGITS, device=device).expand(DRAWS, -1), inputs)
    assert_frequencies(tokens, exact_probabilities(LOGITS))


def test_consecutive_tokens_of_a_request_are_independent(device: torch.device) -> None:
    """Pairs of neighbours over four equal candidates: all 16 equally often."""
    positions = torch.arange(2 * DRAWS, device=device)
    seeds = torch.full_like(positions, 99)
    inputs = SamplingInputs(torch.ones(2 * DRAWS, device=device), seeds, positions)
    tokens = sample(torch.zeros(2 * DRAWS, 4, device=device), inputs)
    assert_frequencies(tokens[0::2] * 4 + tokens[1::2], [1 / 16] * 16)


def test_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 bits of ones round to u = 1, whose noise would be -inf: with top_k=1 the only candidate
    left could then lose to those that were filtered out."""
    for bits in (0, 2**32 - 1):
        monkeypatch.setattr(sampler, "_philox", lambda *_, bits=bits: torch.full((1, 11, 4), bits))
        noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), 11)
        assert noise.isfinite().all()
        u = (bits + 0.5) / 2**32 if bits == 0 else 1 - 2**-24
        assert noise[0, 0].item() == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-6)
        logits = torch.tensor([[0.0] * 6 + [3.0] + [0.0] * 4])
        assert sample(logits, sampling_inputs(1, "cpu", top_k=1)).tolist() == [6]


# --- what is left alone, banned, reported ---------------------------------------------------------


def test_logits_are_left_as_they_were(device: torch.device) -> None:
    """float32 logits are not copied on the way in, so nothing may be done in place."""
    logits = torch.randn(3, 10, device=device)
    before = logits.clone()
    inputs = sampling_inputs(3, device, [0, 0.7, 1.0], top_k=[3, 10], top_p=0.5, min_p=0.1)
    sample(logits, inputs)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_banned_candidates_never_come(temperature: float | None, device: torch.device) -> None:
    """In their own rows only; also where they are the best by far, and in an all-greedy batch."""
    logits = torch.zeros(300, 5, device=device)
    logits[:, 2] = 30.0
    banned = torch.tensor([[0, 0, 1], [2, 4, 4]], device=device)
    inputs = SamplingInputs() if temperature is None else sampling_inputs(300, device, temperature)
    inputs = SamplingInputs(inputs.temperatures, inputs.seeds, inputs.positions, banned=(*banned,))
    tokens = sample(logits, inputs).tolist()
    assert tokens[0] in (0, 1, 3) and tokens[1:] == [2] * 299


def test_top_logprobs_are_the_log_softmax(device: torch.device) -> None:
    """Best first; the chosen one is there even if it is not among the best; 0 is only that one."""
    logits = torch.randn(4, 50, device=device)
    logits[2, 7] = logits[2].max() + 1
    chosen = torch.tensor([49, 1, 7, 3], device=device)
    results = top_logprobs(logits, chosen, [3, 0, 2, 50])
    exact = logits.double().log_softmax(-1)
    for row, (result, count) in enumerate(zip(results, [3, 0, 2, 50], strict=True)):
        best = exact[row].topk(count).indices.tolist()
        assert list(result)[:count] == best
        assert set(result) == {*best, chosen[row].item()}
        for token_id, value in result.items():
            assert value == pytest.approx(exact[row, token_id].item(), abs=1e-5)
