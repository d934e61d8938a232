"""GPU: the sampler's kernels on real vocabularies, and without waiting for it."""

import pytest
import torch
from sampling import (
    KERNEL_FILTERS,
    assert_frequencies,
    assert_same_draws,
    exact_probabilities,
    kernel_case,
    sampling_inputs,
)

from nanovllm.layers.sampler import sample, sample_torch

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def needs_triton() -> None:
    pytest.importorskip("nanovllm.layers.sampler_kernels", reason="triton is not installed")


@pytest.mark.parametrize("filters", KERNEL_FILTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 3, 17, 256])
@pytest.mark.parametrize("vocab_size", [151_936, 50_257, 4_097])
def test_kernels_draw_what_the_plain_form_draws(
    vocab_size: int, num_rows: int, dtype: torch.dtype, filters: str, device: torch.device
) -> None:
    """Qwen3's vocabulary and odd ones, fresh random logits for each case."""
    torch.manual_seed(vocab_size * 1000 + num_rows)
    logits, inputs = kernel_case(num_rows, vocab_size, dtype, device, filters)
    expected = sample_torch(logits, inputs)
    assert_same_draws(sample(logits, inputs), expected, logits, inputs)


@pytest.mark.parametrize("filters", ["none", "all"])
def test_the_sampler_never_waits_for_the_gpu(filters: str, device: torch.device) -> None:
    """torch raises where a call would synchronize."""
    logits, inputs = kernel_case(17, 151_936, torch.bfloat16, device, filters)
    expected = sample(logits, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sample(logits, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tokens, expected)


def test_equal_rows_draw_equally_in_any_batch(device: torch.device) -> None:
    """A row alone, and as one of 256: the split over programs differs, the token does not."""
    logits, inputs = kernel_case(256, 151_936, torch.bfloat16, device, "all")
    together = sample(logits, inputs)
    for row in (0, 1, 100, 255):
        fields = ("temperatures", "seeds", "positions", "top_k", "top_p", "min_p")
        alone = type(inputs)(*(getattr(inputs, name)[row : row + 1] for name in fields))
        assert sample(logits[row : row + 1], alone).item() == together[row].item(), row


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}],
    ids=str,
)
def test_frequencies(settings: dict[str, float], device: torch.device) -> None:
    """The kernels themselves, not only their agreement with the plain form: 20,000 draws."""
    logits = [2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, float("-inf")]
    rows = torch.tensor([logits], device=device).bfloat16().repeat(20_000, 1)
    tokens = sample(rows, sampling_inputs(20_000, device, 0.7, **settings))
    assert_frequencies(tokens, exact_probabilities(logits, 0.7, **settings))
