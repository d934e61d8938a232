"""The fused kernels against what they replace, in plain torch and float64 or float32, on random
numbers of odd sizes. In Triton's interpreter where there is no GPU. What a kernel may not read is
NaN around its inputs, and fresh memory is NaN too."""

import pytest
import torch
from numerics import BF16, F16, F32, assert_close, surrounded

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding

module = pytest.importorskip("nanovllm.layers.fused_kernels", reason="triton is not installed")

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.usefixtures("poisoned"), *([pytest.mark.gpu] if ON_GPU else [])]

EPS = 1e-6
ROWS = [1, 3, 17, 256] if ON_GPU else [1, 3, 17]

dtypes = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)


# --- add + RMSNorm --------------------------------------------------------------------------------


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@dtypes
@pytest.mark.parametrize("size", [1, 100, 1024, 2500])
def test_add_rms_norm(size: int, dtype: torch.dtype, device: torch.device) -> None:
    """The sum overwrites the residual, and is normalized as it was rounded there."""
    for rows in ROWS:
        x, residual = (surrounded(torch.randn(rows, size), device, dtype) for _ in range(2))
        weight = surrounded(torch.rand(size) + 0.5, device, dtype)
        x_before, total = x.clone(), x.double() + residual.double()
        out, new = module.add_rms_norm(x, residual, weight, EPS)
        assert new is residual and out.dtype == dtype
        assert_close(new, total, "product")
        assert_close(out, exact_norm(new, weight), "product")
        assert torch.equal(x, x_before)


@dtypes
def test_rms_norm_without_a_residual(dtype: torch.dtype, device: torch.device) -> None:
    """The first layer's: x itself is the residual, and stays as it is."""
    x = surrounded(torch.randn(5, 100), device, dtype)
    weight = surrounded(torch.rand(100) + 0.5, device, dtype)
    before = x.clone()
    out, residual = module.add_rms_norm(x, None, weight, EPS)
    assert residual is x and torch.equal(x, before)
    assert_close(out, exact_norm(x, weight), "product")


@dtypes
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_add_rms_norm_of_summands(
    parts: int, with_residual: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Float32 parts of a product that was split: their sum is what is added."""
    for rows in ROWS:
        x = surrounded(torch.randn(parts, rows, 100), device, F32)
        residual = surrounded(torch.randn(rows, 100), device, dtype) if with_residual else None
        weight = surrounded(torch.rand(100) + 0.5, device, dtype)
        total = x.double().sum(0) + (residual.double() if with_residual else 0)
        out, new = module.add_rms_norm(x, residual, weight, EPS)
        assert new.dtype == out.dtype == dtype
        assert new is residual or not with_residual
        assert_close(new, total, "product")
        assert_close(out, exact_norm(new, weight), "product")


def test_add_rms_norm_is_the_layers(device: torch.device) -> None:
    """RMSNorm.add_norm, which goes to the kernel on a GPU, in its plain form."""
    norm = RMSNorm(100, EPS)
    norm.weight.data = torch.rand(100) + 0.5
    x, residual = torch.randn(2, 3, 100)
    added = x + residual
    out, new = module.add_rms_norm(x.to(device), residual.to(device), norm.weight.to(device), EPS)
    assert_close(out.cpu(), norm(added), "product")
    assert_close(new.cpu(), added, "product")


def test_add_rms_norm_of_extreme_rows(device: torch.device) -> None:
    """Squares that float16 does not hold, and a row of zeros, where EPS stands alone."""
    x = torch.full((3, 64), 6e4, device=device).to(F16)
    x[1] = 0
    x[2] = 6e-8
    weight = torch.ones(64, device=device, dtype=F16)
    out, _ = module.add_rms_norm(x, None, weight, EPS)
    assert_close(out, exact_norm(x, weight), "product")
    assert not out[1].any()


# --- q/k norm + RoPE + KV store -------------------------------------------------------------------

# heads, KV heads, head_dim
HEADS = [(4, 2, 128), (16, 8, 64)] if ON_GPU else [(4, 2, 16), (3, 1, 24), (2, 2, 64), (5, 1, 80)]


@dtypes
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_norm_rope_store(
    heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """q, k and v against the plain layers, at scattered positions; what is stored is what stands in
    qkv, and nothing else changes. One position in four has slot -1."""
    num_heads, kv_heads, head_dim = heads
    rotary = RotaryEmbedding(head_dim, 5000, 1e6).to(device)
    norms = [RMSNorm(head_dim, EPS) for _ in range(2)]
    for norm in norms:
        norm.weight.data = (torch.rand(head_dim) + 0.5).to(device, dtype).float()
    for tokens in ROWS:
        wide = torch.full((tokens, num_heads + 2 * kv_heads + 2, head_dim), torch.nan)
        wide[:, 1:-1] = torch.randn(tokens, num_heads + 2 * kv_heads, head_dim) * 3
        wide = wide.to(device, dtype)
        qkv = wide[:, 1:-1]
        positions = torch.randint(5000, (tokens,), device=device, dtype=torch.int32)
        slots = torch.randperm(tokens + 9)[:tokens].to(device, torch.int32)
        slots[3::4] = -1
        caches = torch.full((2, tokens + 9, 1, kv_heads, head_dim), torch.nan)
        caches = caches.to(device, dtype)
        q, k, v = qkv.to(F32, copy=True).split((num_heads, kv_heads, kv_heads), dim=1)
        q, k = rotary(positions, norms[0](q), norms[1](k))
        weights = [norm.weight.to(dtype) for norm in norms]
        module.norm_rope_store(
            qkv, kv_heads, rotary.cos, rotary.sin, *weights, EPS, *caches, positions, slots
        )
        new_q, new_k, new_v = qkv.split((num_heads, kv_heads, kv_heads), dim=1)
        assert_close(new_q, q, "product")
        assert_close(new_k, k, "product")
        assert torch.equal(new_v.float(), v)
        assert wide[:, 0].isnan().all() and wide[:, -1].isnan().all()
        kept = slots >= 0
        stored = caches[:, :, 0]
        assert torch.equal(stored[0, slots[kept].long()], new_k[kept])
        assert torch.equal(stored[1, slots[kept].long()], new_v[kept])
        stored[:, slots[kept].long()] = torch.nan
        assert caches.isnan().all()


def test_norm_rope_store_before_there_is_a_pool(device: torch.device) -> None:
    """The warm-up's: q and k are turned all the same, and slots are not looked at."""
    rotary = RotaryEmbedding(16, 8, 1e4).to(device)
    ones = torch.ones(16, device=device)
    qkv = torch.randn(3, 8, 16, device=device)
    q, k, _ = qkv.clone().split((4, 2, 2), dim=1)
    norm = RMSNorm(16, EPS)
    norm.weight.data = ones
    positions = torch.arange(3, device=device, dtype=torch.int32)
    q, k = rotary(positions, norm(q), norm(k))
    nothing = torch.empty(0, device=device)
    slots = torch.full((3,), 10**6, device=device, dtype=torch.int32)
    module.norm_rope_store(
        qkv, 2, rotary.cos, rotary.sin, ones, ones, EPS, nothing, nothing, positions, slots
    )
    assert_close(qkv[:, :4], q, "product")
    assert_close(qkv[:, 4:6], k, "product")


# --- SiLU x up ------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("width", [1, 96, 1024, 1025, 3000])
def test_silu_and_mul(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Widths below, at, and above what one program takes."""
    for rows in ROWS[:3]:
        x = surrounded(torch.randn(rows, 2 * width) * 3, device, dtype)
        before = x.clone()
        out = module.silu_and_mul_fused(x)
        gate, up = x.double().chunk(2, dim=1)
        assert out.dtype == dtype
        assert_close(out, gate * gate.sigmoid() * up, "product")
        assert torch.equal(x, before)


@dtypes
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_of_extreme_gates(dtype: torch.dtype, device: torch.device) -> None:
    """exp overflows for gates far below zero: the result is 0, and never NaN."""
    gate = torch.tensor([[-6e4, -200.0, -50.0, 0.0, 50.0, 200.0, 6e4]], device=device)
    x = torch.cat((gate, torch.ones_like(gate)), dim=1).to(dtype)
    out = module.silu_and_mul_fused(x)
    assert torch.equal(out[0, 3:].float(), x[0, 3:7].float())
    assert out[0, :3].float().abs().max() < 1e-15
