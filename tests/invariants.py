"""The invariants I1-I8, by the numbers under which block_manager.py and scheduler.py state them.

I7 (every accepted request finishes) and the second half of I8 (the index still hits) speak of
whole runs: `scheduling.run_to_end` and test_scheduler_fuzz.py assert them.
"""

import struct
from collections.abc import Iterable

import xxhash

from nanovllm.engine.block_manager import NO_HASH, BlockManager
from nanovllm.engine.scheduler import Progress, ScheduledBatch, Scheduler
from nanovllm.engine.sequence import PENDING, Sequence, SequenceStatus


def check_invariants(scheduler: Scheduler, in_flight: Iterable[Progress] = ()) -> None:
    """I1-I4, I6 and the rest of what is true between steps; I8's first half when all is done.

    in_flight: the rows of the step that is launched, if one is. Its sequences have a token pending,
    their scheduled positions count as cached, but no block that it fills is registered yet; those
    that it makes full hold their blocks without being queued."""
    manager = scheduler.block_manager
    flying = {row.seq.seq_id: row for row in in_flight if not row.seq.is_finished}
    queued = [*scheduler.waiting, *scheduler.running]
    full = [row.seq for row in flying.values() if row.seq not in queued]
    live = queued + full
    _check_queues(scheduler)
    _check_pool(manager, live)
    _check_index(manager)
    for seq in live:
        row = flying.get(seq.seq_id)
        _check_blocks_of(seq, manager, seq.num_cached_tokens if row is None else row.start)
        pends = row is not None and row.accepts
        assert (seq.last_token == PENDING) == pends and PENDING not in seq.token_ids[:-1]
        if pends:
            assert seq.num_tokens == row.end + 1 == seq.num_cached_tokens + 1
    for seq in full:
        most = min(seq.num_prompt_tokens + seq.max_tokens, scheduler.max_model_len)
        assert seq.num_tokens == most, "left the queue without being full"
    if not live:
        assert sorted(manager.free_block_ids) == list(range(len(manager.blocks))), "I8"


def check_step(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    """I5, and the rules of a step, between `schedule` and `postprocess`."""
    seqs, is_prefill = batch
    counts = [seq.num_scheduled_tokens for seq in seqs]
    assert 0 < len(seqs) <= scheduler.max_num_seqs, "I5: sequences"
    assert len(set(map(id, seqs))) == len(seqs), "I5: a sequence twice"
    assert min(counts) >= 1
    for seq in (*scheduler.waiting, *scheduler.running):
        assert seq in seqs or seq.num_scheduled_tokens == 0, "counted, but not in the step"
    for seq in seqs:
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        assert end <= len(seq.block_table) * seq.block_size, "a position without a slot"
        assert end <= seq.num_tokens, "a position without a token"
    cut = [s for s in seqs if s.num_cached_tokens + s.num_scheduled_tokens < s.num_tokens]
    if is_prefill:
        assert sum(counts) <= scheduler.max_num_batched_tokens, "I5: positions"
        assert cut in ([], seqs[:1]), "only the first sequence may be cut"
        assert not cut or counts == [scheduler.max_num_batched_tokens], "cut to the whole budget"
    else:
        assert counts == [1] * len(seqs) and not cut
        assert seqs == list(scheduler.running)[: len(seqs)], "the chosen are the left of running"


def chain_hashes(token_ids: list[int], block_size: int) -> list[int]:
    """The hash of every full block of `token_ids`, from the formula, not from the code under test:
    xxh64 over the previous hash as 8 little-endian bytes, then the ids as int64."""
    hashes, prefix = [], b""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        ids = token_ids[start : start + block_size]
        digest = xxhash.xxh64_intdigest(prefix + struct.pack(f"<{block_size}q", *ids))
        hashes.append(digest)
        prefix = struct.pack("<Q", digest)
    return hashes


def _check_queues(scheduler: Scheduler) -> None:
    live = [*scheduler.waiting, *scheduler.running]
    assert len(set(map(id, live))) == len(live), "a sequence is queued twice"
    for seq in live:
        assert seq.num_scheduled_tokens == 0
    for i, seq in enumerate(scheduler.waiting):
        assert seq.status is SequenceStatus.WAITING
        assert not seq.block_table or i == 0, "only the cut sequence at the left holds blocks"
        assert seq.num_cached_tokens < seq.num_tokens
        if not seq.block_table:
            assert seq.num_cached_tokens == 0
    for seq in scheduler.running:
        assert seq.status is SequenceStatus.RUNNING
        assert seq.num_tokens == seq.num_cached_tokens + 1, "I6"


def _check_pool(manager: BlockManager, live: list[Sequence]) -> None:
    free, used = list(manager.free_block_ids), list(manager.used_block_ids)
    assert sorted(free + used) == list(range(len(manager.blocks))), "I1"
    held = [block_id for seq in live for block_id in seq.block_table]
    for block in manager.blocks:
        assert block.ref_count == held.count(block.block_id), "I2"
        assert (block.ref_count > 0) == (block.block_id in manager.used_block_ids), "I2"


def _check_index(manager: BlockManager) -> None:
    for digest, block_id in manager.hash_to_block_id.items():
        assert manager.blocks[block_id].hash == digest, "I3"
    for block in manager.blocks:
        assert len(block.token_ids) == (0 if block.hash == NO_HASH else manager.block_size), "I4"


def _check_blocks_of(seq: Sequence, manager: BlockManager, num_computed: int) -> None:
    """The blocks that num_computed positions fill carry the hash of all ids up to their end; the
    rest are this sequence's own, without a hash (I4), and there are just as many as its positions
    need."""
    if seq.block_table:
        # A running sequence's last token has no slot yet if it opens a block: see can_append.
        waits = seq.status is SequenceStatus.WAITING
        num_positions = seq.num_tokens if waits else seq.num_cached_tokens
        assert len(seq.block_table) == -(-num_positions // seq.block_size)
    num_full = num_computed // seq.block_size
    blocks = [manager.blocks[block_id] for block_id in seq.block_table]
    expected = chain_hashes(seq.token_ids[:num_computed], seq.block_size)
    assert [block.hash for block in blocks[:num_full]] == expected
    assert [block.token_ids for block in blocks[:num_full]] == [
        seq.block(i) for i in range(num_full)
    ]
    for block in blocks[num_full:]:
        assert block.ref_count == 1, "I4: a block still to be written is shared"
        assert block.hash == NO_HASH, "I4: a block that is not full has a hash"
