"""The sampler: argmax where it must be, the exact softmax distribution where it may not be."""

import pytest
import torch

from nanovllm.layers.sampler import Sampler

INF = float("inf")
# 99.9 % quantiles of chi-square, by degrees of freedom.
CHI_SQUARE_999 = {5: 20.52, 7: 24.32}


def temperatures(*values: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def check_distribution(tokens: torch.Tensor, logits: torch.Tensor, temperature: float) -> None:
    """Pearson's chi-square of the tokens drawn against softmax(logits / temperature)."""
    expected = torch.softmax(logits.double().cpu() / temperature, dim=0) * len(tokens)
    counts = torch.bincount(tokens.cpu(), minlength=len(logits)).double()
    possible = expected > 0
    assert not counts[~possible].any()
    assert expected[possible].min() >= 5, "too few draws for the test to hold"
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    assert statistic < CHI_SQUARE_999[int(possible.sum()) - 1]


def test_case_23_cold_and_greedy_rows_beside_a_warm_one(device: torch.device) -> None:
    """Temperatures 0, 0.7 and 1e-5 in one batch, -inf among the logits: rows 0 and 1e-5 are argmax
    in every draw, and a -inf token never comes."""
    logits = torch.tensor([[1.0, 3.0, -INF, 2.0], [0.5, -INF, 0.2, 0.1], [2.0, 1.0, -INF, 2.5]])
    rows = temperatures(0, 0.7, 1e-5, device=device)
    tokens = Sampler()(logits.to(device).repeat(500, 1), rows.repeat(500))
    assert tokens.dtype is torch.int64 and tokens.shape == (1500,)
    assert (tokens[0::3] == 1).all() and (tokens[2::3] == 3).all()
    assert set(tokens[1::3].tolist()) == {0, 2, 3}  # a real draw, without the -inf token


@pytest.mark.parametrize("scale", [1e4, -1e4, 1e30])
def test_case_23_logits_of_any_scale(scale: float, device: torch.device) -> None:
    """1e4 / 1e-5 = 1e9, and 1e30 / 1e-10 overflows float32: still argmax, not NaN's index."""
    logits = torch.tensor([[0.1, 0.9, 0.3, 0.7, -INF]], device=device) * abs(scale)
    if scale < 0:
        logits -= 2 * abs(scale)  # far below zero altogether
    rows = temperatures(0, 1e-5, 1e-10, 0.7, device=device)
    assert (Sampler()(logits.expand(200, 5), rows.repeat(50)) == 1).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e-5, 1e-40, 1e30])
def test_a_single_possible_token_is_always_taken(temperature: float, device: torch.device) -> None:
    """All other logits -inf: also at temperatures that are denormal or huge."""
    logits = torch.full((64, 9), -INF, device=device)
    logits[:, 4] = -3.0
    tokens = Sampler()(logits, temperatures(*[temperature] * 64, device=device))
    assert (tokens == 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_temperatures_means_argmax(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randperm(240, device=device).view(8, 30).to(dtype)
    assert torch.equal(Sampler()(logits, None), logits.argmax(-1))
    assert torch.equal(Sampler()(logits, torch.zeros(8, device=device)), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float, device: torch.device) -> None:
    """20,000 draws; neither argmax nor a sampler that forgets the temperature passes."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -INF, 0.25, -1.0], device=device)
    rows = temperatures(temperature, device=device).expand(20_000)
    tokens = Sampler()(logits.expand(20_000, 9), rows)
    check_distribution(tokens, logits, temperature)


def test_each_row_of_a_batch_has_its_own_temperature(device: torch.device) -> None:
    """Rows 0.5 and 2.0 alternate, with greedy ones between them."""
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, 0.8, -1.0], device=device)
    rows = temperatures(0.5, 0, 2.0, device=device).repeat(10_000)
    tokens = Sampler()(logits.expand(30_000, 6), rows)
    check_distribution(tokens[0::3], logits, 0.5)
    check_distribution(tokens[2::3], logits, 2.0)
    assert not tokens[1::3].any()


def test_half_precision_logits_follow_the_same_law(device: torch.device) -> None:
    """As a bfloat16 model gives them."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5], device=device).to(torch.bfloat16)
    tokens = Sampler()(logits.expand(20_000, 6), torch.ones(20_000, device=device))
    check_distribution(tokens, logits, 1.0)


def test_logits_are_left_as_they_were(device: torch.device) -> None:
    """float32 logits are not copied on the way in, so nothing may be done in place."""
    logits = torch.randn(3, 10, device=device)
    before = logits.clone()
    Sampler()(logits, temperatures(0, 0.7, 1.0, device=device))
    assert torch.equal(logits, before)
