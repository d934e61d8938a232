"""Writing K and V into the paged pool: the Triton kernel (in Triton's interpreter where there is no
GPU) and the plain torch form give exactly the same pool."""

from collections.abc import Callable

import pytest
import torch

from nanovllm.layers.attention import store_kv

kv_store = pytest.importorskip("nanovllm.layers.kv_store", reason="triton is not installed")

Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

both_forms = pytest.mark.parametrize("store", [store_kv, kv_store.store_kv_triton])
UNTOUCHED = 7.0


def make_step(
    slots: list[int], num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k, v, slot_mapping). v is a part of one projection's output, as in the model: its rows are
    dense, but lie apart."""
    k = torch.randn(len(slots), num_heads, head_dim, device=device).to(dtype)
    fused = torch.randn(len(slots), 4 * num_heads, head_dim, device=device).to(dtype)
    v = fused[:, 3 * num_heads :]
    assert v.stride(0) == 4 * num_heads * head_dim and not v.is_contiguous()
    return k, v, torch.tensor(slots, dtype=torch.int32, device=device)


def expected_pool(
    rows: torch.Tensor, slots: list[int], num_blocks: int, block_size: int
) -> torch.Tensor:
    pool = torch.full(
        (num_blocks, block_size, *rows.shape[1:]), UNTOUCHED, dtype=rows.dtype, device=rows.device
    )
    for row, slot in zip(rows, slots, strict=True):
        if slot != -1:
            pool[slot // block_size, slot % block_size] = row
    return pool


def check(
    store: Store,
    slots: list[int],
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    num_blocks: int = 6,
    block_size: int = 4,
) -> None:
    """Store one step into a marked pool; every slot must be exactly as expected."""
    k, v, slot_mapping = make_step(slots, num_heads, head_dim, dtype, device)
    caches = [
        torch.full(
            (num_blocks, block_size, num_heads, head_dim), UNTOUCHED, dtype=dtype, device=device
        )
        for _ in range(2)
    ]
    store(k, v, *caches, slot_mapping)
    for cache, rows in zip(caches, (k, v), strict=True):
        assert torch.equal(cache, expected_pool(rows, slots, num_blocks, block_size))


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
def test_each_row_goes_to_its_slot_exactly(
    store: Store, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Widths that are and are not powers of two (case 33); first and last slot, any order."""
    check(store, [23, 0, 9, 8, 17], 2, head_dim, dtype, device)


@both_forms
def test_case_42_minus_one_among_real_slots_is_skipped(store: Store, device: torch.device) -> None:
    """Case 42: a padding row between real rows writes nothing, and the rows after it still do."""
    check(store, [-1, 5, -1, -1, 22, 3, -1], 3, 24, torch.float32, device)


@both_forms
def test_padding_alone_touches_nothing(store: Store, device: torch.device) -> None:
    check(store, [-1, -1], 1, 80, torch.float32, device)


@both_forms
@pytest.mark.parametrize(("num_heads", "block_size"), [(1, 1), (3, 5), (8, 256)])
def test_any_number_of_heads_and_block_size(
    store: Store, num_heads: int, block_size: int, device: torch.device
) -> None:
    """The last program's masked lanes must not reach the next slot: width 3 * 24 of 128 lanes."""
    slots = [block_size, 0, 2 * block_size - 1] if block_size > 1 else [1, 0]
    check(store, slots, num_heads, 24, torch.float32, device, 2, block_size)


@both_forms
def test_steps_of_equal_shape_do_not_share_anything(store: Store, device: torch.device) -> None:
    """Two steps of one shape, one after the other: the second overwrites just its own slots."""
    caches = torch.zeros(2, 3, 4, 2, 24, device=device)
    first_k, first_v, slots = make_step([4, 5, 6], 2, 24, torch.float32, device)
    store(first_k, first_v, *caches, slots)
    k, v, slots = make_step([6, -1, 1], 2, 24, torch.float32, device)
    store(k, v, *caches, slots)
    k_rows, v_rows = caches.flatten(1, 2)
    assert torch.equal(k_rows[[4, 5, 6, 1]], torch.stack((first_k[0], first_k[1], k[0], k[2])))
    assert torch.equal(v_rows[[4, 5, 6, 1]], torch.stack((first_v[0], first_v[1], v[0], v[2])))
    assert caches.count_nonzero() == 2 * 4 * 2 * 24


def test_offsets_pass_32_bits(device: torch.device) -> None:
    """Case 34 in small: the last slots of a pool of more than 2^31 numbers. Of its int8 memory only
    the written pages are ever backed. The lower half catches what an overflowing offset writes."""
    width, half = 2 * 24, 2**31
    num_slots = half // width + 8
    backing = torch.empty(half + num_slots * width, dtype=torch.int8, device=device)
    cache = backing[half:].view(num_slots, 1, 2, 24)
    rows = torch.randint(1, 100, (3, 2, 24), dtype=torch.int8, device=device)
    slots = torch.tensor([num_slots - 1, -1, num_slots - 3], dtype=torch.int32, device=device)
    cache[-4:] = 0
    kv_store.store_kv_triton(rows, rows, cache, cache, slots)
    assert torch.equal(cache[-4:, 0], torch.stack((0 * rows[0], rows[2], 0 * rows[0], rows[0])))
