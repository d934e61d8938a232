"""Decode attention over the paged pool, one Triton kernel: q/k norm, RoPE, KV store, attention.

Serves any head size, block size and GPU that Triton serves. One program handles one KV head of one
part of a context, its group of query heads being the rows of the products (Dao et al. 2023,
"Flash-Decoding" when a context is cut into several). Needs triton to import.
"""

import math

import torch
import triton
import triton.language as tl

from nanovllm.layers.decode_kernels import merged_parts, tile_shape, work_item, work_list
from nanovllm.layers.fused_kernels import load_halves, norm_and_rotate
from nanovllm.layers.pdl import pdl_launch, pdl_options, pdl_wait
from nanovllm.utils.context import Context

# Equal shares of what is read, over all KV heads: of long contexts two for each multiprocessor of a
# large GPU, of others (see work_list) one.
PROGRAMS = 256


@triton.jit
def _block_of(table_ptr, start, key, end, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """The block of positions start + key: one, or one each where blocks are no multiple of KEYS.
    Positions from `end` on are in no block that is read."""
    at = start if BLOCK_SIZE % KEYS == 0 else start + key
    return tl.load(table_ptr + at // BLOCK_SIZE, mask=at < end, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["num_items"])
def _decode_attention_kernel(
    qkv_ptr,
    qkv_stride,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    context_len_ptr,
    table_ptr,
    table_stride,
    work_ptr,
    num_items,
    out_ptr,
    part_ptr,
    part_stats_ptr,
    counter_ptr,
    log2_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each (item of the work list, KV head), in this order. A CUDA graph fixes how
    many; those behind the list's end return at once.

    Before the wait a program reads only what was finished before the step's first kernel with PDL
    began: the work list, lengths, slots, block tables and weights. qkv comes from this layer.

    The new position's k and v are used from registers by the context's first part, which also
    stores them; all parts read the pool only before that position, so no program reads what another
    one writes."""
    pdl_launch(PDL)
    kv_head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS
    seq, part, num_parts, length = work_item(work_ptr, item, KEYS)
    if num_parts == 0:
        if item == 0:  # of nobody: a kernel's end tells the next that those before it have ended
            pdl_wait(PDL)
    else:
        dtype = qkv_ptr.dtype.element_ty
        first = part * length
        context_len = tl.load(context_len_ptr + seq)
        key = tl.arange(0, KEYS)
        table_ptr += seq * table_stride
        end = tl.minimum(first + length, context_len - 1)
        block = _block_of(table_ptr, first, key, end, BLOCK_SIZE, KEYS)
        slot = tl.load(slot_ptr + seq).to(tl.int64)
        head_at = kv_head * DIM
        qkv_ptr += seq * qkv_stride
        row = tl.arange(0, ROWS)[:, None]
        col = tl.arange(0, HALF)[None, :]
        dim = tl.arange(0, DIM_PADDED)[None, :]
        in_row = col < DIM // 2
        num_new = tl.where(part == 0, DIM, 0)  # the other parts have no use for the new k and v
        new = col < num_new // 2
        q_wa, q_wb = load_halves(q_weight_ptr + col, in_row, DIM)
        k_wa, k_wb = load_halves(k_weight_ptr + col, new, DIM)
        angle = (context_len - 1).to(tl.int64) * (DIM // 2) + col
        cos = tl.load(cos_ptr + angle, mask=in_row, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=in_row, other=0.0)

        pdl_wait(PDL)
        # All loads before the first sum, so that they are waited for once.
        q_from = qkv_ptr + (kv_head * GROUP + row) * DIM + col
        k_from = qkv_ptr + HEADS * DIM + head_at + tl.arange(0, 1)[:, None] * DIM + col
        q_a, q_b = load_halves(q_from, (row < GROUP) & in_row, DIM)
        k_a, k_b = load_halves(k_from, new, DIM)
        v_from = qkv_ptr + (HEADS + KV_HEADS) * DIM + head_at + dim
        new_v = tl.load(v_from, mask=dim < num_new, other=0.0)

        qa, qb = norm_and_rotate(q_a, q_b, q_wa, q_wb, cos, sin, eps, DIM)
        qa, qb = qa.to(dtype), qb.to(dtype)
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        row_sum = tl.zeros((ROWS, KEYS), tl.float32)  # of weights; added up once, at the end
        acc = tl.zeros((ROWS, DIM_PADDED), tl.float32)
        if part == 0:
            new_ka, new_kb = norm_and_rotate(k_a, k_b, k_wa, k_wb, cos, sin, eps, DIM)
            new_ka, new_kb = new_ka.to(dtype), new_kb.to(dtype)
            if slot >= 0:  # -1: padding, skipped without a wait on the host
                # 64-bit: it passes 2^31 in a pool of a few GiB.
                to = slot * (KV_HEADS * DIM) + head_at
                tl.store(k_cache_ptr + to + col, new_ka, mask=in_row)
                tl.store(k_cache_ptr + to + DIM // 2 + col, new_kb, mask=in_row)
                tl.store(v_cache_ptr + to + dim, new_v, mask=dim < DIM)
            product = qa.to(tl.float32) * new_ka.to(tl.float32)
            product += qb.to(tl.float32) * new_kb.to(tl.float32)
            row_max = tl.sum(product, axis=1) * log2_scale
            row_sum += tl.where(key == 0, 1.0, 0.0)[None, :]
            acc += new_v.to(tl.float32)

        half = tl.arange(0, HALF)[:, None]
        for start in range(first, end, KEYS):
            valid = start + key < end
            if BLOCK_SIZE % KEYS == 0:
                slots = block * BLOCK_SIZE + start % BLOCK_SIZE + key
            else:
                slots = block * BLOCK_SIZE + (start + key) % BLOCK_SIZE
            # Known a step ahead, or the loads of k and v would wait for it, and Triton would spend
            # one of its pipeline's stages on it.
            block = _block_of(table_ptr, start + KEYS, key, end, BLOCK_SIZE, KEYS)
            offset = slots * (KV_HEADS * DIM) + head_at
            k_mask = (half < DIM // 2) & valid[None, :]
            ka = tl.load(k_cache_ptr + offset[None, :] + half, mask=k_mask, other=0.0)
            kb = tl.load(k_cache_ptr + offset[None, :] + DIM // 2 + half, mask=k_mask, other=0.0)
            v_mask = valid[:, None] & (dim < DIM)
            v = tl.load(v_cache_ptr + offset[:, None] + dim, mask=v_mask, other=0.0)
            scores = tl.dot(qa, ka, input_precision=PRECISION)
            scores += tl.dot(qb, kb, input_precision=PRECISION)
            scores = tl.where(valid[None, :], scores * log2_scale, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, axis=1))
            p = tl.exp2(scores - new_max[:, None])
            alpha = tl.exp2(row_max - new_max)
            row_sum = row_sum * alpha[:, None] + p
            acc = acc * alpha[:, None] + tl.dot(p.to(dtype), v, input_precision=PRECISION)
            row_max = new_max

        total = tl.sum(row_sum, axis=1)
        out_ptr += (seq * HEADS + kv_head * GROUP) * DIM
        if num_parts == 1:
            out = (acc / total[:, None]).to(dtype)
            tl.store(out_ptr + row * DIM + dim, out, mask=(row < GROUP) & (dim < DIM))
        else:
            # As in the list, the parts of a context are next to each other.
            here = kv_head.to(tl.int64) * num_items + item
            compact = here * (GROUP_PADDED * DIM_PADDED) + row * DIM_PADDED + dim
            tl.store(part_ptr + compact, acc, mask=row < GROUP)
            each = tl.arange(0, ROWS)
            stats = part_stats_ptr + here * (2 * GROUP_PADDED) + each
            tl.store(stats, row_max, mask=each < GROUP)
            tl.store(stats + GROUP_PADDED, total, mask=each < GROUP)
            # All threads' stores come before the count, which releases them to the last program.
            tl.debug_barrier()
            counter_ptr += seq * KV_HEADS + kv_head
            done = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
            if done == num_parts - 1:
                merged = merged_parts(
                    part_ptr,
                    part_stats_ptr,
                    here - part,
                    num_parts,
                    GROUP,
                    GROUP_PADDED,
                    DIM_PADDED,
                )
                head = tl.arange(0, GROUP_PADDED)[:, None]
                mask = (head < GROUP) & (dim < DIM)
                tl.store(out_ptr + head * DIM + dim, merged.to(dtype), mask=mask)
                tl.store(counter_ptr, 0)  # ready for the next launch


class DecodeAttention:
    """The launch of the kernel, the work list of the step, and the scratch space that the parts of
    contexts are merged in.

    One object serves all layers of an engine, whose launches follow each other on one stream.
    """

    def __init__(self) -> None:
        self.scratch: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}
        # A step's context lengths, their work list, and the positions of a tile and stages for it.
        self.planned: tuple[torch.Tensor, torch.Tensor, tuple[int, int]]

    def plan(self, context: Context, num_heads: int, k_cache: torch.Tensor) -> None:
        """Once a step, before its first layer, with any layer's query heads and cache [blocks,
        block_size, kv_heads, d]: see which contexts are to be cut, and where. Between this and the
        first layer's launch must be another kernel, launched without PDL."""
        *_, num_kv_heads, head_dim = k_cache.shape
        lens = context.context_lens
        row_bytes = triton.next_power_of_2(head_dim) * k_cache.element_size()
        group = num_heads // num_kv_heads
        tile = tile_shape(len(lens) * num_kv_heads, group, row_bytes, lens.device)
        shares = max(PROGRAMS // num_kv_heads, 1)
        self.planned = lens, work_list(lens, shares, keys=tile[0]), tile

    def __call__(
        self,
        qkv: torch.Tensor,
        num_kv_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        context: Context,
        scale: float,
    ) -> torch.Tensor:
        """qkv [N, heads + 2 kv_heads, d], one new position per sequence, not normalized or rotated
        yet -> [N, heads, d]. Writes the new k and v to context.slot_mapping of the caches [blocks,
        block_size, kv_heads, d]. A row of context length 0 is left unwritten. `plan` has seen the
        context."""
        lens, work, (keys, num_stages) = self.planned
        assert lens is context.context_lens
        num_seqs, num_rows, head_dim = qkv.shape
        assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim
        num_heads = num_rows - 2 * num_kv_heads
        group = num_heads // num_kv_heads
        group_padded = triton.next_power_of_2(group)
        rows = max(group_padded, 16)  # the least that a tensor core takes
        dim_padded = max(triton.next_power_of_2(head_dim), 16)
        num_items = len(work)
        out = torch.empty(num_seqs, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
        shape = (num_items - num_seqs, num_kv_heads, group_padded, dim_padded)
        parts, stats, counters = self._scratch(num_seqs, shape, qkv.device)
        _decode_attention_kernel[(num_items * num_kv_heads,)](
            qkv,
            qkv.stride(0),
            cos,
            sin,
            q_weight,
            k_weight,
            eps,
            k_cache,
            v_cache,
            context.slot_mapping,
            context.context_lens,
            context.block_tables,
            context.block_tables.stride(0),
            work,
            num_items,
            out,
            parts,
            stats,
            counters,
            scale * math.log2(math.e),  # the kernel's exponentials are powers of two
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            GROUP=group,
            DIM=head_dim,
            BLOCK_SIZE=k_cache.shape[1],
            ROWS=rows,
            GROUP_PADDED=group_padded,
            HALF=max(triton.next_power_of_2(head_dim // 2), 16),
            DIM_PADDED=dim_padded,
            KEYS=keys,
            PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=num_stages,
            **pdl_options(qkv),
        )
        return out

    def _scratch(
        self, num_seqs: int, shape: tuple[int, ...], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Partial results of num_seqs + shares items [items, kv_heads, rows, dim], their maxima and
        sums, and counters that are 0 between launches. Kept: a CUDA graph remembers where."""
        num_seqs = triton.next_power_of_2(num_seqs)  # so that batches of all sizes share a few
        key = (num_seqs, *shape)
        if key not in self.scratch:
            shares, kv_heads, rows, dim_padded = shape
            parts = (num_seqs + shares) * kv_heads * rows
            self.scratch[key] = (
                torch.empty(parts * dim_padded, dtype=torch.float32, device=device),
                torch.empty(parts * 2, dtype=torch.float32, device=device),
                torch.zeros(num_seqs * kv_heads, dtype=torch.int32, device=device),
            )
        return self.scratch[key]
