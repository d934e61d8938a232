"""The decode kernel against what it replaces: norm, RoPE, KV store and attention in plain torch and
float32. In Triton's interpreter where there is no GPU.

The pool is NaN wherever nothing may be read, and so is fresh memory: whatever is read by mistake,
or left unwritten, shows."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from checkpoints import QWEN3_06B
from numerics import BF16, F16, F32, assert_close

from nanovllm.layers import kernels
from nanovllm.layers.attention import store_kv, torch_attention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.qwen3 import Qwen3Model
from nanovllm.utils.context import Context, use_context
from nanovllm.utils.parallel import TensorParallel

module = pytest.importorskip("nanovllm.layers.decode_attention", reason="triton is not installed")
decode_kernels = pytest.importorskip("nanovllm.layers.decode_kernels")
work_list = decode_kernels.work_list
DEEP, LARGE, SMALL, MANY = (
    getattr(decode_kernels, name) for name in ("DEEP", "LARGE", "SMALL", "MANY")
)

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
        attention.plan(self.context, self.shape.heads, self.pool[0])
        if ON_GPU:
            torch.cuda.synchronize()  # in a model, the embedding comes between
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
    edges = {1, 2, 3, shape.block_size, shape.block_size + 1, 64, 65, 66, 128, 129, 130}
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
    """Around the lengths at which a part more is made, and up to more parts than are merged at a
    time (4,100 past positions are 33 of 128)."""
    for past in (127, 128, 129, 256, 257, 1000, 1024, 1025, 2050, 4100):
        check(Step(shape, [past + 1], device))


MIXED = {
    "one": [300],
    "three": [1, 0, 700],
    "one long among short ones": [5] * 8 + [1500] + [9] * 8,
    "mixed": [1 + i * i * 3 % 601 for i in range(17)],
    "mostly padding": [290, 0, 1, *[0] * 13, 270],
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 4, 12, 60])
@pytest.mark.parametrize("contexts", MIXED.values(), ids=MIXED)
def test_how_a_batch_is_cut_changes_nothing(
    contexts: list[int], programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at all; only one far longer than the others; all that are longer than a tile."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    check(Step(SHAPES[1], contexts, device))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tile", [LARGE, SMALL, *MANY], ids=str)
def test_tiles_of_large_batches(
    tile: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "tile_shape", lambda *_: tile)
    for contexts in MIXED.values():
        check(Step(SHAPES[1], contexts, device))


H200, A100, RTX = (132, 227 << 10), (108, 163 << 10), (84, 99 << 10)


@pytest.mark.parametrize(
    ("gpu", "programs", "row_bytes", "tile"),
    [
        (H200, 8, 256, DEEP),
        (H200, 132, 256, DEEP),  # one on a multiprocessor
        (H200, 136, 256, LARGE),
        (H200, 396, 256, LARGE),  # three
        (H200, 400, 256, SMALL),
        (H200, 528, 256, SMALL),  # four
        (H200, 536, 256, LARGE),
        (H200, 792, 256, LARGE),  # three, twice
        (H200, 800, 256, MANY[1]),  # 1.2 waves of five
        (H200, 1024, 256, MANY[0]),  # 1.6
        (H200, 1280, 256, MANY[0]),  # 1.9
        (H200, 1320, 256, MANY[0]),  # 2
        (H200, 1408, 256, MANY[1]),  # 2.1
        (H200, 1920, 256, MANY[0]),  # 2.9
        (H200, 2048, 256, MANY[1]),  # 3.1
        (H200, 2048, 128, MANY[0]),  # 1.7 waves of nine
        (H200, 2048, 512, (32, 3)),
        (A100, 108, 256, DEEP),
        (A100, 216, 256, LARGE),  # two on a multiprocessor
        (A100, 432, 256, LARGE),
        (A100, 440, 256, MANY[1]),  # 1.02 waves of four
        (RTX, 8, 256, LARGE),  # DEEP does not fit
        (RTX, 168, 256, LARGE),
        (RTX, 169, 256, MANY[1]),
        (RTX, 2048, 512, (32, 3)),
        (RTX, 2048, 1024, (16, 3)),  # float32, head_dim 256
    ],
)
def test_tile_shape(
    gpu: tuple[int, int],
    programs: int,
    row_bytes: int,
    tile: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By how many programs a multiprocessor has, and how many it can run at once."""
    monkeypatch.setattr(decode_kernels, "gpu_limits", lambda device: gpu)
    assert decode_kernels.tile_shape(programs, 2, row_bytes, torch.device("cpu")) == tile


@pytest.mark.parametrize(
    ("gpu", "programs", "tile"),
    [
        (H200, 264, LARGE),
        (H200, 272, DEEP),
        (H200, 528, DEEP),  # two, twice
        (H200, 536, MANY[0]),
        (H200, 1408, MANY[0]),
        (A100, 216, LARGE),
        (A100, 224, MANY[0]),
        (RTX, 169, MANY[0]),
    ],
)
def test_tile_shape_of_large_groups(
    gpu: tuple[int, int], programs: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_kernels, "gpu_limits", lambda device: gpu)
    for group in (4, 8):
        assert decode_kernels.tile_shape(programs, group, 256, torch.device("cpu")) == tile


@pytest.mark.parametrize(("heads", "tile"), [(8, LARGE), (24, LARGE), (32, DEEP), (64, DEEP)])
def test_a_plan_goes_by_the_group(
    heads: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """48 sequences with 8 KV heads, of 1, 3, 4 and 8 query heads each, on an H200."""
    monkeypatch.setattr(decode_kernels, "gpu_limits", lambda device: H200)
    lens = torch.ones(48, dtype=torch.int32, device=device)
    context = Context(False, lens - 2, context_lens=lens, block_tables=lens[:, None] - 1)
    attention = module.DecodeAttention()
    attention.plan(context, heads, torch.empty(0, 16, 8, 128, dtype=F16, device=device))
    assert attention.planned[2] == tile


def test_the_model_plans_for_its_own_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planned(Exception):
        pass

    def plan(self: object, context: Context, num_heads: int, k_cache: torch.Tensor) -> None:
        raise Planned(num_heads)

    monkeypatch.setattr(module.DecodeAttention, "plan", plan)
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    with torch.device("meta"):
        model = Qwen3Model(
            replace(QWEN3_06B, num_hidden_layers=1), torch_attention, TensorParallel()
        )
    ids = torch.tensor([0])
    with use_context(Context(False, ids)), pytest.raises(Planned, match=r"^16$"):
        model(ids, ids)


@pytest.mark.usefixtures("poisoned")
def test_a_batch_of_padding_rows_only(device: torch.device) -> None:
    step = Step(SHAPES[1], [5, 70], device)
    step.context.context_lens.zero_()
    before = step.pool.clone()
    assert step.run(module.DecodeAttention()).isnan().all()
    torch.testing.assert_close(step.pool, before, rtol=0, atol=0, equal_nan=True)


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
    assert {key[0] for key in attention.scratch} == {1, 2, 4, 8, 16}


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


# --- the work list --------------------------------------------------------------------------------


def listed(
    contexts: list[int], shares: int, keys: int, device: torch.device
) -> list[tuple[int, int, int, int]]:
    """The list for these contexts: (sequence, part, parts, positions of each)."""
    work = work_list(torch.tensor(contexts, dtype=torch.int32, device=device), shares, keys)
    assert work.shape == (len(contexts) + shares,)
    items = [
        (x >> 40, x >> 12 & 0xFFF, x & 0xFFF, (x >> 24 & 0xFFFF) * keys) for x in work.tolist()
    ]
    used = next((i for i, item in enumerate(items) if item == (0, 0, 0, 0)), len(items))
    assert set(items[used:]) <= {(0, 0, 0, 0)}, "something stands behind the end"
    return items[:used]


WORK = {
    "a context is cut in two, ties by row, the longest first": (
        [65, 257, 129, 257, 1],  # 704 past positions: two shares are 176, a part at most 192
        [
            *[(1, 0, 2, 128), (1, 1, 2, 128), (2, 0, 1, 128), (3, 0, 2, 128), (3, 1, 2, 128)],
            *[(0, 0, 1, 64), (4, 0, 1, 64)],
        ],
    ),
    "equal contexts are not cut": ([1025] * 4, [(row, 0, 1, 1024) for row in range(4)]),
    "nor are more": ([1025] * 9, [(row, 0, 1, 1024) for row in range(9)]),
    "fewer are": ([1025] * 2, [(row, part, 2, 512) for row in (0, 1) for part in (0, 1)]),
    "one": ([1025], [(0, part, 4, 256) for part in range(4)]),
    "one, short": ([130], [(0, part, 3, 64) for part in range(3)]),
    "no past": ([1], [(0, 0, 1, 64)]),
    "one far longer than the others": (
        [5, 0, 40_001, 9],
        [*((2, part, 8, 5_056) for part in range(8)), (0, 0, 1, 64), (3, 0, 1, 64)],
    ),
    "more than one share of 700": (
        [2801] * 2,
        [(row, part, 3, 960) for row in (0, 1) for part in range(3)],
    ),
    "one share, of 2,000": (
        [8001] * 2,
        [(row, part, 4, 2048) for row in (0, 1) for part in range(4)],
    ),
    "padding rows only": ([0, 0, 0], []),
}


@pytest.mark.parametrize(("contexts", "expected"), WORK.values(), ids=WORK)
def test_work_list(
    contexts: list[int], expected: list[tuple[int, int, int, int]], device: torch.device
) -> None:
    assert listed(contexts, 8, 64, device) == expected


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("num_seqs", "shares"), [(1, 1), (2, 384), (7, 48), (40, 7), (128, 48), (520, 3)]
)
def test_a_work_list_is_complete_and_fits(num_seqs: int, shares: int, device: torch.device) -> None:
    """Every position before the new one in one part, the longest parts first, those of a context
    side by side and none empty, in the space that a CUDA graph keeps for them."""
    lengths = torch.randint(-500, 5000, (num_seqs,)).clamp_min(0).tolist()
    items = listed(lengths, shares, 32, device)
    assert len(items) < num_seqs + shares
    expected = []
    for row in dict.fromkeys(item[0] for item in items):
        _, _, parts, length = next(item for item in items if item[0] == row)
        expected += [(row, part, parts, length) for part in range(parts)]
        past = lengths[row] - 1
        assert (parts - 1) * length < past <= parts * length or (past, parts) == (0, 1)
        assert parts <= shares
    assert items == expected
    assert [item[3] for item in items] == sorted((item[3] for item in items), reverse=True)
    assert {item[0] for item in items} == {row for row, n in enumerate(lengths) if n}


# --- positions and slots --------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 256])
def test_positions_and_slots(block_size: int, device: torch.device) -> None:
    """Of real rows at the edges of blocks, and of padding rows whatever their table holds; the
    table is a part of a wider one."""
    contexts = [1, block_size, block_size + 1, 0, 3 * block_size, 2, 0]
    wide = torch.randint(0, 1000, (len(contexts), 9), dtype=torch.int32)
    tables = wide.to(device)[:, 2:7]
    positions, slots = decode_kernels.positions_and_slots(
        torch.tensor(contexts, dtype=torch.int32, device=device), tables, block_size
    )
    last = [max(context - 1, 0) for context in contexts]
    assert positions.tolist() == last
    assert slots.tolist() == [
        int(tables[row, p // block_size]) * block_size + p % block_size if contexts[row] else -1
        for row, p in enumerate(last)
    ]
    assert positions.dtype == slots.dtype == torch.int32
