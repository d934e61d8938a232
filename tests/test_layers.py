"""Layers on one rank against plain formulas and transformers' own, and their worked examples:
shapes and memory of Qwen3-0.6B."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from checkpoints import QWEN3_06B
from torch import nn
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as hf

from nanovllm.engine.kv_cache import (
    allocate_kv_cache,
    check_pool,
    kv_block_bytes,
    num_blocks_that_fit,
)
from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.attention import torch_attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import Context, use_context
from nanovllm.utils.device import defaults
from nanovllm.utils.parallel import TensorParallel

ONE_RANK = TensorParallel()
DTYPES = (torch.float32, torch.bfloat16)


# --- RMSNorm and SwiGLU ---------------------------------------------------------------------------


def make_norm(size: int, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> RMSNorm:
    norm = RMSNorm(size, eps).to(dtype)
    norm.weight.data.copy_(torch.linspace(-1.0, 2.0, size))
    return norm


@pytest.mark.parametrize("size", [24, 64])
def test_rms_norm_is_its_formula(size: int) -> None:
    """x / sqrt(mean(x^2) + eps) * weight. The small input makes eps count."""
    norm = make_norm(size, eps=1e-4)
    x = torch.randn(5, 3, size, dtype=torch.float64) * 0.01
    expected = x / torch.sqrt((x * x).sum(-1, keepdim=True) / size + 1e-4) * norm.weight.double()
    torch.testing.assert_close(norm(x.float()).double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    """Statistics in float32, the product in the input's dtype: any other order rounds otherwise."""
    ours, theirs = make_norm(64, dtype=dtype), hf.Qwen3RMSNorm(64, 1e-6).to(dtype)
    theirs.weight.data.copy_(ours.weight)
    x = (torch.randn(200, 64) * 3).to(dtype)
    assert torch.equal(ours(x), theirs(x))


def test_add_norm_returns_the_sum_as_residual_and_leaves_its_inputs() -> None:
    norm = make_norm(16)
    x, residual = torch.randn(4, 16), torch.randn(4, 16)
    before = x.clone(), residual.clone()
    normed, total = norm.add_norm(x, residual)
    assert torch.equal(total, before[0] + before[1])
    assert torch.equal(normed, norm(total))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_add_norm_without_residual_starts_one() -> None:
    norm, x = make_norm(16), torch.randn(4, 16)
    normed, total = norm.add_norm(x, None)
    assert torch.equal(total, x)
    assert torch.equal(normed, norm(x))


def test_swiglu_gates_with_the_first_half() -> None:
    """silu(gate) * up in float64; swapped halves would differ."""
    x = torch.randn(7, 48)
    gate, up = x.double()[:, :24], x.double()[:, 24:]
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(silu_and_mul(x).double(), expected, atol=1e-6, rtol=1e-5)


# --- RoPE -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [1e6, 12345.0])
@pytest.mark.parametrize("head_dim", [16, 24, 128])
def test_rope_rotates_dimension_i_with_i_plus_half(head_dim: int, theta: float) -> None:
    """The pairing (i, i + d/2) and the angle position * theta^(-2i/d), by complex numbers."""
    rotary = RotaryEmbedding(head_dim, 512, theta)
    positions = torch.tensor([0, 1, 77, 511])
    q, k = torch.randn(4, 3, head_dim), torch.randn(4, 1, head_dim)
    frequencies = theta ** (-2 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)
    angles = (positions[:, None] * frequencies).unsqueeze(1)  # [T, 1, d / 2]
    turn = torch.polar(torch.ones_like(angles), angles)
    for x, rotated in zip((q, k), rotary(positions, q, k), strict=True):
        a, b = x.double().chunk(2, dim=-1)
        pairs = torch.complex(a, b) * turn
        expected = torch.cat((pairs.real, pairs.imag), dim=-1)
        torch.testing.assert_close(rotated.double(), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("head_dim", [24, 128])
def test_rope_equals_transformers_up_to_the_last_position(head_dim: int) -> None:
    """Also at position 40,959, where float32 angles are coarse: there both must err alike."""
    config = Qwen3Config(
        head_dim=head_dim, rope_theta=1e6, max_position_embeddings=40960, num_hidden_layers=1
    )
    positions = torch.tensor([0, 1, 255, 256, 4095, 40959])
    q, k = torch.randn(6, 4, head_dim), torch.randn(6, 2, head_dim)
    cos, sin = hf.Qwen3RotaryEmbedding(config)(q, positions[None])
    expected = hf.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rotated = RotaryEmbedding(head_dim, 40960, 1e6)(positions, q, k)
    for ours, theirs in zip(rotated, expected, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), atol=1e-5, rtol=0)


def test_rope_table_stays_float32_in_a_bfloat16_model() -> None:
    """In bfloat16 positions 256 and 257 would be the same number, and so share an angle."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rotary = RotaryEmbedding(16, 512, 1e6)
    finally:
        torch.set_default_dtype(before)
    x = torch.ones(2, 1, 16, dtype=torch.bfloat16)
    rotated, _ = rotary(torch.tensor([256, 257]), x, x)
    assert rotary.cos.dtype is torch.float32 and rotated.dtype is torch.bfloat16
    # One position further turns the fastest pair (0, 8) by one radian.
    pairs = rotated[:, 0, [0, 8]].double()
    angles = torch.atan2(pairs[:, 1], pairs[:, 0])
    assert (angles[1] - angles[0]).remainder(2 * torch.pi).item() == pytest.approx(1, abs=0.02)


def test_rope_scores_depend_on_the_distance_alone() -> None:
    rotary = RotaryEmbedding(16, 512, 1e6)
    q, k = torch.randn(1, 1, 16).repeat(3, 1, 1), torch.randn(1, 1, 16).repeat(3, 1, 1)
    rotated, _ = rotary(torch.tensor([5, 100, 400]), q, k)
    _, keys = rotary(torch.tensor([0, 95, 395]), q, k)
    scores = (rotated * keys).sum(-1).flatten()
    torch.testing.assert_close(scores, scores[:1].expand(3), atol=1e-4, rtol=0)


# --- embedding and LM head ------------------------------------------------------------------------


def test_embedding_takes_rows() -> None:
    embedding = VocabParallelEmbedding(11, 4, ONE_RANK)
    embedding.weight.data.copy_(torch.arange(44).view(11, 4))
    assert embedding(torch.tensor([10, 0, 10])).tolist() == [
        [40, 41, 42, 43],
        [0, 1, 2, 3],
        [40, 41, 42, 43],
    ]


def test_lm_head() -> None:
    head = ParallelLMHead(11, 4, ONE_RANK)
    head.weight.data.normal_()
    hidden = torch.randn(3, 4)
    torch.testing.assert_close(head(hidden), hidden @ head.weight.T)


# --- worked example: shapes -----------------------------------------------------------------------


def record_shapes(model: nn.Module, names: dict[str, str]) -> dict[str, list[tuple[int, ...]]]:
    """Note [input shape, output shape] of the submodules `names`: label -> module name."""
    shapes: dict[str, list[tuple[int, ...]]] = {}

    def hook_for(label: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            shapes[label] = [tuple(args[0].shape), tuple(output.shape)]

        return hook

    for label, name in names.items():
        model.get_submodule(name).register_forward_hook(hook_for(label))
    return shapes


def test_shapes_of_qwen3_06b() -> None:
    """T = 220 positions of N = 2 requests through Qwen3-0.6B's real widths, two layers of them, on
    the meta device. Behind the last layer's attention only the last positions go on."""
    seen: list[tuple[int, ...]] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
        seen.extend(tuple(x.shape) for x in (q, k, v))
        return q

    with torch.device("meta"):
        model = Qwen3ForCausalLM(QWEN3_06B, attention)
        del model.model.layers[2:]
        ends = torch.tensor([0, 188, 220], dtype=torch.int32)
        context = Context(True, torch.empty(220, dtype=torch.int32), ends, ends)
        ids = torch.zeros(220, dtype=torch.int64)
    names = {"embedding": "model.embed_tokens", "lm_head": "lm_head"}
    for i, layer in enumerate(("model.layers.0.", "model.layers.1.")):
        names[f"qkv {i}"] = layer + "self_attn.qkv_proj"
        names[f"o_proj {i}"] = layer + "self_attn.o_proj"
        names[f"gate_up {i}"] = layer + "mlp.gate_up_proj"
        names[f"down {i}"] = layer + "mlp.down_proj"
    shapes = record_shapes(model, names)
    with use_context(context):
        logits = model.compute_logits(model(ids, ids))
    assert seen == [(220, 16, 128), (220, 8, 128), (220, 8, 128)] * 2
    assert shapes == {
        "embedding": [(220,), (220, 1024)],
        "qkv 0": [(220, 1024), (220, 4096)],
        "o_proj 0": [(220, 2048), (220, 1024)],
        "gate_up 0": [(220, 1024), (220, 6144)],
        "down 0": [(220, 3072), (220, 1024)],
        "qkv 1": [(220, 1024), (220, 4096)],
        "o_proj 1": [(2, 2048), (2, 1024)],
        "gate_up 1": [(2, 1024), (2, 6144)],
        "down 1": [(2, 3072), (2, 1024)],
        "lm_head": [(2, 1024), (2, 151936)],
    }
    assert logits.shape == (2, 151936)


# --- worked example: memory -----------------------------------------------------------------------


def qwen3_06b_on_meta(dtype: torch.dtype, size: int) -> Qwen3ForCausalLM:
    with defaults(torch.device("meta"), dtype):
        return Qwen3ForCausalLM(QWEN3_06B, torch_attention, TensorParallel(0, size))


def test_kv_memory_of_qwen3_06b() -> None:
    """2 * 28 * 8 * 128 * 2 bytes per position; half of it with 4 KV heads per rank (TP=2)."""
    model, half, float32 = (
        qwen3_06b_on_meta(dtype, size)
        for dtype, size in ((torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float32, 1))
    )
    assert kv_block_bytes(model, 1) == 114_688 == 112 * 1024
    assert kv_block_bytes(model, 256) == 28 * 2**20
    assert 4096 // 256 * kv_block_bytes(model, 256) == 448 * 2**20
    assert kv_block_bytes(half, 1) == 56 * 1024
    assert kv_block_bytes(float32, 1) == 224 * 1024


def test_num_blocks_follows_the_formula() -> None:
    """floor((total * utilization - used - peak + current) / block_bytes), by hand: 0.9 * 1000 -
    300 - 250 + 120 = 470 bytes."""
    numbers = {"total": 1000, "used": 300, "peak": 250, "current": 120, "utilization": 0.9}
    assert num_blocks_that_fit(**numbers, block_bytes=10) == 47
    assert num_blocks_that_fit(**numbers, block_bytes=100) == 4
    assert num_blocks_that_fit(**numbers, block_bytes=470) == 1
    assert num_blocks_that_fit(**numbers, block_bytes=471) == 0
    assert num_blocks_that_fit(**{**numbers, "used": 900}, block_bytes=10) == 0  # never negative


def test_num_blocks_of_a_large_gpu() -> None:
    """140 GiB at 0.9, 2 GiB used, a warm-up that rose from 1.5 to 4 GiB: 126 - 2 - 2.5 = 121.5 GiB
    of 28 MiB blocks are 4,443.4."""
    gib = 2**30
    assert num_blocks_that_fit(140 * gib, 2 * gib, 4 * gib, 3 * gib // 2, 0.9, 28 * 2**20) == 4443


def test_a_pool_too_small_for_one_sequence_names_what_would_fit() -> None:
    check_pool(num_blocks=4, block_size=256, max_model_len=1024)
    with pytest.raises(ValueError, match="max_model_len to at most 1024"):
        check_pool(num_blocks=4, block_size=256, max_model_len=1025)
    with pytest.raises(ValueError, match=r"max_model_len=2: raise gpu_memory_utilization"):
        check_pool(num_blocks=0, block_size=256, max_model_len=2)


def test_each_layer_holds_its_slices_of_the_one_pool() -> None:
    """[2, layers, num_blocks, block_size, kv_heads, head_dim], zeroed; K first, then V."""
    small = replace(QWEN3_06B, vocab_size=8, hidden_size=16, intermediate_size=16)
    with defaults(torch.device("cpu"), torch.bfloat16):
        model = Qwen3ForCausalLM(small, torch_attention)
    pool = allocate_kv_cache(model, num_blocks=2, block_size=4)
    assert pool.shape == (2, 28, 2, 4, 8, 128) and pool.dtype is torch.bfloat16
    assert not pool.any()
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.attn.k_cache.fill_(i + 1)
        layer.self_attn.attn.v_cache.fill_(-i - 1)
    marks = torch.arange(1, 29)
    assert torch.equal(pool[0].flatten(1).amax(1).int(), marks.int())
    assert torch.equal(pool[1].flatten(1).amin(1).int(), -marks.int())
