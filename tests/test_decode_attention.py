"""The decode kernel against what it replaces: norm, RoPE, KV store and attention in plain torch and
float32. In Triton's interpreter where there is no GPU.

The pool is NaN wherever nothing may be read, and so is fresh memory: whatever is read by mistake,
or left unwritten, shows."""

from typing import NamedTuple

import pytest
import torch
from numerics import BF16, F16, F32, assert_close

from nanovllm.layers.attention import store_kv, torch_attention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.utils.context import Context

module = pytest.importorskip("nanovllm.layers.decode_attention", reason="triton is not installed")

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if ON_GPU else []

EPS = 1e-6
NAN = float("nan")


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


class Step:
    """A decode step of sequences with these context lengths, the new position included; 0 makes a
    padding row. Blocks are out of order, queries and keys of different sizes, weights random."""

    def __init__(self, shape: Shape, contexts: list[int], device: torch.device) -> None:
        self.shape, self.contexts = shape, contexts
        heads, kv_heads, head_dim, block_size, dtype = shape
        width = -(-max(contexts) // block_size)
        blocks = torch.randperm(len(contexts) * width + 1)[:-1].view(len(contexts), width)
        used = torch.tensor([-(-n // block_size) for n in contexts])
        blocks[torch.arange(width) >= used.unsqueeze(1)] = -1
        # The rows of a wider tensor, as where something else was fused into the product.
        wide = torch.randn(len(contexts), heads + 2 * kv_heads + 1, head_dim) * 2
        self.qkv = wide.to(device, dtype)[:, : heads + 2 * kv_heads]
        self.q_norm, self.k_norm = (_random_norm(head_dim, device, dtype) for _ in range(2))
        self.rotary = RotaryEmbedding(head_dim, max(contexts), 1e4).to(device)
        pool_shape = (2, len(contexts) * width + 1, block_size, kv_heads, head_dim)
        self.pool = torch.full(pool_shape, NAN, dtype=dtype, device=device)
        slots = []
        for table, context in zip(blocks.tolist(), contexts, strict=True):
            at = [table[p // block_size] * block_size + p % block_size for p in range(context)]
            slots.append(at[-1] if at else -1)
            old = torch.randn(2, max(context - 1, 0), kv_heads, head_dim).to(device, dtype)
            self.pool.flatten(1, 2)[:, at[:-1]] = old
        self.slots = slots
        self.context = Context(
            is_prefill=False,
            slot_mapping=torch.tensor(slots, dtype=torch.int32, device=device),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_tables=blocks.to(device, torch.int32),
        )

    def run(self, attention: "module.DecodeAttention") -> torch.Tensor:
        """By the kernel: [N, heads, d]; the pool gets the new k and v."""
        return attention(
            self.qkv,
            self.shape.kv_heads,
            self.rotary.cos,
            self.rotary.sin,
            self.q_norm.weight,
            self.k_norm.weight,
            EPS,
            self.pool[0],
            self.pool[1],
            self.context,
            self.shape.head_dim**-0.5,
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """By plain torch in float32: what `run` must return, and the pool after it. Call it first;
        it changes nothing."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        q, k, v = self.qkv.float().split((heads, kv_heads, kv_heads), dim=1)
        q_norm, k_norm = _as_float(self.q_norm), _as_float(self.k_norm)
        positions = (self.context.context_lens - 1).clamp_min(0)
        q, k = self.rotary(positions, q_norm(q), k_norm(k))
        pool = self.pool.to(torch.float32, copy=True)
        store_kv(k, v, pool[0], pool[1], self.context.slot_mapping)
        # The plain path multiplies what it masks by 0.
        finite = pool.nan_to_num(0.0)
        scale = self.shape.head_dim**-0.5
        return torch_attention(q, k, v, finite[0], finite[1], self.context, scale), pool


def _random_norm(size: int, device: torch.device, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, EPS)
    norm.weight.data = (torch.rand(size) + 0.5).to(device, dtype)
    return norm


def _as_float(norm: RMSNorm) -> RMSNorm:
    copy = RMSNorm(len(norm.weight), norm.eps)
    copy.weight.data = norm.weight.float()
    return copy


def check(step: Step, attention: "module.DecodeAttention | None" = None) -> None:
    """Outputs, the slots written, all other slots, and the counters for the next launch."""
    attention = attention or module.DecodeAttention()
    before = step.pool.clone()
    expected, expected_pool = step.expected()
    out = step.run(attention)
    real = [row for row, context in enumerate(step.contexts) if context]
    padding = [row for row, context in enumerate(step.contexts) if not context]
    assert out.dtype == step.shape.dtype
    assert_close(out[real], expected[real], "attention")
    assert out[padding].isnan().all(), "a padding row was written"
    written = [slot for slot in step.slots if slot != -1]
    after, expected_pool = step.pool.flatten(1, 2), expected_pool.flatten(1, 2)
    assert_close(after[0, written], expected_pool[0, written], "product")
    assert torch.equal(after[1, written].float(), expected_pool[1, written])
    after[:, written] = before.flatten(1, 2)[:, written]
    torch.testing.assert_close(step.pool, before, rtol=0, atol=0, equal_nan=True)
    for _, _, counters in attention.scratch.values():
        assert not counters.any(), "the next launch would merge too early"


SHAPES = [
    Shape(16, 8, 128, 256, BF16),  # Qwen3-0.6B
    Shape(4, 2, 64, 16, F32),
    Shape(4, 1, 64, 256, F16),
]
if not ON_GPU:  # where a shape costs no compilation, but products of bfloat16 are wrong
    SHAPES = [
        Shape(4, 2, 16, 4, F32),
        Shape(4, 1, 24, 16, F32),
        Shape(2, 2, 64, 256, F32),
        Shape(8, 2, 80, 16, F32),
        Shape(4, 2, 128, 256, F16),
        Shape(6, 2, 64, 4, F16),  # a group of 3 query heads
    ]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_sequence(shape: Shape, device: torch.device) -> None:
    """Contexts without a past, and at the edges of blocks and of the kernel's inner steps."""
    edges = {1, 2, 3, shape.block_size, shape.block_size + 1, 64, 65, 66, 129}
    for context in sorted(edges):
        check(Step(shape, [context], device))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("batch", [3, 17, 256] if ON_GPU else [3, 17])
@pytest.mark.parametrize("shape", SHAPES if ON_GPU else SHAPES[::2], ids=str)
def test_a_batch_with_padding_rows(shape: Shape, batch: int, device: torch.device) -> None:
    """Every third row is padding, slot -1 and context 0; the others differ in length, up to what
    is cut into two."""
    contexts = [0 if i % 3 == 1 else 1 + i * 37 % 200 for i in range(batch)]
    contexts[0] = 290
    check(Step(shape, contexts, device))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_long_contexts_are_cut_and_merged(shape: Shape, device: torch.device) -> None:
    """Around the lengths at which a part more is made, and past those that the most parts hold:
    then all are longer, and the last may be left over (2,050 past positions in parts of 192)."""
    most, part, _ = module.split_limits(1, shape.kv_heads)
    assert (most, part) == (16, 128)
    for past in (part - 1, part, part + 1, 3 * part, 1000, most * part, most * part + 2):
        check(Step(shape, [past + 1], device))


MIXED = {
    "one": [300],
    "three": [1, 0, 700],
    "one long among short ones": [5] * 8 + [1500] + [9] * 8,
    "mixed": [1 + i * i * 3 % 601 for i in range(17)],
    "mostly padding": [290, 0, 1, *[0] * 13, 270],
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("part", [64, 128, 256])
@pytest.mark.parametrize("contexts", MIXED.values(), ids=MIXED)
def test_how_a_batch_is_cut_changes_nothing(
    contexts: list[int], part: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule for large batches, and other ones, on batches of very different lengths."""
    monkeypatch.setattr(module, "split_limits", lambda num_seqs, num_kv_heads: (8, part, 2))
    check(Step(SHAPES[1], contexts, device))


@pytest.mark.usefixtures("poisoned")
def test_launches_follow_each_other(device: torch.device) -> None:
    """As layers and steps do, with one object: the scratch of one is no part of the next."""
    attention = module.DecodeAttention()
    for contexts in ([400, 300], [1, 700], [2, 0], [300, 400]):
        check(Step(SHAPES[1], contexts, device), attention)
    assert len(attention.scratch) == 1


@pytest.mark.usefixtures("poisoned")
def test_batches_of_all_sizes_share_little_scratch(device: torch.device) -> None:
    """Else a batch that dwindles from hundreds to one would leave gigabytes behind."""
    attention = module.DecodeAttention()
    for num_seqs in range(1, 10):
        check(Step(SHAPES[1], [300] * num_seqs, device), attention)
    groups = {key[0] for key in attention.scratch}
    assert groups == {num_seqs * SHAPES[1].kv_heads for num_seqs in (1, 2, 4, 8, 16)}


@pytest.mark.usefixtures("poisoned")
def test_slot_minus_one_with_a_context_stores_nothing(device: torch.device) -> None:
    """It attends to its own new position all the same."""
    step = Step(SHAPES[1], [5, 70], device)
    expected, _ = step.expected()
    step.context.slot_mapping[1] = -1
    before = step.pool.flatten(1, 2)[:, step.slots[1]].clone()
    assert_close(step.run(module.DecodeAttention()), expected, "attention")
    assert before.isnan().all()
    assert step.pool.flatten(1, 2)[:, step.slots[1]].isnan().all()


def test_split_limits_are_what_the_merge_can_hold() -> None:
    """The number of parts is a power of two: one load takes them all. Small batches get more."""
    limits = [module.split_limits(n, 8) for n in (1, 2, 4, 16, 17, 64, 256)]
    assert all(most & (most - 1) == 0 and part % module.KEYS == 0 for most, part, _ in limits)
    assert [most for most, _, _ in limits] == sorted((most for most, _, _ in limits), reverse=True)


# --- positions and slots --------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 256])
def test_positions_and_slots(block_size: int, device: torch.device) -> None:
    """Of real rows at the edges of blocks, and of padding rows whatever their table holds; the
    table is a part of a wider one."""
    from nanovllm.layers.decode_kernels import positions_and_slots

    contexts = [1, block_size, block_size + 1, 0, 3 * block_size, 2, 0]
    wide = torch.randint(0, 1000, (len(contexts), 9), dtype=torch.int32)
    tables = wide.to(device)[:, 2:7]
    positions, slots = positions_and_slots(
        torch.tensor(contexts, dtype=torch.int32, device=device), tables, block_size
    )
    last = [max(context - 1, 0) for context in contexts]
    assert positions.tolist() == last
    assert slots.tolist() == [
        int(tables[row, p // block_size]) * block_size + p % block_size if contexts[row] else -1
        for row, p in enumerate(last)
    ]
    assert positions.dtype == slots.dtype == torch.int32
