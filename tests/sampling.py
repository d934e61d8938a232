"""What the sampler's tests share: its inputs, exact probabilities, and a test of frequencies."""

import math
from typing import Any

import torch

from nanovllm.layers.sampler import SamplingInputs, gumbel_noise


def sampling_inputs(
    num_rows: int,
    device: torch.device | str = "cpu",
    temperature: float | list[float] = 1.0,
    first_seed: int = 0,
    position: int = 7,
    **filters: Any,
) -> SamplingInputs:
    """Inputs for rows with the seeds first_seed, first_seed + 1, ...; temperature and the filters
    (top_k, top_p, min_p) are one number for all rows, or a list that is repeated over them."""

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        values = value if isinstance(value, list) else [value]
        return torch.tensor([values[i % len(values)] for i in range(num_rows)], dtype=dtype).to(
            device
        )

    dtypes = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    return SamplingInputs(
        temperatures=column(temperature, torch.float32),
        seeds=torch.arange(first_seed, first_seed + num_rows, device=device),
        positions=column(position, torch.int64),
        **{name: column(value, dtypes[name]) for name, value in filters.items()},
    )


def exact_probabilities(
    logits: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """What the definitions of the fields of SamplingParams say, in float64, one candidate after the
    other: temperature, min_p, top_k, top_p."""
    best = max(logits)
    weights = [math.exp((x - best) / temperature) for x in logits]
    weights = [w if w >= min_p else 0.0 for w in weights]
    if top_k > 0:
        kth = sorted(weights, reverse=True)[min(top_k, len(weights)) - 1]
        weights = [w if w >= kth else 0.0 for w in weights]
    wanted, share = top_p * sum(weights), 0.0
    for least in sorted(weights, reverse=True):
        share += least
        if share >= wanted:
            break
    weights = [w if w >= least else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def assert_frequencies(tokens: torch.Tensor, probabilities: list[float]) -> None:
    """Pearson's chi-square of the drawn ids against `probabilities`, at the 99.9 % level; what has
    probability 0 never comes."""
    counts = torch.bincount(tokens.cpu(), minlength=len(probabilities)).tolist()
    expected = [p * len(tokens) for p in probabilities]
    assert not any(count for count, e in zip(counts, expected, strict=True) if e == 0)
    possible = [(count, e) for count, e in zip(counts, expected, strict=True) if e > 0]
    assert min(e for _, e in possible) >= 5, "too few draws for the test to hold"
    statistic = sum((count - e) ** 2 / e for count, e in possible)
    limit = chi_square_999(len(possible) - 1)
    assert statistic < limit, f"{statistic:.1f} is not below {limit:.1f}: {counts} for {expected}"


def chi_square_999(degrees: int) -> float:
    """The 99.9 % quantile of chi-square (Wilson and Hilferty's approximation, good to 2 %)."""
    if degrees == 0:
        return 1e-9
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3


def assert_same_draws(
    tokens: torch.Tensor, expected: torch.Tensor, logits: torch.Tensor, inputs: SamplingInputs
) -> None:
    """Equal tokens; on a GPU, whose logarithm is rounded otherwise, a row in a hundred may have
    another one if the two are within 1e-3 of each other after the noise."""
    assert tokens.dtype == torch.int32 and tokens.shape == expected.shape
    differing = (tokens != expected).nonzero().flatten()
    if not logits.is_cuda:
        assert not len(differing)
    assert len(differing) <= max(len(tokens) // 100, 1)
    temperatures = inputs.temperatures.masked_fill(inputs.temperatures == 0, 1.0).unsqueeze(1)
    noise = gumbel_noise(inputs.seeds, inputs.positions, logits.shape[1])
    for row in differing.tolist():
        score = logits[row].float() / temperatures[row] + noise[row]
        assert inputs.temperatures[row] > 0
        assert abs(score[tokens[row]] - score[expected[row]]) < 1e-3, row


# Filter settings of a batch for the kernels: each alone, all, and none; rows that use them beside
# rows that do not. top_k is cut to the vocabulary.
KERNEL_FILTERS: dict[str, dict[str, list[float]]] = {
    "none": {},
    "top_k": {"top_k": [1, 5, 50, 2**30]},
    "top_p": {"top_p": [0.9, 0.5, 1.0, 0.01, 1e-50]},
    "min_p": {"min_p": [0.1, 0.0, 0.02, 1.0]},
    "all": {"top_k": [40, 2**30, 3], "top_p": [0.95, 0.8, 1.0, 0.3], "min_p": [0.001, 0.0]},
}


def kernel_case(
    num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device, filters: str
) -> tuple[torch.Tensor, SamplingInputs]:
    """(logits, inputs) of a mixed batch: several temperatures, greedy among them, some -inf logits;
    the rows are a part of a wider tensor, as where a padded vocabulary was cut off."""
    wide = torch.randn(num_rows, vocab_size + 3, device=device) * 4
    wide[:, ::7] = -torch.inf
    wide[:, vocab_size // 2] = 1.0  # never all -inf
    settings = {k: list(v) for k, v in KERNEL_FILTERS[filters].items()}
    if "top_k" in settings:
        settings["top_k"] = [min(k, vocab_size) for k in settings["top_k"]]
    inputs = sampling_inputs(
        num_rows, device, [1.0, 0.6, 0.0, 1.5, 1e-5], first_seed=2**40 - 5, **settings
    )
    return wide.to(dtype)[:, :vocab_size], inputs
