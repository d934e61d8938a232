"""Writing K and V into the paged pool: the two kernels that do it (in Triton's interpreter where
there is no GPU) and the plain torch form leave exactly the same pool."""

from collections.abc import Callable

import pytest
import torch

from nanovllm.layers.attention import store_kv
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import rotate
from nanovllm.utils.context import Context

reason = "triton is not installed"
fused_kernels = pytest.importorskip("nanovllm.layers.fused_kernels", reason=reason)
decode_attention = pytest.importorskip("nanovllm.layers.decode_attention", reason=reason)

# What is stored can be told exactly: keys of +-1 have a norm of 1, and RoPE turns by right angles.
COS = [1.0, 0.0, -1.0, 0.0]  # of positions 0 to 3
SIN = [0.0, 1.0, 0.0, -1.0]
EPS = 1e-12  # 1 + EPS is 1 in float32
UNTOUCHED = 7.0


class Step:
    """Made-up qkv [T, heads + 2 kv_heads, d], its rows dense but apart, and what goes with it."""

    def __init__(
        self, slots: list[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.slots, self.num_kv_heads = slots, num_kv_heads
        num_rows = 4 * num_kv_heads  # two query heads to a KV head
        wide = torch.randint(-9, 10, (len(slots), num_rows + 3, head_dim), device=device)
        self.qkv = wide.to(dtype)[:, 1 : num_rows + 1]
        assert not self.qkv.is_contiguous()
        self.k, self.v = self.qkv[:, 2 * num_kv_heads :].chunk(2, dim=1)
        self.k.copy_(torch.randint(0, 2, self.k.shape, device=device) * 2 - 1)
        self.weight = (torch.arange(head_dim, device=device) % 5 + 1).to(dtype)
        self.cos = torch.tensor(COS, device=device)[:, None].expand(4, head_dim // 2).contiguous()
        self.sin = torch.tensor(SIN, device=device)[:, None].expand(4, head_dim // 2).contiguous()
        self.positions = torch.arange(len(slots), device=device, dtype=torch.int32) % 4
        self.slot_mapping = torch.tensor(slots, dtype=torch.int32, device=device)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as they must be stored: [T, kv_heads, d]."""
        cos, sin = (x[self.positions].unsqueeze(1) for x in (self.cos, self.sin))
        return rotate(self.k * self.weight, cos, sin), self.v.clone()


Store = Callable[[Step, torch.Tensor, torch.Tensor], None]


def by_torch(step: Step, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    norm = RMSNorm(len(step.weight), EPS)
    norm.weight.data = step.weight
    cos, sin = (x[step.positions].unsqueeze(1) for x in (step.cos, step.sin))
    store_kv(rotate(norm(step.k), cos, sin), step.v, k_cache, v_cache, step.slot_mapping)


def by_norm_rope_store(step: Step, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    fused_kernels.norm_rope_store(
        step.qkv, step.num_kv_heads, step.cos, step.sin, step.weight, step.weight, EPS,
        k_cache, v_cache, step.positions, step.slot_mapping,
    )  # fmt: skip


def by_decode_attention(step: Step, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """The contexts are in block 0, as far as there are any: only the store is looked at."""
    context = Context(
        is_prefill=False,
        slot_mapping=step.slot_mapping,
        context_lens=step.positions + 1,
        block_tables=torch.zeros(len(step.slots), 4, dtype=torch.int32, device=step.qkv.device),
    )
    attention = decode_attention.DecodeAttention()
    attention.plan(context, 2 * step.num_kv_heads, k_cache)
    if step.qkv.is_cuda:
        torch.cuda.synchronize()  # in a model, the embedding comes between
    attention(
        step.qkv, step.num_kv_heads, step.cos, step.sin, step.weight, step.weight, EPS,
        k_cache, v_cache, context, 1.0,
    )  # fmt: skip


all_forms = pytest.mark.parametrize("store", [by_torch, by_norm_rope_store, by_decode_attention])
both_kernels = pytest.mark.parametrize("store", [by_norm_rope_store, by_decode_attention])


def check(store: Store, step: Step, num_blocks: int = 6, block_size: int = 4) -> None:
    """Store one step into a marked pool; every slot, and a block before the pool and one after it,
    must be exactly as expected."""
    expected, caches = [], []
    for rows in step.expected():
        shape = (num_blocks + 2, block_size, *rows.shape[1:])
        memory = torch.full(shape, UNTOUCHED, dtype=rows.dtype, device=rows.device)
        caches.append(memory.clone())
        for row, slot in zip(rows, step.slots, strict=True):
            if slot != -1:
                memory[1 + slot // block_size, slot % block_size] = row
        expected.append(memory)
    store(step, *(memory[1:-1] for memory in caches))
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


@all_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
def test_each_row_goes_to_its_slot_exactly(
    store: Store, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Widths that are and are not powers of two (case 33); first and last slot, any order; rows
    that lie apart in a wider tensor; keys turned by their own position."""
    check(store, Step([23, 0, 9, 8, 17], 2, head_dim, dtype, device))


@all_forms
def test_case_42_minus_one_among_real_slots_is_skipped(store: Store, device: torch.device) -> None:
    """A padding row between real rows writes nothing, and the rows after it still do."""
    check(store, Step([-1, 5, -1, -1, 22, 3, -1], 3, 24, torch.float32, device))


@all_forms
def test_case_42_padding_alone_touches_nothing(store: Store, device: torch.device) -> None:
    check(store, Step([-1, -1], 1, 80, torch.float32, device))


def test_case_42_a_padding_row_of_a_decode_graph_stores_nothing(device: torch.device) -> None:
    """Context length 0, the mark of such a row, is enough: its slot is not even looked at."""
    step = Step([5, 6, 7], 2, 24, torch.float32, device)
    step.positions[1] = -1
    keys, values = step.expected()
    caches = torch.zeros(2, 3, 4, 2, 24, device=device)
    by_decode_attention(step, *caches)
    assert torch.equal(caches[0].flatten(0, 1)[[5, 7]], keys[[0, 2]])
    assert torch.equal(caches[1].flatten(0, 1)[[5, 7]], values[[0, 2]])
    assert not caches.flatten(1, 2)[:, [0, 1, 2, 3, 4, 6, 8, 9, 10, 11]].any()


@all_forms
@pytest.mark.parametrize(("num_heads", "block_size"), [(1, 1), (3, 5), (8, 256)])
def test_any_number_of_heads_and_block_size(
    store: Store, num_heads: int, block_size: int, device: torch.device
) -> None:
    """The last program's masked lanes must not reach the next slot."""
    slots = [block_size, 0, 2 * block_size - 1] if block_size > 1 else [1, 0]
    check(store, Step(slots, num_heads, 24, torch.float32, device), 2, block_size)


@all_forms
def test_steps_of_equal_shape_do_not_share_anything(store: Store, device: torch.device) -> None:
    """Two steps of one shape, one after the other: the second overwrites just its own slots."""
    caches = torch.zeros(2, 3, 4, 2, 24, device=device)
    first, second = (Step(s, 2, 24, torch.float32, device) for s in ([4, 5, 6], [6, -1, 1]))
    expected = torch.zeros_like(caches).flatten(1, 2)
    for slot, rows, i in ((4, first, 0), (5, first, 1), (6, second, 0), (1, second, 2)):
        expected[:, slot] = torch.stack([x[i] for x in rows.expected()])
    store(first, *caches)
    store(second, *caches)
    assert torch.equal(caches.flatten(1, 2), expected)


@both_kernels
def test_case_34_offsets_pass_32_bits(store: Store, device: torch.device) -> None:
    """In small: the last slots of caches of more than 2^31 numbers. In host memory only the written
    pages are ever backed. The lower half catches what an overflowing offset writes."""
    # The decode kernel multiplies by the cache's numbers: on a GPU they cannot be int8.
    dtype = torch.int8 if device.type == "cpu" else torch.float16
    width, half = 2 * 24, 2**31
    num_slots = half // width + 8
    caches = []
    for _ in range(2):
        backing = torch.empty(half + num_slots * width, dtype=dtype, device=device)
        caches.append(backing[half:].view(num_slots, 1, 2, 24))
        caches[-1][-4:] = 0
    step = Step([num_slots - 1, -1, num_slots - 3], 2, 24, torch.float16, device)
    step.positions.zero_()  # no context to read
    expected = [x.to(dtype) for x in step.expected()]
    store(step, *caches)
    for cache, rows in zip(caches, expected, strict=True):
        nothing = torch.zeros_like(rows[0])
        assert torch.equal(cache[-4:, 0], torch.stack((nothing, rows[2], nothing, rows[0])))
