"""The fused Triton kernels against the plain layers, on fresh random inputs: on the CPU through
Triton's interpreter, and compiled where there is a GPU. Half precision is held to its own error."""

import pytest
import torch

from nanovllm.layers.attention import store_kv, torch_attention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context

pytest.importorskip("triton")

from nanovllm.layers.decode_attention import DecodeAttention
from nanovllm.layers.decode_kernels import positions_and_slots
from nanovllm.layers.few_rows import few_rows_linear
from nanovllm.layers.fused_kernels import add_rms_norm, norm_rope_store, silu_and_mul_fused

EPS = 1e-6
# Relative L2 against the plain layers in float32: of the last rounding in half precision.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if request.param == torch.bfloat16 and device.type == "cpu":
        return torch.float16  # numpy, in which the interpreter computes, has no bfloat16
    return request.param


def relative_l2(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.float() - exact.float()).norm() / exact.float().norm())


def close(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    """NaN never passes."""
    return relative_l2(actual, exact) < TOLERANCE.get(actual.dtype, 2e-3)


def norm_layer(size: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    norm = RMSNorm(size, EPS)
    norm.weight.data = torch.randn(size, dtype=dtype, device=device)
    return norm


def plain_norm(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """In float32 throughout."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm.weight.float()


@pytest.mark.parametrize("rows", [1, 3, 17, 256])
@pytest.mark.parametrize("size", [64, 100, 1024])
def test_add_rms_norm(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """With a residual, which it overwrites; without; and with summands."""
    norm = norm_layer(size, dtype, device)
    x, residual = torch.randn(2, rows, size, device=device).to(dtype)
    total = x.float() + residual.float()
    given = residual.clone()
    out, new_residual = add_rms_norm(x, given, norm.weight, EPS)
    assert close(out, plain_norm(norm, total)) and close(new_residual, total)
    assert new_residual.data_ptr() == given.data_ptr()

    out, new_residual = add_rms_norm(x, None, norm.weight, EPS)
    assert close(out, plain_norm(norm, x)) and torch.equal(new_residual, x)

    parts = torch.randn(3, rows, size, device=device)
    total = parts.sum(0) + residual.float()
    out, new_residual = add_rms_norm(parts, residual.clone(), norm.weight, EPS)
    assert close(out, plain_norm(norm, total)) and close(new_residual, total)


@pytest.mark.parametrize(("rows", "width"), [(1, 96), (3, 1500), (17, 3072)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(rows, 2 * width, device=device).to(dtype)
    gate, up = x.float().chunk(2, dim=-1)
    assert close(silu_and_mul_fused(x), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("rows", [1, 3, 17, 64])
@pytest.mark.parametrize(("out", "inn"), [(200, 2100), (64, 512), (1024, 3072)])
def test_few_rows_linear(
    rows: int, out: int, inn: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The product, its summands, and with SiLU x up; sizes that no tile divides among them."""
    x = torch.randn(rows, inn, device=device).to(dtype)
    weight = (torch.randn(out, inn, device=device) / inn**0.5).to(dtype)
    exact = x.float() @ weight.float().T
    assert close(few_rows_linear(x, weight), exact)
    parts = few_rows_linear(x, weight, parts=3)
    assert close(parts.sum(0) if parts.dim() == 3 else parts, exact)
    gate, up = exact.chunk(2, dim=-1)
    assert relative_l2(
        few_rows_linear(x, weight, silu=True), torch.nn.functional.silu(gate) * up
    ) < max(TOLERANCE.get(dtype, 2e-3), 1e-5)


def test_positions_and_slots(device: torch.device) -> None:
    """Table [17, 5, 23], blocks of 4: position 8 is slot 92; a context of length 0 is padding."""
    tables = torch.tensor([[17, 5, 23], [17, 5, 23], [0, 0, 0]], dtype=torch.int32, device=device)
    lens = torch.tensor([9, 7, 0], dtype=torch.int32, device=device)
    positions, slots = positions_and_slots(lens, tables, 4)
    assert positions.tolist() == [8, 6, 0] and slots.tolist() == [92, 22, -1]


class Layer:
    """One attention layer's made-up state, and what plain torch makes of a decode step on it."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        block_size: int,
        lens: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.dim = heads
        batch, width = len(lens), -(-max(lens) // block_size)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        tables = torch.randperm(batch * width, device=device).view(batch, width).int()
        shape = (2, batch * width, block_size, self.num_kv_heads, self.dim)
        self.pool = torch.randn(shape, device=device).to(dtype)
        self.rotary = RotaryEmbedding(self.dim, max(lens), 1e4).to(device)
        self.q_norm = norm_layer(self.dim, dtype, device)
        self.k_norm = norm_layer(self.dim, dtype, device)
        rows = self.num_heads + 2 * self.num_kv_heads
        self.qkv = torch.randn(batch, rows, self.dim, device=device).to(dtype)
        positions, slots = positions_and_slots(self.lens, tables, block_size)
        self.positions = positions
        self.context = Context(
            is_prefill=False, slot_mapping=slots, context_lens=self.lens, block_tables=tables
        )

    def norm_and_rope(self, pool: torch.Tensor) -> tuple[object, ...]:
        return (
            self.num_kv_heads,
            self.rotary.cos,
            self.rotary.sin,
            self.q_norm.weight,
            self.k_norm.weight,
            EPS,
            *pool,
        )

    def plain(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q and k rotated [N, heads + kv, d], the pool after the step, the attention's output),
        float32."""
        kv = self.num_kv_heads
        q, k, v = self.qkv.float().split((self.num_heads, kv, kv), dim=1)
        q, k = plain_norm(self.q_norm, q), plain_norm(self.k_norm, k)
        q, k = self.rotary(self.positions.long(), q, k)
        pool = self.pool.float()
        store_kv(k, v, pool[0], pool[1], self.context.slot_mapping)
        out = torch_attention(q, k, v, pool[0], pool[1], self.context, self.dim**-0.5)
        return torch.cat((q, k), dim=1), pool, out


HEADS = [(4, 4, 16), (4, 2, 24), (8, 2, 64), (4, 2, 80), (8, 1, 128)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [4, 16, 256])
def test_norm_rope_store(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    layer = Layer(heads, block_size, [1, 5, 70], dtype, device)
    rotated, pool, _ = layer.plain()
    qkv, own_pool = layer.qkv.clone(), layer.pool.clone()
    slots = layer.context.slot_mapping
    norm_rope_store(qkv, *layer.norm_and_rope(own_pool), layer.positions, slots)
    assert close(qkv[:, : rotated.shape[1]], rotated) and close(own_pool, pool)
    assert torch.equal(qkv[:, rotated.shape[1] :], layer.qkv[:, rotated.shape[1] :]), "V changed"


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [4, 16, 256])
def test_decode_attention(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """First position, ends of key tiles, and contexts long enough to be split."""
    layer = Layer(heads, block_size, [1, 2, 64, 65, 66, 300, 513], dtype, device)
    _, pool, exact = layer.plain()
    attention = DecodeAttention()
    for _ in range(2):  # the second finds the counters that the first has left
        own_pool = layer.pool.clone()
        out = attention(layer.qkv, *layer.norm_and_rope(own_pool), layer.context, layer.dim**-0.5)
        assert close(out, exact) and close(own_pool, pool)
    assert not any(counters.any() for _, _, counters in attention.scratch.values())


@pytest.mark.parametrize("batch", [1, 3, 17, 40])
def test_decode_attention_of_any_batch(
    batch: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Each takes another number of splits; padding rows are left alone."""
    lens = [(37 * i) % 700 + 1 for i in range(batch)]
    layer = Layer((4, 2, 64), 256, lens, dtype, device)
    padding = torch.arange(batch, device=device) % 5 == 4
    layer.lens[padding] = 0
    layer.context.slot_mapping[padding] = -1
    live = ~padding
    _, pool, exact = layer.plain()
    own_pool = layer.pool.clone()
    out = DecodeAttention()(
        layer.qkv, *layer.norm_and_rope(own_pool), layer.context, layer.dim**-0.5
    )
    assert close(out[live], exact[live]) and close(own_pool, pool)


@pytest.mark.gpu
def test_decode_attention_of_a_full_batch() -> None:
    """256 sequences of mixed length, in Qwen3-0.6B's shape."""
    lens = [(211 * i) % 1900 + 1 for i in range(256)]
    layer = Layer((16, 8, 128), 256, lens, torch.bfloat16, torch.device("cuda"))
    _, pool, exact = layer.plain()
    out = DecodeAttention()(
        layer.qkv, *layer.norm_and_rope(layer.pool), layer.context, layer.dim**-0.5
    )
    assert close(out, exact) and close(layer.pool, pool)
