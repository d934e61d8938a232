"""BlockManager: who owns which KV block, and which block holds which prefix.

CPU bookkeeping only: it never touches the K/V itself, and never decides who runs.
"""

from collections import OrderedDict

import numpy as np
import xxhash

from nanovllm.engine.sequence import Sequence

NO_HASH = -1


class Block:
    """One physical block. `hash` and `token_ids` are set once the block is full and its K/V
    written, and outlive its last owner: a free block can still be hit until it is reused."""

    __slots__ = ("block_id", "hash", "ref_count", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash = NO_HASH
        self.token_ids: list[int] = []

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, hash={self.hash:#x})"


class BlockManager:
    """The pool of physical blocks 0..num_blocks-1, of block_size positions each.

    Invariants, true between public calls (tests/invariants.py checks them by these numbers):
    I1  `free_block_ids` and `used_block_ids` partition the pool.
    I2  A block's `ref_count` is the number of live block tables that hold it; free means 0.
    I3  Every `hash_to_block_id` entry points at a block that carries that hash.
    I4  Only full blocks carry a hash, so no two decoding sequences share the block they write.
    """

    def __init__(self, num_blocks: int, block_size: int = 256) -> None:
        """Both >= 1, else ValueError."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be >= 1, got {num_blocks} and {block_size}"
            )
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        # A FIFO queue from whose middle a prefix hit can be taken in O(1); a deque's removal is
        # linear, which a pool of 40,000 blocks feels.
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.used_block_ids: set[int] = set()
        self.hash_to_block_id: dict[int, int] = {}

    @staticmethod
    def compute_hash(token_ids: list[int], prefix: int = NO_HASH) -> int:
        """xxh64 over the previous block's hash (8 little-endian bytes; nothing for a first block)
        and the ids as int64 bytes: a hash names a block's content *and* all that precedes it."""
        hasher = xxhash.xxh64()
        if prefix != NO_HASH:
            hasher.update(prefix.to_bytes(8, "little"))
        hasher.update(np.asarray(token_ids, dtype=np.int64).tobytes())
        return hasher.intdigest()

    def can_allocate(self, seq: Sequence) -> int:
        """The number of leading blocks of `seq` that are prefix hits, or -1 if too few blocks
        are free for its whole current length. Changes nothing."""
        hits = self._find_hits(seq)
        # A hit on a block in use costs nothing; a hit on a free one comes out of the free queue.
        shared = sum(block.ref_count > 0 for block in hits)
        return len(hits) if seq.num_blocks - shared <= len(self.free_block_ids) else -1

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> None:
        """Give `seq`, which has no table, blocks for its whole length: the first
        `num_cached_blocks`, as `can_allocate` counted them, are shared, the rest are new.
        Sets `block_table` and `num_cached_tokens`."""
        assert not seq.block_table and num_cached_blocks >= 0
        hits = self._find_hits(seq)[:num_cached_blocks]
        assert len(hits) == num_cached_blocks
        # Hits first: one on a free block must leave the queue before new blocks are drawn from it.
        for block in hits:
            if block.ref_count == 0:
                del self.free_block_ids[block.block_id]
                self.used_block_ids.add(block.block_id)
            block.ref_count += 1
            seq.block_table.append(block.block_id)
        for _ in range(seq.num_blocks - num_cached_blocks):
            seq.block_table.append(self._take_free_block())
        seq.num_cached_tokens = num_cached_blocks * self.block_size

    def can_append(self, seq: Sequence) -> bool:
        """Whether the position of `seq`'s last token has, or can get, a slot.

        A new block is due exactly when `len(seq) % block_size == 1`, not at 0: the last token is
        accepted but not stored yet, so only the first token *of* a block needs it.
        """
        return not self.opens_block(seq) or bool(self.free_block_ids)

    def may_append(self, seq: Sequence) -> None:
        """Extend the table by one block if the last token opens one (see `can_append`)."""
        if self.opens_block(seq):
            seq.block_table.append(self._take_free_block())
        assert len(seq.block_table) == seq.num_blocks

    def deallocate(self, seq: Sequence) -> None:
        """Drop all of `seq`'s blocks and its cached count. Blocks keep their hash when free."""
        # Tail first: the head of a prefix is the part most worth keeping, so it is reused last.
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids[block_id] = None
        seq.block_table = []
        seq.num_cached_tokens = 0

    def hash_blocks(self, seq: Sequence, start: int | None = None, end: int | None = None) -> None:
        """Register the blocks completed by a step that computed positions start..end-1 (by default
        the scheduled ones), whose last position is among them. Call it when the K/V exists."""
        if start is None or end is None:
            start = seq.num_cached_tokens
            end = start + seq.num_scheduled_tokens
        first = start // self.block_size
        prefix = self.blocks[seq.block_table[first - 1]].hash if first else NO_HASH
        for i in range(first, end // self.block_size):
            block = self.blocks[seq.block_table[i]]
            block.token_ids = seq.block(i)
            block.hash = prefix = self.compute_hash(block.token_ids, prefix)
            self.hash_to_block_id[block.hash] = block.block_id

    def _find_hits(self, seq: Sequence) -> list[Block]:
        hits: list[Block] = []
        prefix = NO_HASH
        # The last logical block never hits, even when it is full: at least one position must be
        # computed to have logits, and a shared block must never be written.
        for i in range(seq.num_blocks - 1):
            token_ids = seq.block(i)
            prefix = self.compute_hash(token_ids, prefix)
            block_id = self.hash_to_block_id.get(prefix)
            if block_id is None or self.blocks[block_id].token_ids != token_ids:
                break
            hits.append(self.blocks[block_id])
        return hits

    def opens_block(self, seq: Sequence) -> bool:
        """Whether `seq`'s last token is the first of a block (see `can_append`)."""
        # `len % block_size == 1`, in a form that also holds for block_size 1.
        return (len(seq) - 1) % self.block_size == 0

    def _take_free_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        assert block.ref_count == 0
        if self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
        block.hash, block.token_ids = NO_HASH, []
        block.ref_count = 1
        self.used_block_ids.add(block_id)
        return block_id
