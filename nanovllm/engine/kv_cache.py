"""KV cache: how many blocks fit, and the one tensor that holds them all."""

from math import prod

import torch

from nanovllm.models.qwen3 import Qwen3ForCausalLM

CPU_POOL_BYTES = 1 << 30


def kv_shape(model: Qwen3ForCausalLM, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Of the pool of this rank: [2, layers, num_blocks, block_size, kv_heads, head_dim]."""
    layers = model.model.layers
    attention = layers[0].self_attn
    num_kv_heads = attention.qkv_proj.num_kv_heads
    return (2, len(layers), num_blocks, block_size, num_kv_heads, attention.head_dim)


def kv_block_bytes(model: Qwen3ForCausalLM, block_size: int) -> int:
    """Bytes of one block: K and V of every layer for block_size positions on this rank."""
    return prod(kv_shape(model, 1, block_size)) * model.lm_head.weight.itemsize


def num_blocks_that_fit(
    total: int, used: int, peak: int, current: int, utilization: float, block_bytes: int
) -> int:
    """floor((total * utilization - used - peak + current) / block_bytes), at least 0.

    total and used are the driver's bytes for the whole GPU, peak and current torch's allocated
    bytes at the height of the warm-up and now: their difference must stay free for activations.
    """
    return max(int((total * utilization - used - peak + current) // block_bytes), 0)


def measure_num_blocks(device: torch.device, utilization: float, block_bytes: int) -> int:
    """Blocks that fit on `device` now. On a GPU call it after the warm-up, which set the peak."""
    if device.type == "cpu":
        return CPU_POOL_BYTES // block_bytes
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # cached segments of the warm-up would count as used
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    return num_blocks_that_fit(
        total=total,
        used=total - free,
        peak=stats["allocated_bytes.all.peak"],
        current=stats["allocated_bytes.all.current"],
        utilization=utilization,
        block_bytes=block_bytes,
    )


def check_pool(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Raise ValueError, naming the largest max_model_len that would fit, if the pool cannot hold
    one sequence of max_model_len."""
    num_positions = num_blocks * block_size
    if num_positions < max_model_len:
        shorter = f"set max_model_len to at most {num_positions}, or " if num_positions > 1 else ""
        raise ValueError(
            f"the memory left for the KV cache holds {num_positions} positions ({num_blocks} "
            f"blocks of {block_size}), less than max_model_len={max_model_len}: {shorter}raise "
            "gpu_memory_utilization (on a CPU: num_kvcache_blocks)"
        )


def allocate_kv_cache(model: Qwen3ForCausalLM, num_blocks: int, block_size: int) -> torch.Tensor:
    """Make the pool, in the model's dtype and on its device, and give each layer of `model` its K
    and V slices. Raises ValueError if memory does not suffice.

    Zeros, not garbage: attention may load whole tiles of K and V, past a sequence's end as well,
    and multiply those positions by 0; 0 * NaN is NaN.
    """
    weight = model.lm_head.weight
    shape = kv_shape(model, num_blocks, block_size)
    try:
        pool = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
    except RuntimeError as error:  # out of memory, or a size that overflows the allocator
        gib = kv_block_bytes(model, block_size) * num_blocks / 2**30
        raise ValueError(
            f"no memory for a KV pool of {num_blocks} blocks ({gib:,.1f} GiB): lower "
            f"num_kvcache_blocks, or leave it out ({error})"
        ) from error
    for layer, k_cache, v_cache in zip(model.model.layers, pool[0], pool[1], strict=True):
        layer.self_attn.attn.k_cache, layer.self_attn.attn.v_cache = k_cache, v_cache
    return pool
