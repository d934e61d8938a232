"""torch_attention, the oracle of every other path, against a naive float64 softmax; the choice of
the path; and the Attention layer that stores before it attends."""

import logging
import math

import pytest
import torch

from nanovllm.layers import attention as attention_module
from nanovllm.layers.attention import Attention, select_attention, store_kv, torch_attention
from nanovllm.utils.context import Context, use_context

KV_HEADS = 2


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence, one query at a time, in float64: q [len_q, heads, d] are its last positions,
    k and v [len_k, kv_heads, d] all of them."""
    q, k, v = q.double(), k.double(), v.double()
    (len_q, num_heads, head_dim), len_k = q.shape, len(k)
    out = torch.empty_like(q)
    for row in range(len_q):
        visible = len_k - len_q + row + 1
        for head in range(num_heads):
            kv_head = head // (num_heads // k.shape[1])
            scores = k[:visible, kv_head] @ q[row, head] / math.sqrt(head_dim)
            weights = torch.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ v[:visible, kv_head]
    return out


class PagedStep:
    """A step over sequences of the given lengths, whose K/V stand in a pool out of order. What the
    pool holds elsewhere is NaN, as a request whose logits overflowed may have left it."""

    def __init__(
        self, lens_q: list[int], lens_k: list[int], group: int, head_dim: int, block_size: int
    ) -> None:
        self.lens_q, self.block_size, self.scale = lens_q, block_size, head_dim**-0.5
        counts = [-(-length // block_size) for length in lens_k]
        # Two spare blocks, so that some of the pool belongs to nobody, and block 0 may.
        shuffled = torch.randperm(sum(counts) + 2)[: sum(counts)].split(counts)
        self.tables = torch.full((len(lens_k), max(counts) + 1), -1, dtype=torch.int32)
        for row, table in zip(self.tables, shuffled, strict=True):
            row[: len(table)] = table
        pool = torch.full((2, sum(counts) + 2, block_size, KV_HEADS, head_dim), torch.nan)
        self.k_cache, self.v_cache = pool
        self.q = [torch.randn(length, KV_HEADS * group, head_dim) for length in lens_q]
        self.k = [torch.randn(length, KV_HEADS, head_dim) for length in lens_k]
        self.v = [torch.randn(length, KV_HEADS, head_dim) for length in lens_k]
        for table, k, v in zip(shuffled, self.k, self.v, strict=True):
            for position in range(len(k)):
                block, offset = table[position // block_size], position % block_size
                self.k_cache[block, offset], self.v_cache[block, offset] = k[position], v[position]

    def context(self, is_prefill: bool, paged: bool) -> Context:
        lens_k = [len(k) for k in self.k]
        as_ends = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (self.lens_q, lens_k)]
        unused = torch.full((sum(self.lens_q),), -1, dtype=torch.int32)
        tables = self.tables if paged else None
        if not is_prefill:
            lens = torch.tensor(lens_k, dtype=torch.int32)
            return Context(False, unused, context_lens=lens, block_tables=tables)
        return Context(True, unused, *as_ends, max(self.lens_q), max(lens_k), block_tables=tables)

    def check(self, is_prefill: bool, paged: bool) -> None:
        """Run torch_attention and compare it with the naive one."""
        # This step's own k and v: the last len_q positions of each sequence.
        new_k, new_v = (
            torch.cat([x[len(x) - n :] for x, n in zip(whole, self.lens_q, strict=True)])
            for whole in (self.k, self.v)
        )
        context = self.context(is_prefill, paged)
        out = torch_attention(
            torch.cat(self.q), new_k, new_v, self.k_cache, self.v_cache, context, self.scale
        )
        expected = torch.cat(
            [naive_attention(*x) for x in zip(self.q, self.k, self.v, strict=True)]
        )
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


every_shape = pytest.mark.parametrize(
    ("group", "head_dim"), [(1, 16), (2, 24), (4, 24), (2, 64), (4, 80), (1, 80)]
)
every_block_size = pytest.mark.parametrize("block_size", [1, 4, 256])


@every_shape
def test_prefill_without_history(group: int, head_dim: int) -> None:
    """Several prompts side by side, one of a single position; the pool is not looked at."""
    PagedStep([5, 1, 9], [5, 1, 9], group, head_dim, 4).check(is_prefill=True, paged=False)


@every_block_size
@every_shape
def test_prefill_with_history(group: int, head_dim: int, block_size: int) -> None:
    """A later chunk (4 of 13), a prefix hit with one position left (1 of 9), and a fresh prompt."""
    step = PagedStep([4, 1, 6], [13, 9, 6], group, head_dim, block_size)
    step.check(is_prefill=True, paged=True)


@every_block_size
@every_shape
def test_decode(group: int, head_dim: int, block_size: int) -> None:
    """Contexts on both sides of a block boundary, in tables padded with -1."""
    step = PagedStep([1] * 5, [1, 4, 5, 8, 13], group, head_dim, block_size)
    step.check(is_prefill=False, paged=True)


def test_history_over_several_blocks_of_256() -> None:
    """The chunk example's 188 of 700 positions, next to a fresh prompt of 32."""
    PagedStep([188, 32], [700, 32], 1, 16, 256).check(is_prefill=True, paged=True)


def test_padding_rows_change_no_other_row() -> None:
    """Rows with context length 0, slot -1 and an empty table, as CUDA graphs add them."""
    step = PagedStep([1, 1], [9, 5], 2, 16, 4)
    context = step.context(is_prefill=False, paged=True)
    q, k, v = torch.cat(step.q), torch.zeros(2, KV_HEADS, 16), torch.zeros(2, KV_HEADS, 16)
    alone = torch_attention(q, k, v, step.k_cache, step.v_cache, context, step.scale)
    padded = Context(
        is_prefill=False,
        slot_mapping=torch.full((4,), -1, dtype=torch.int32),
        context_lens=torch.cat((context.context_lens, torch.zeros(2, dtype=torch.int32))),
        block_tables=torch.cat((step.tables, torch.full_like(step.tables, -1))),
    )
    rows = torch.cat((q, q))
    out = torch_attention(rows, rows, rows, step.k_cache, step.v_cache, padded, step.scale)
    torch.testing.assert_close(out[:2], alone)


def test_scale_is_the_callers() -> None:
    """A scale next to 0 gives the mean of the values that a position may see."""
    v = torch.randn(4, 1, 16)
    x, ends = torch.randn(4, 1, 16), torch.tensor([0, 4], dtype=torch.int32)
    context = Context(True, torch.full((4,), -1), ends, ends, 4, 4)
    out = torch_attention(x, x, v, torch.empty(0), torch.empty(0), context, 1e-9)
    means = torch.stack([v[: i + 1].mean(0) for i in range(4)])
    torch.testing.assert_close(out, means)


# --- the layer ------------------------------------------------------------------------------------


def test_layer_stores_before_it_attends() -> None:
    """In decode the new position is read back from the pool, so it must have been written; the
    skipped row writes nothing. Head_dim 24, as in case 33."""
    layer = Attention(torch_attention, 24**-0.5)
    layer.k_cache, layer.v_cache = torch.zeros(2, 3, 4, 2, 24)
    q, k, v = torch.randn(2, 4, 24), torch.randn(2, 2, 24), torch.randn(2, 2, 24)
    context = Context(
        is_prefill=False,
        slot_mapping=torch.tensor([8, -1], dtype=torch.int32),
        context_lens=torch.tensor([1, 0], dtype=torch.int32),
        block_tables=torch.tensor([[2], [-1]], dtype=torch.int32),
    )
    with use_context(context):
        out = layer(q, k, v)
    # A position that sees only itself gets its own value, in each query head of the group.
    torch.testing.assert_close(out[0], v[0].repeat_interleave(2, dim=0))
    assert torch.equal(layer.k_cache[2, 0], k[0]) and torch.equal(layer.v_cache[2, 0], v[0])
    layer.k_cache[2, 0] = layer.v_cache[2, 0] = 0
    assert not layer.k_cache.any() and not layer.v_cache.any()


def test_layer_without_a_pool_stores_nothing() -> None:
    """The warm-up runs before there is a pool."""
    layer = Attention(torch_attention, 0.25)
    x, ends = torch.randn(3, 2, 16), torch.tensor([0, 3], dtype=torch.int32)
    with use_context(Context(True, torch.arange(3, dtype=torch.int32), ends, ends, 3, 3)):
        out = layer(x, x, x)
    torch.testing.assert_close(out.double(), naive_attention(x, x, x), atol=1e-6, rtol=1e-5)
    assert layer.k_cache.numel() == layer.v_cache.numel() == 0


# --- the choice -----------------------------------------------------------------------------------


def test_cpu_takes_torch_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the dtype, head_dim and block size; the runner's one line names the choice."""
    caplog.set_level(logging.INFO, logger="nanovllm")
    assert select_attention(torch.device("cpu"), torch.float32, 24, 3) is torch_attention
    assert not caplog.records


@pytest.mark.parametrize(
    ("installed", "dtype", "block_size", "reason"),
    [
        (False, torch.bfloat16, 256, "FlashAttention-2 is not installed (pip install '.[cuda]'"),
        (True, torch.float32, 256, "FlashAttention-2 does not serve torch.float32"),
        (True, torch.float16, 128, "kvcache_block_size in multiples of 256, not 128"),
    ],
)
def test_gpu_without_flash_attention_is_warned(
    installed: bool,
    dtype: torch.dtype,
    block_size: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """None of these reasons needs a look at the GPU, so no GPU is needed here."""
    stand_in = (lambda *_: None) if installed else None
    for function in ("flash_attn_varlen_func", "flash3_varlen_func"):
        monkeypatch.setattr(attention_module, function, stand_in)
    assert select_attention(torch.device("cuda"), dtype, 128, block_size) is torch_attention
    (record,) = caplog.records
    assert record.levelname == "WARNING" and reason in record.getMessage()


@pytest.mark.parametrize(
    ("serve", "chosen"),
    [
        ({"FlashAttention-3", "FlashAttention-2"}, attention_module.flash3_attention),
        ({"FlashAttention-3"}, attention_module.flash3_attention),
        ({"FlashAttention-2"}, attention_module.flash_attention),
    ],
)
def test_gpu_takes_the_newest_flash_attention_that_serves(
    serve: set[str],
    chosen: attention_module.AttentionFunction,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a warning; test_gpu.py asks the real ones."""
    monkeypatch.setattr(
        attention_module, "_why_not", lambda name, *_: None if name in serve else "it cannot"
    )
    assert select_attention(torch.device("cuda"), torch.bfloat16, 128, 256) is chosen
    assert not caplog.records


def test_store_skips_minus_one_without_touching_the_last_slot() -> None:
    """As an index -1 would be the last slot of the pool."""
    caches = torch.zeros(2, 2, 4, 1, 16)
    store_kv(torch.ones(1, 1, 16), torch.ones(1, 1, 16), *caches, torch.tensor([-1]))
    assert not caches.any()
