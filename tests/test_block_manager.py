"""BlockManager: the free queue, the prefix index, reference counts. B is the block size."""

import struct
from collections import OrderedDict

import pytest
import xxhash
from invariants import chain_hashes
from scheduling import put_first

from nanovllm.engine.block_manager import NO_HASH, BlockManager
from nanovllm.engine.sequence import Sequence


def make_seq(token_ids: list[int], block_size: int = 4) -> Sequence:
    return Sequence(token_ids, block_size=block_size)


def prefill(manager: BlockManager, seq: Sequence, num_positions: int | None = None) -> int:
    """Allocate if need be, and do what one prefill step does to the books: all positions left, or
    num_positions of them. Returns the hits."""
    num_hits = 0
    if not seq.block_table:
        num_hits = manager.can_allocate(seq)
        manager.allocate(seq, num_hits)
    seq.num_scheduled_tokens = num_positions or seq.num_tokens - seq.num_cached_tokens
    manager.hash_blocks(seq)
    seq.num_cached_tokens += seq.num_scheduled_tokens
    seq.num_scheduled_tokens = 0
    return num_hits


def ref_counts(manager: BlockManager, block_ids: list[int]) -> list[int]:
    return [manager.blocks[block_id].ref_count for block_id in block_ids]


def test_a_new_pool_is_free_in_order_and_knows_no_prefix() -> None:
    manager = BlockManager(3, 4)
    assert list(manager.free_block_ids) == [0, 1, 2] and not manager.used_block_ids
    assert manager.hash_to_block_id == {} and BlockManager(1).block_size == 256
    for i, block in enumerate(manager.blocks):
        assert (block.block_id, block.ref_count, block.hash, block.token_ids) == (i, 0, NO_HASH, [])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="num_blocks and block_size must be >= 1"):
        BlockManager(num_blocks, block_size)


def test_hash_of_a_first_block_is_xxh64_of_int64_ids() -> None:
    expected = xxhash.xxh64(struct.pack("<4q", 7, 0, 151935, 2)).intdigest()
    assert BlockManager.compute_hash([7, 0, 151935, 2]) == expected


def test_hash_of_a_later_block_starts_with_the_previous_hash() -> None:
    previous = 0x0123456789ABCDEF
    little_endian = bytes.fromhex("efcdab8967452301")
    data = little_endian + struct.pack("<2q", 5, 6)
    assert BlockManager.compute_hash([5, 6], previous) == xxhash.xxh64(data).intdigest()
    # A previous hash of 0 is a hash, not "none".
    zero = xxhash.xxh64(bytes(8) + struct.pack("<q", 5)).intdigest()
    assert BlockManager.compute_hash([5], 0) == zero != BlockManager.compute_hash([5])


def test_prefilled_blocks_carry_the_chain() -> None:
    """A block is named by its content and all that precedes it; a part-filled one by nothing."""
    manager = BlockManager(4, 4)
    seq = make_seq([1, 2, 3, 4, 1, 2, 3, 4, 9])
    prefill(manager, seq)
    first, second = chain_hashes(seq.token_ids, 4)
    assert [manager.blocks[i].hash for i in seq.block_table] == [first, second, NO_HASH]
    assert manager.hash_to_block_id == {first: 0, second: 1} and first != second


def test_equal_blocks_after_different_prefixes_do_not_hit() -> None:
    manager = BlockManager(8, 4)
    prefill(manager, make_seq([1, 1, 1, 1, 5, 6, 7, 8, 0]))
    assert manager.can_allocate(make_seq([2, 2, 2, 2, 5, 6, 7, 8, 0])) == 0
    assert manager.can_allocate(make_seq([5, 6, 7, 8, 0])) == 0
    assert manager.can_allocate(make_seq([1, 1, 1, 1, 5, 6, 7, 8, 9])) == 2


def test_case_12_a_hash_collision_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks collide; the stored ids decide."""
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda ids, prefix=-1: 42))
    manager = BlockManager(8, 4)
    prefill(manager, make_seq([1] * 4 + [2] * 4 + [3] * 4))
    assert 42 in manager.hash_to_block_id
    other = make_seq([4] * 4 + [5] * 4 + [6] * 4)
    assert manager.can_allocate(other) == 0
    prefill(manager, other)
    assert other.block_table == [3, 4, 5] and other.num_cached_tokens == 12


def test_chunks_register_a_block_once_its_last_position_is_computed() -> None:
    manager = BlockManager(4, 4)
    seq = make_seq(list(range(10)))
    registered = []
    for num_positions in (3, 1, 3, 3):  # up to position 3, 4, 7, 10
        prefill(manager, seq, num_positions)
        registered.append(len(manager.hash_to_block_id))
    assert registered == [0, 1, 1, 2]
    assert list(manager.hash_to_block_id) == chain_hashes(seq.token_ids, 4)


def test_new_blocks_come_from_the_left_of_the_free_queue() -> None:
    manager = BlockManager(6, 4)
    put_first(manager, 3, 0, 5)
    seq = make_seq([0] * 9)
    manager.allocate(seq, 0)
    assert seq.block_table == [3, 0, 5] and manager.used_block_ids == {0, 3, 5}
    assert list(manager.free_block_ids) == [1, 2, 4]


def test_blocks_are_freed_tail_first_to_the_right_with_their_hash() -> None:
    """The head of a prefix, worth most, is reused last."""
    manager = BlockManager(5, 4)
    seq = make_seq([1] * 4 + [2] * 4 + [3])
    prefill(manager, seq)
    manager.deallocate(seq)
    assert list(manager.free_block_ids) == [3, 4, 2, 1, 0] and not manager.used_block_ids
    assert seq.block_table == [] and seq.num_cached_tokens == 0 and seq.num_tokens == 9
    assert [block.hash for block in manager.blocks[:2]] == chain_hashes(seq.token_ids, 4)
    assert manager.can_allocate(seq) == 2


def test_a_hit_on_a_free_block_leaves_the_middle_of_the_queue_in_constant_time() -> None:
    """An ordered dict, for a deque's removal from the middle is linear in the pool."""
    manager = BlockManager(4, 4)
    seq = make_seq([1] * 4 + [2])
    prefill(manager, seq)
    manager.deallocate(seq)
    put_first(manager, 2, 0)
    assert prefill(manager, seq) == 1
    assert seq.block_table == [0, 2] and list(manager.free_block_ids) == [3, 1]
    assert isinstance(manager.free_block_ids, OrderedDict)


def test_a_hit_is_never_drawn_as_a_new_block_of_the_same_request() -> None:
    """The hit block stands leftmost in the free queue: it must leave before new ones are drawn."""
    manager = BlockManager(3, 4)
    seq = make_seq([1] * 4 + [2])
    prefill(manager, seq)
    manager.deallocate(seq)
    put_first(manager, 0)
    longer = make_seq([1] * 4 + [2] * 5)
    assert prefill(manager, longer) == 1
    assert longer.block_table == [0, 2, 1]
    assert ref_counts(manager, [0, 1, 2]) == [1, 1, 1]


def test_the_last_block_never_hits_even_when_full() -> None:
    """At least one position is always computed, and a shared block is never written."""
    manager = BlockManager(8, 4)
    prefill(manager, make_seq([1] * 12))
    assert [manager.can_allocate(make_seq([1] * n)) for n in (4, 5, 8, 9, 12, 13)] == [
        *(0, 1, 1, 2, 2, 3)
    ]


def test_a_reused_block_loses_its_entry() -> None:
    manager = BlockManager(3, 4)
    old = make_seq([1] * 4 + [2] * 4)
    prefill(manager, old)
    manager.deallocate(old)
    put_first(manager, 1)
    prefill(manager, make_seq([3]))
    assert list(manager.hash_to_block_id.values()) == [0], "block 1 is gone, block 0 stays"
    assert manager.blocks[1].hash == NO_HASH and manager.blocks[1].token_ids == []
    assert manager.can_allocate(make_seq([1] * 4 + [2])) == 1


def test_a_reused_block_keeps_an_entry_that_points_elsewhere() -> None:
    """Two blocks of equal content, written in one step: the index knows the later one. Reusing
    the earlier one must not forget it."""
    manager = BlockManager(4, 4)
    twins = [make_seq([1] * 5) for _ in range(2)]
    for seq in twins:
        manager.allocate(seq, 0)
    for seq in twins:
        prefill(manager, seq)
    assert [seq.block_table for seq in twins] == [[0, 1], [2, 3]]
    assert list(manager.hash_to_block_id.values()) == [2]
    manager.deallocate(twins[0])  # free queue: 1, 0
    manager.allocate(make_seq([9] * 5), 0)
    assert list(manager.hash_to_block_id.values()) == [2]
    manager.deallocate(twins[1])
    assert manager.can_allocate(make_seq([1] * 5)) == 1


def test_can_allocate_counts_hits_in_use_as_free_of_charge() -> None:
    manager = BlockManager(3, 4)
    prefill(manager, make_seq([1] * 8))
    assert manager.can_allocate(make_seq([1] * 8 + [2])) == 2, "one free block is enough"
    assert manager.can_allocate(make_seq([2] * 5)) == -1
    assert manager.can_allocate(make_seq([1] * 4 + [2] * 5)) == -1, "two needed, one free"


def test_can_allocate_counts_hits_on_free_blocks_as_taken_from_the_queue() -> None:
    manager = BlockManager(3, 4)
    seq = make_seq([1] * 8)
    prefill(manager, seq)
    manager.deallocate(seq)
    manager.allocate(make_seq([9]), 0)  # block 2: the two free ones are the hits
    assert manager.can_allocate(make_seq([1] * 8)) == 1
    assert manager.can_allocate(make_seq([1] * 8 + [2])) == -1


def test_can_allocate_changes_nothing() -> None:
    manager = BlockManager(4, 4)
    seq = make_seq([1] * 9)
    prefill(manager, seq)
    manager.deallocate(seq)
    free, index = list(manager.free_block_ids), dict(manager.hash_to_block_id)
    assert manager.can_allocate(seq) == 2 and manager.can_allocate(make_seq([1] * 17)) == -1
    assert list(manager.free_block_ids) == free and manager.hash_to_block_id == index
    assert seq.block_table == [] and ref_counts(manager, [0, 1, 2, 3]) == [0] * 4


def test_example_prefix_reference_counts() -> None:
    """Two 620-id prompts share 512: the counts of the two shared blocks over release, reuse, a
    second sharer, two releases; both alive hold 4 blocks, not 6."""
    manager = BlockManager(8)
    shared = list(range(512))
    first, second, third = (make_seq(shared + [i] * 108, 256) for i in (600, 601, 602))
    assert prefill(manager, first) == 0
    blocks = first.block_table[:2]
    history = []

    def note() -> None:
        history.append(ref_counts(manager, blocks))

    manager.deallocate(first)
    note()
    assert prefill(manager, second) == 2 and second.block_table[:2] == blocks
    note()
    assert prefill(manager, third) == 2 and third.block_table[:2] == blocks
    assert len(manager.used_block_ids) == 4
    note()
    manager.deallocate(second)
    note()
    manager.deallocate(third)
    note()
    assert history == [[0, 0], [1, 1], [2, 2], [1, 1], [0, 0]]
    assert len(manager.free_block_ids) == 8


def test_example_prefix_a_512_id_prompt_repeated_hits_one_block() -> None:
    manager = BlockManager(8)
    prefill(manager, make_seq(list(range(512)), 256))
    again = make_seq(list(range(512)), 256)
    assert manager.can_allocate(again) == 1
    manager.allocate(again, 1)
    assert again.num_cached_tokens == 256 and len(again.block_table) == 2


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_case_10_a_block_is_appended_exactly_when_the_length_is_1_modulo_b(length: int) -> None:
    """len % B == 1, not 0: the last token is accepted but not stored, so the block that it opens
    is due when it is fed, one step after the block before it was filled."""
    manager = BlockManager(8, 4)
    seq = make_seq([0] * length)
    prefill(manager, seq)
    for _ in range(9):
        seq.append_token(0)
        before = len(seq.block_table)
        assert before == -(-(len(seq) - 1) // 4)
        manager.may_append(seq)
        assert len(seq.block_table) == before + (len(seq) % 4 == 1) == -(-len(seq) // 4)


def test_can_append_asks_for_a_free_block_only_when_one_opens() -> None:
    manager = BlockManager(1, 4)
    seq = make_seq([0] * 3)
    manager.allocate(seq, 0)
    seq.append_token(0)
    assert manager.can_append(seq), "position 3 has a slot in the only block"
    seq.append_token(0)
    assert not manager.can_append(seq), "position 4 opens a block and none is free"


def test_block_size_1_opens_a_block_with_every_token() -> None:
    """len % 1 is never 1: the rule must be written so that it holds here as well."""
    manager = BlockManager(3, 1)
    seq = make_seq([7, 8], block_size=1)
    prefill(manager, seq)
    assert list(manager.hash_to_block_id) == chain_hashes([7, 8], 1)
    seq.append_token(9)
    assert manager.can_append(seq)
    manager.may_append(seq)
    assert seq.block_table == [0, 1, 2]
    seq.append_token(9)
    assert not manager.can_append(seq)
