"""Attention over the paged KV pool, behind one function type with two implementations.

FlashAttention (3 on Hopper where it is installed, else 2) where it can serve the model,
`torch_attention` everywhere else; the latter is also what the tests hold every other path against.
On GPUs this is the prefill's attention: decode has a kernel of its own, decode_attention.py.
"""

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.utils.context import Context, get_context

try:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
except (ImportError, OSError):  # not installed, or built for other libraries than are here
    flash_attn_varlen_func = flash_attn_with_kvcache = None
try:  # FlashAttention-3
    from flash_attn_interface import flash_attn_varlen_func as flash3_varlen_func
    from flash_attn_interface import flash_attn_with_kvcache as flash3_with_kvcache
except (ImportError, OSError):
    flash3_varlen_func = flash3_with_kvcache = None

logger = logging.getLogger(__name__)

# (q [T, heads, d], k and v [T, kv_heads, d] of this step, k_cache and v_cache [num_blocks,
# block_size, kv_heads, d] in which k and v are stored already, context, scale) -> [T, heads, d].
# Query position i of a sequence attends to its positions up to and including i.
AttentionFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Context, float],
    torch.Tensor,
]


def torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context: Context,
    scale: float,
) -> torch.Tensor:
    """Plain torch, any device, dtype, head_dim and block size. Reads lengths on the host, so it
    does not go into a CUDA graph."""
    if not context.is_prefill:
        return _torch_decode(q, k_cache, v_cache, context, scale)
    out = torch.empty_like(q)
    ends_q, ends_k = context.cu_seqlens_q.tolist(), context.cu_seqlens_k.tolist()
    for i in range(len(ends_q) - 1):
        rows = slice(ends_q[i], ends_q[i + 1])
        len_q, len_k = ends_q[i + 1] - ends_q[i], ends_k[i + 1] - ends_k[i]
        keys, values = k[rows], v[rows]
        if context.block_tables is not None:
            slots = _slots(context.block_tables[i : i + 1], len_k, k_cache.shape[1])[0]
            keys, values = k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots]
        is_whole, mask = len_q == len_k, None
        if not is_whole:  # or torch has kernels that need no mask
            # Query row r is position len_k - len_q + r: the causal mask is aligned bottom right.
            mask = torch.ones(len_q, len_k, dtype=torch.bool, device=q.device).tril(len_k - len_q)
        attended = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],  # [1, heads, len_q, d]: such kernels want a batch
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=is_whole,
            scale=scale,
            enable_gqa=True,
        )
        out[rows] = attended[0].transpose(0, 1)
    return out


def _torch_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: Context, scale: float
) -> torch.Tensor:
    """One query position per sequence, all sequences at once, padded to the longest context."""
    longest = int(context.context_lens.max())
    slots = _slots(context.block_tables, longest, k_cache.shape[1])  # [N, L]
    mask = torch.arange(longest, device=q.device) < context.context_lens.unsqueeze(1)  # [N, L]
    # Zero where the mask hides it: it may be NaN, and so would the whole row be.
    keys, values = (
        cache.flatten(0, 1)[slots].masked_fill(~mask[:, :, None, None], 0).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )  # [N, kv_heads, L, d]
    out = F.scaled_dot_product_attention(
        q.unsqueeze(2),  # [N, heads, 1, d]
        keys,
        values,
        attn_mask=mask[:, None, None, :],
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(2)


def _slots(block_tables: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """Pool slots of positions 0..length-1: [N, length]. A table's -1 padding reads slot 0 and up,
    whose content the caller masks out."""
    positions = torch.arange(length, device=block_tables.device)
    blocks = block_tables[:, positions // block_size].clamp_min(0).long()
    return blocks * block_size + positions % block_size


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context: Context,
    scale: float,
) -> torch.Tensor:
    """FlashAttention-2 (Dao 2023); CUDA, half precision, block size a multiple of 256."""
    if context.is_prefill:
        if context.block_tables is not None:  # history: this step's K/V are in the pool as well
            k, v = k_cache, v_cache
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=context.cu_seqlens_q,
            cu_seqlens_k=context.cu_seqlens_k,
            max_seqlen_q=context.max_seqlen_q,
            max_seqlen_k=context.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            block_table=context.block_tables,
        )
    return flash_attn_with_kvcache(
        q.unsqueeze(1),  # [N, 1, heads, d]
        k_cache,
        v_cache,
        cache_seqlens=context.context_lens,
        block_table=context.block_tables,
        softmax_scale=scale,
        causal=True,
    ).squeeze(1)


def flash3_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context: Context,
    scale: float,
) -> torch.Tensor:
    """FlashAttention-3 (Shah et al. 2024); Hopper, half precision."""
    if context.is_prefill and context.block_tables is None:
        return flash3_varlen_func(
            q,
            k,
            v,
            context.cu_seqlens_q,
            context.cu_seqlens_k,
            context.max_seqlen_q,
            context.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
        )
    if context.is_prefill:
        return flash3_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=context.cu_seqlens_k.diff(),
            page_table=context.block_tables,
            cu_seqlens_q=context.cu_seqlens_q,
            max_seqlen_q=context.max_seqlen_q,
            softmax_scale=scale,
            causal=True,
        )
    return flash3_with_kvcache(
        q.unsqueeze(1),
        k_cache,
        v_cache,
        cache_seqlens=context.context_lens,
        page_table=context.block_tables,
        softmax_scale=scale,
        causal=True,
    ).squeeze(1)


def select_attention(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> AttentionFunction:
    """Choose the fastest implementation that works here, once per engine. The runner logs the
    choice; on a GPU, where plain torch makes prefill slow, a warning gives the reason."""
    if device.type != "cuda":
        return torch_attention
    for name, function, varlen in (
        ("FlashAttention-3", flash3_attention, flash3_varlen_func),
        ("FlashAttention-2", flash_attention, flash_attn_varlen_func),
    ):
        reason = _why_not(name, varlen, device, dtype, head_dim, block_size)
        if reason is None:
            return function
    logger.warning("prefill attention in plain torch, since %s", reason)
    return torch_attention


def _why_not(
    name: str,
    varlen: Callable[..., torch.Tensor] | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
) -> str | None:
    if varlen is None:
        return f"{name} is not installed (pip install '.[cuda]' brings flash-attn)"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{name} does not serve {dtype}"
    if block_size % 256:
        return f"{name} is used with kvcache_block_size in multiples of 256, not {block_size}"
    # Builds differ in the head sizes and GPUs they contain, so ask this one by a one-token run.
    x = torch.zeros(1, 1, head_dim, dtype=dtype, device=device)
    ends = torch.tensor([0, 1], dtype=torch.int32, device=device)
    try:
        varlen(x, x, x, ends, ends, 1, 1, causal=True)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"this build of {name} refuses head_dim {head_dim} on this GPU ({error})"
    return None


class Attention(nn.Module):
    """Stores this step's K and V in its layer's part of the pool, then attends.

    `k_cache` and `v_cache` are [num_blocks, block_size, kv_heads, head_dim] views, set by the
    runner once the pool exists; until then (warm-up) nothing is stored.
    """

    def __init__(self, attention: AttentionFunction, scale: float) -> None:
        super().__init__()
        self.attention = attention
        self.scale = scale
        self.k_cache = self.v_cache = torch.empty(0)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d]"""
        if self.k_cache.numel():
            store_kv(k, v, self.k_cache, self.v_cache, get_context().slot_mapping)
        return self.attend(q, k, v)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `forward`, for k and v that are in the pool already."""
        return self.attention(q, k, v, self.k_cache, self.v_cache, get_context(), self.scale)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write k and v [T, kv_heads, d] to their slots [T] of the caches; slot -1 is skipped.

    Plain torch, which waits for the device. Where Triton serves the device the fused kernels
    (fused_kernels.py, decode_attention.py) store instead, with 64-bit offsets and -1 skipped
    inside the kernel.
    """
    kept = slot_mapping >= 0
    k_cache.flatten(0, 1)[slot_mapping[kept].long()] = k[kept]
    v_cache.flatten(0, 1)[slot_mapping[kept].long()] = v[kept]
