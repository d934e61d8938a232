"""The sampler's Triton kernels against the plain form: the same tokens. In Triton's interpreter,
with small vocabularies, where there is no GPU; test_gpu_sampler.py has the large ones."""

import math

import pytest
import torch
from sampling import KERNEL_FILTERS, assert_same_draws, kernel_case, sampling_inputs

from nanovllm.layers import sampler
from nanovllm.layers.sampler import SamplingInputs, sample, sample_torch

kernels = pytest.importorskip("nanovllm.layers.sampler_kernels", reason="triton is not installed")
pdl = pytest.importorskip("nanovllm.layers.pdl")
filter_kernels = pytest.importorskip("nanovllm.layers.filter_kernels")
triton, tl = kernels.triton, kernels.tl

# HAS_PDL: from Triton 3.5 on.
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not pdl.HAS_PDL,
    reason="Triton's interpreter before 3.5 takes NaN for the largest number, and 3.2's crashes",
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 candidates, so that a small vocabulary has many, in several splits."""
    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(filter_kernels, "BLOCK", 64)


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
@pytest.mark.parametrize("programs", [1, 50])
def test_of_equal_logits_greedy_takes_the_first(
    programs: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """All from some id on are equal: within a Philox call, a block, a program, and beyond."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    firsts = torch.tensor([0, 1, 3, 4, 62, 63, 64, 65, 130, 255, 256, 327, 328, 329], device=device)
    logits = (torch.arange(330, device=device) >= firsts.unsqueeze(1)).float()
    tokens = kernels.sample_triton(logits, sampling_inputs(len(firsts), device, 0.0))
    assert tokens.tolist() == firsts.tolist()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
def test_nan_is_no_candidate(device: torch.device) -> None:
    """A graph's padding rows may be all NaN: an id comes out that there is."""
    logits = torch.full((3, 150), torch.nan, device=device)
    logits[1:, 77] = -5.0
    tokens = kernels.sample_triton(logits, sampling_inputs(3, device, [1.0, 0.0, 1.0]))
    assert tokens.tolist() == [0, 77, 77]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_threshold_is_the_kth_largest_logit(dtype: torch.dtype, device: torch.device) -> None:
    """Of either sign, with equals, -0.0 and -inf: exactly what passes x >= threshold."""
    row = torch.tensor([-3.5, 2.0, -0.0, 0.0, -torch.inf, 2.0, 1e-30, -1e-30, 7e4, -7e4, 0.25])
    logits = row.to(device, dtype).expand(11, -1).contiguous()
    inputs = sampling_inputs(11, device, top_k=list(range(1, 12)))
    thresholds = filter_kernels.filter_thresholds(logits, inputs)
    ordered = logits[0].float().sort(descending=True).values
    for i in range(11):
        kept = logits[i].float() >= thresholds[i]
        assert torch.equal(kept, logits[i].float() >= ordered[i]), i + 1


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-40, 0.7, 1e39])
def test_the_threshold_keeps_what_sorting_keeps(
    temperature: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Random logits, with -inf among them, and neighbours in their dtype, of either sign."""
    spread = (torch.randn(10, 200) * 4).to(dtype)
    spread[:, ::7] = -torch.inf
    number = torch.int32 if dtype == torch.float32 else torch.int16
    steps = (torch.arange(5 * 200) // 40).to(number).view(5, 200)
    neighbours = (torch.ones(1, dtype=dtype).view(number) + steps).view(dtype)
    logits = torch.cat((spread, neighbours, -neighbours))[:, torch.randperm(200)].to(device)
    filters = {
        "top_k": [1, 2, 3, 20, 200],
        "top_p": [1.0, 0.99, 0.3],
        "min_p": [0.0, 0.0, 0.05, 0.0, 0.0, 0.0, 1.0],
    }
    inputs = sampling_inputs(20, device, temperature, **filters)
    kept = logits.float() >= filter_kernels.filter_thresholds(logits, inputs).unsqueeze(1)
    scaled = logits.float() - logits.float().amax(1, keepdim=True)
    scaled = scaled / inputs.temperatures.clamp(1e-30, 1e30).unsqueeze(1)
    expected = sampler._filtered(scaled, inputs).isfinite()
    assert torch.equal(kept & logits.isfinite(), expected)


@pytest.mark.usefixtures("small_blocks")
def test_min_p_between_two_neighbours(device: torch.device) -> None:
    """Its bound is no bfloat16 number: the search for top_k's must not round it down to one."""
    logits = torch.tensor([[1.0, 1 - 2**-8, -torch.inf]], device=device).bfloat16()
    inputs = sampling_inputs(1, device, min_p=math.exp(-(2**-9)), top_k=2)
    threshold = filter_kernels.filter_thresholds(logits, inputs).item()
    assert 1 - 2**-8 < threshold <= 1


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
    assert filter_kernels.filter_thresholds(logits, inputs) is None


@pytest.mark.usefixtures("small_blocks")
def test_noise_of_ones_leaves_the_only_candidate(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """u = (2^32 - 1 + 0.5) / 2^32 rounds to 1: it must not become noise of -inf."""
    if device.type == "cuda":
        pytest.skip("the interpreted function can be replaced, the compiled one cannot")
    ones = lambda seed, counter, _: (counter.to(tl.uint32) * 0 + 0xFFFFFFFF,) * 4  # noqa: E731
    monkeypatch.setattr(kernels, "_philox", ones)
    logits = torch.zeros(1, 100)
    logits[0, 70] = 1.0
    assert kernels.sample_triton(logits, sampling_inputs(1, "cpu", top_k=1)).tolist() == [70]


@triton.jit
def noise_kernel(bits_ptr, noise_ptr, COUNT: tl.constexpr, ON_GPU: tl.constexpr):
    i = tl.arange(0, COUNT)
    bits = tl.load(bits_ptr + i).to(tl.uint32)
    tl.store(noise_ptr + i, kernels._log2_exponential(bits, ON_GPU))


def test_the_noise_is_precise_for_all_bits(device: torch.device) -> None:
    """Next to float64: at both ends, at the seam of the two formulas, and all over the range."""
    powers = [2**i + d for i in range(1, 32) for d in (-1, 0, 1)]
    ends = [0, 2, 2**25 - 3, 2**25 + 2, 2**25 + 4, 2**31 + 2**30, *range(2**32 - 9, 2**32)]
    bits = torch.tensor([*powers, *ends, *torch.randint(2**32, (1024,)).tolist()][:1024])
    noise = torch.empty(1024, device=device)
    noise_kernel[(1,)](bits.to(device), noise, COUNT=1024, ON_GPU=device.type == "cuda")
    noise = -math.log(2) * (noise.cpu().double() + math.log2(math.log(2)))
    exact = -torch.log(-torch.log1p(-(bits.float().double() + 0.5) * sampler.UNIT))
    assert (noise - exact).abs().max() < 2e-4


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
