"""Decode attention over the paged pool, one Triton kernel: q/k norm, RoPE, KV store, attention.

Serves any head size, block size and GPU that Triton serves. One program handles one KV head of one
sequence, its group of query heads being the rows of the products (Dao et al. 2023, "Flash-Decoding"
when the context is split). Needs triton to import.
"""

import torch
import triton
import triton.language as tl

from nanovllm.layers.decode_kernels import merged_parts
from nanovllm.layers.fused_kernels import load_halves, norm_and_rotate
from nanovllm.layers.pdl import pdl_launch, pdl_wait, use_pdl
from nanovllm.utils.context import Context

KEYS = 64  # positions per inner step


@triton.jit
def _block_of(table_ptr, start, key, end, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """The block of positions start + key: one, or one each where blocks are no multiple of KEYS.
    Positions from `end` on are in no block that is read."""
    at = start if BLOCK_SIZE % KEYS == 0 else start + key
    return tl.load(table_ptr + at // BLOCK_SIZE, mask=at < end, other=0).to(tl.int64)


@triton.jit
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
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    SMALL: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each (sequence, split, KV head), in this order. A context is cut into parts of
    PART positions, or longer ones if SPLITS of them do not hold it; the programs of the splits that
    are left have nothing to do. They come between others: at the end of the launch, where the GPU
    runs empty, they would be waited for.

    The new position's k and v are used from registers by split 0, which also stores them; all
    splits read the pool only before that position, so no program reads what another one writes."""
    pdl_launch(PDL)
    pdl_wait(PDL)
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS % SPLITS
    seq = tl.program_id(0) // (KV_HEADS * SPLITS)
    context_len = tl.load(context_len_ptr + seq)
    num_old = context_len - 1
    per_split = tl.maximum(tl.cdiv(tl.cdiv(num_old, SPLITS), KEYS) * KEYS, PART)
    num_splits = tl.maximum(tl.cdiv(num_old, per_split), 1)
    if (context_len > 0) & (split < num_splits):  # length 0 marks a padding row of a CUDA graph
        dtype = qkv_ptr.dtype.element_ty
        first = split * per_split
        end = tl.minimum(first + per_split, num_old)
        key = tl.arange(0, KEYS)
        table_ptr += seq.to(tl.int64) * table_stride
        block = _block_of(table_ptr, first, key, end, BLOCK_SIZE, KEYS)
        qkv_ptr += seq.to(tl.int64) * qkv_stride
        row = tl.arange(0, ROWS)[:, None]
        col = tl.arange(0, HALF)[None, :]
        wide = tl.arange(0, WIDE)[None, :]
        in_row = col < DIM // 2
        # All loads before the first sum, so that they are waited for once.
        head_at = kv_head * DIM
        q_from = qkv_ptr + (kv_head * GROUP + row) * DIM + col
        k_from = qkv_ptr + HEADS * DIM + head_at + tl.arange(0, 1)[:, None] * DIM + col
        num_new = tl.where(split == 0, DIM, 0)  # the other splits have no use for the new k and v
        new = col < num_new // 2
        q_a, q_b = load_halves(q_from, (row < GROUP) & in_row, DIM)
        k_a, k_b = load_halves(k_from, new, DIM)
        q_wa, q_wb = load_halves(q_weight_ptr + col, in_row, DIM)
        k_wa, k_wb = load_halves(k_weight_ptr + col, new, DIM)
        angle = (context_len - 1).to(tl.int64) * (DIM // 2) + col
        cos = tl.load(cos_ptr + angle, mask=in_row, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=in_row, other=0.0)
        v_from = qkv_ptr + (HEADS + KV_HEADS) * DIM + head_at + wide
        new_v = tl.load(v_from, mask=wide < num_new, other=0.0)
        slot = tl.load(slot_ptr + seq).to(tl.int64)

        qa, qb = norm_and_rotate(q_a, q_b, q_wa, q_wb, cos, sin, eps, DIM)
        qa, qb = qa.to(dtype), qb.to(dtype)
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        sums = tl.zeros((ROWS, KEYS), tl.float32)  # of weights; added up once, at the end
        acc = tl.zeros((ROWS, WIDE), tl.float32)
        if split == 0:
            new_ka, new_kb = norm_and_rotate(k_a, k_b, k_wa, k_wb, cos, sin, eps, DIM)
            new_ka, new_kb = new_ka.to(dtype), new_kb.to(dtype)
            if slot >= 0:  # -1: padding, skipped without a wait on the host
                # 64-bit: it passes 2^31 in a pool of a few GiB.
                to = slot * (KV_HEADS * DIM) + head_at
                tl.store(k_cache_ptr + to + col, new_ka, mask=in_row)
                tl.store(k_cache_ptr + to + DIM // 2 + col, new_kb, mask=in_row)
                tl.store(v_cache_ptr + to + wide, new_v, mask=wide < DIM)
            product = qa.to(tl.float32) * new_ka.to(tl.float32)
            product += qb.to(tl.float32) * new_kb.to(tl.float32)
            best = tl.sum(product, axis=1) * log2_scale
            sums += tl.where(key == 0, 1.0, 0.0)[None, :]
            acc += new_v.to(tl.float32)

        half = tl.arange(0, HALF)[:, None]
        in_half = half < DIM // 2
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
            k_mask = in_half & valid[None, :]
            ka = tl.load(k_cache_ptr + offset[None, :] + half, mask=k_mask, other=0.0)
            kb = tl.load(k_cache_ptr + offset[None, :] + DIM // 2 + half, mask=k_mask, other=0.0)
            v_mask = valid[:, None] & (wide < DIM)
            v = tl.load(v_cache_ptr + offset[:, None] + wide, mask=v_mask, other=0.0)
            scores = tl.dot(qa, ka, input_precision=PRECISION)
            scores += tl.dot(qb, kb, input_precision=PRECISION)
            scores = tl.where(valid[None, :], scores * log2_scale, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            weight = tl.exp2(scores - new_best[:, None])
            fade = tl.exp2(best - new_best)
            sums = sums * fade[:, None] + weight
            acc = acc * fade[:, None] + tl.dot(weight.to(dtype), v, input_precision=PRECISION)
            best = new_best

        total = tl.sum(sums, axis=1)
        out_mask = (row < GROUP) & (wide < DIM)
        out_at = (seq.to(tl.int64) * HEADS + kv_head * GROUP + row) * DIM + wide
        if num_splits == 1:
            tl.store(out_ptr + out_at, (acc / total[:, None]).to(dtype), mask=out_mask)
        else:
            group = seq.to(tl.int64) * KV_HEADS + kv_head
            part = group * SPLITS + split
            compact = part * (SMALL * WIDE) + row * WIDE + wide
            tl.store(part_ptr + compact, acc, mask=(row < GROUP) & (wide < WIDE))
            stats = part_stats_ptr + part * (2 * SMALL) + tl.arange(0, ROWS)
            in_group = tl.arange(0, ROWS) < GROUP
            tl.store(stats, best, mask=in_group)
            tl.store(stats + SMALL, total, mask=in_group)
            # All threads' stores come before the count, which releases them to the last program.
            tl.debug_barrier()
            done = tl.atomic_add(counter_ptr + group, 1, sem="acq_rel")
            if done == num_splits - 1:
                first_part = group * SPLITS
                merged = merged_parts(
                    part_ptr, part_stats_ptr, first_part, num_splits, GROUP, SPLITS, SMALL, WIDE
                )
                head = tl.arange(0, SMALL)[:, None]
                to = (seq.to(tl.int64) * HEADS + kv_head * GROUP + head) * DIM + wide
                tl.store(out_ptr + to, merged.to(dtype), mask=(head < GROUP) & (wide < DIM))
                tl.store(counter_ptr + group, 0)  # ready for the next launch


def split_limits(num_seqs: int, num_kv_heads: int) -> tuple[int, int, int]:
    """(most splits of a context, a power of two; positions of one, a multiple of KEYS; num_stages)
    for a batch.

    A small batch needs splits to fill the GPU, and each program two tiles of keys in flight to keep
    the memory busy. A large one fills it, with more programs on a multiprocessor the less of its
    memory each takes; it is cut so that the last ones do not run alone for long."""
    programs = num_seqs * num_kv_heads
    if programs <= 128:
        return (16 if programs <= 16 else 8), 128, 3
    return 8, 256, 2


class DecodeAttention:
    """The launch of the kernel, and the scratch space that split contexts are merged in.

    One object serves all layers of an engine, whose launches follow each other on one stream.
    """

    def __init__(self) -> None:
        self.scratch: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}

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
        block_size, kv_heads, d]. A row of context length 0 is left unwritten."""
        num_seqs, num_rows, head_dim = qkv.shape
        assert qkv.stride(2) == 1 and qkv.stride(1) == head_dim
        num_heads = num_rows - 2 * num_kv_heads
        group = num_heads // num_kv_heads
        splits, part, num_stages = split_limits(num_seqs, num_kv_heads)
        small = triton.next_power_of_2(group)
        rows = max(small, 16)  # the least that a tensor core takes
        wide = max(triton.next_power_of_2(head_dim), 16)
        if wide * qkv.element_size() > 256:
            num_stages = 2  # not every GPU has the shared memory for two such tiles of k and of v
        out = torch.empty(num_seqs, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
        groups = num_seqs * num_kv_heads
        parts, stats, counters = self._scratch(groups, splits, small, wide, qkv.device)
        pdl = use_pdl(qkv)
        _decode_attention_kernel[(num_seqs * num_kv_heads * splits,)](
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
            out,
            parts,
            stats,
            counters,
            scale * 1.4426950408889634,  # log2(e): the kernel's exponentials are powers of two
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            GROUP=group,
            DIM=head_dim,
            BLOCK_SIZE=k_cache.shape[1],
            SPLITS=splits,
            ROWS=rows,
            SMALL=small,
            HALF=max(triton.next_power_of_2(head_dim // 2), 16),
            WIDE=wide,
            KEYS=KEYS,
            PART=part,
            PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
            PDL=pdl,
            num_warps=4,
            num_stages=num_stages,
            **({"launch_pdl": True} if pdl else {}),
        )
        return out

    def _scratch(
        self, groups: int, splits: int, rows: int, wide: int, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Partial results [groups, splits, rows, wide], their maxima and sums, and counters that
        are 0 between launches. Kept: a CUDA graph remembers the addresses."""
        groups = triton.next_power_of_2(groups)  # so that batches of all sizes share a few
        key = (groups, splits, rows, wide)
        if key not in self.scratch:
            self.scratch[key] = (
                torch.empty(groups * splits * rows * wide, dtype=torch.float32, device=device),
                torch.empty(groups * splits * rows * 2, dtype=torch.float32, device=device),
                torch.zeros(groups, dtype=torch.int32, device=device),
            )
        return self.scratch[key]
