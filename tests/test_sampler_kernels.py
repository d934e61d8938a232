"""The sampler's Triton kernels against the plain form: the same tokens. In Triton's interpreter,
with small vocabularies, where there is no GPU; test_gpu_sampler.py has the large ones."""

import pytest
import torch
from sampling import KERNEL_FILTERS, assert_same_draws, kernel_case, sampling_inputs

from nanovllm.layers import sampler
from nanovllm.layers.sampler import SamplingInputs, sample, sample_torch

kernels = pytest.importorskip("nanovllm.layers.sampler_kernels", reason="triton is not installed")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 candidates, so that a small vocabulary has many, in several splits. The order
    of the noise follows the size of the blocks, so the plain form needs the same."""
    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(sampler, "NOISE_BLOCK", 64)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("filters", KERNEL_FILTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (3, 64), (6, 200)])
def test_kernels_draw_what_the_plain_form_draws(
    num_rows: int, vocab_size: int, dtype: torch.dtype, filters: str, device: torch.device
) -> None:
    logits, inputs = kernel_case(num_rows, vocab_size, dtype, device, filters)
    expected = sample_torch(logits, inputs)
    assert_same_draws(kernels.sample_triton(logits, inputs), expected, logits, inputs)


def test_the_real_block_size(device: torch.device) -> None:
    """Just below, at, and above one block of candidates."""
    for vocab_size in (kernels.BLOCK - 1, kernels.BLOCK, kernels.BLOCK + 1):
        logits, inputs = kernel_case(3, vocab_size, torch.bfloat16, device, "all")
        expected = sample_torch(logits, inputs)
        assert_same_draws(kernels.sample_triton(logits, inputs), expected, logits, inputs)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("programs", [1, 5, 9])
def test_fewer_programs_than_blocks(
    programs: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Each program then takes several blocks of its row; some may be left without any."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    logits, inputs = kernel_case(3, 330, torch.float32, device, "none")
    expected = sample_torch(logits, inputs)
    assert_same_draws(kernels.sample_triton(logits, inputs), expected, logits, inputs)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_threshold_is_the_kth_largest_logit(dtype: torch.dtype, device: torch.device) -> None:
    """Of either sign, with equals, -0.0 and -inf: exactly what passes x >= threshold."""
    row = torch.tensor([-3.5, 2.0, -0.0, 0.0, -torch.inf, 2.0, 1e-30, -1e-30, 7e4, -7e4, 0.25])
    logits = row.to(device, dtype).expand(11, -1).contiguous()
    inputs = sampling_inputs(11, device, top_k=list(range(1, 12)))
    thresholds = kernels.filter_thresholds(logits, inputs)
    ordered = logits[0].float().sort(descending=True).values
    for i in range(11):
        kept = logits[i].float() >= thresholds[i]
        assert torch.equal(kept, logits[i].float() >= ordered[i]), i + 1


@pytest.mark.usefixtures("small_blocks")
def test_a_top_p_that_rounds_to_0_keeps_the_best(device: torch.device) -> None:
    """1e-50 is within the bounds, and 0 in float32: a share that even the empty set has."""
    logits = torch.randn(4, 100, device=device)
    inputs = sampling_inputs(4, device, top_p=1e-50)
    assert inputs.top_p.tolist() == [0] * 4
    assert torch.equal(kernels.sample_triton(logits, inputs), logits.argmax(-1))
    assert torch.equal(sample_torch(logits, inputs), logits.argmax(-1))


def test_nobody_filters_no_thresholds(device: torch.device) -> None:
    """What nobody asks for is not computed."""
    logits, inputs = kernel_case(2, 10, torch.float32, device, "none")
    assert kernels.filter_thresholds(logits, inputs) is None


@pytest.mark.usefixtures("small_blocks")
def test_noise_of_ones_leaves_the_only_candidate(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """u = (2^32 - 1 + 0.5) / 2^32 rounds to 1: it must not become noise of -inf."""
    if device.type == "cuda":
        pytest.skip("the interpreter's philox can be replaced, the compiled one cannot")
    ones = lambda seed, c0, *_: (c0 * 0 + 0xFFFFFFFF,) * 4  # noqa: E731
    monkeypatch.setattr(kernels.tl, "philox", ones)
    logits = torch.zeros(1, 100)
    logits[0, 70] = 1.0
    assert kernels.sample_triton(logits, sampling_inputs(1, "cpu", top_k=1)).tolist() == [70]


def test_sample_goes_to_the_kernels_on_a_gpu_only(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """And to plain argmax, without either, if all are greedy."""
    calls: list[SamplingInputs] = []
    kernel = kernels.sample_triton
    monkeypatch.setattr(
        kernels, "sample_triton", lambda *args: calls.append(args[1]) or kernel(*args)
    )
    logits, inputs = kernel_case(3, 100, torch.float32, device, "all")
    sample(logits, inputs)
    sample(logits, SamplingInputs())
    assert calls == ([inputs] if device.type == "cuda" else [])
