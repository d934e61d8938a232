"""What the scheduling tests share: a scheduler without an engine, and a model made of arithmetic.

Imports no torch, as the half that it tests.
"""

from collections.abc import Collection, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from invariants import check_invariants, check_step

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import PENDING, Sequence

SOME_FOLDER = str(Path(__file__).parent)  # Config wants one that exists; nothing reads it here


def make_scheduler(
    num_blocks: int, block_size: int = 256, eos_token_ids: Collection[int] = (), **settings: Any
) -> Scheduler:
    """A scheduler over a pool of num_blocks; `settings` are Config's."""
    config = Config(model=SOME_FOLDER, kvcache_block_size=block_size, **settings)
    return Scheduler(config, num_blocks, eos_token_ids)


def make_sequence(scheduler: Scheduler, token_ids: Iterable[int], **params: Any) -> Sequence:
    """A request for this scheduler, not added yet; `params` are those of SamplingParams, with a
    max_tokens of 4 so that it fits into a small pool."""
    sampling_params = SamplingParams(**{"max_tokens": 4, **params})
    return Sequence(list(token_ids), sampling_params, scheduler.block_manager.block_size)


def add_request(scheduler: Scheduler, token_ids: Iterable[int], **params: Any) -> Sequence:
    """Make a request and add it."""
    seq = make_sequence(scheduler, token_ids, **params)
    scheduler.add(seq)
    return seq


def put_first(manager: BlockManager, *block_ids: int) -> None:
    """Let the next blocks drawn from the free queue be these, in this order."""
    for block_id in reversed(block_ids):
        manager.free_block_ids.move_to_end(block_id, last=False)


def mix(state: int, value: int) -> int:
    """One step of a 64-bit linear congruential generator: order and every value matter."""
    return (state * 6364136223846793005 + value + 1442695040888963407) % 2**64


def sample(kv: Iterable[int], vocab_size: int) -> int:
    """The next token, from the "K/V" of all positions so far."""
    state = 0
    for value in kv:
        state = mix(state, value)
    return (state >> 32) % vocab_size


class FakeModel:
    """Stands for the model and its KV pool, so that bookkeeping faults change tokens.

    The "K/V" of a position is a number that depends on its token and, read back from the pool, on
    the position before it, as in a deep layer; the sampled token depends on the K/V of all
    positions. A wrong slot, a block shared or overwritten by mistake, a position left out: each
    gives other tokens than `complete_alone` does.

    As on a device, a token that is still pending in the scheduler's books is known here, if the
    step before sampled it.
    """

    def __init__(self, scheduler: Scheduler, vocab_size: int = 3) -> None:
        manager = scheduler.block_manager
        self.vocab_size = vocab_size
        self.pool = [0] * (len(manager.blocks) * manager.block_size)
        self.latest: dict[int, int] = {}  # seq_id -> what the step before sampled

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        """As ModelRunner.run: store the K/V of the scheduled positions of all `seqs`, then sample
        one token each."""
        for seq in seqs:
            for position in _scheduled_positions(seq):
                token_id = seq.token_ids[position]
                if token_id == PENDING:
                    assert not is_prefill, "a pending token must arrive before a prefill"
                    token_id = self.latest[seq.seq_id]
                before = self.pool[slot(seq, position - 1)] if position else 0
                self.pool[slot(seq, position)] = mix(before, token_id)
        sampled = [
            sample(
                (self.pool[slot(seq, p)] for p in range(_scheduled_positions(seq).stop)),
                self.vocab_size,
            )
            for seq in seqs
        ]
        self.latest = {seq.seq_id: token for seq, token in zip(seqs, sampled, strict=True)}
        return sampled

    def spoil(self, seqs: list[Sequence]) -> None:
        """What a step that fails half-way may do: leave garbage at every scheduled position."""
        for seq in seqs:
            for position in _scheduled_positions(seq):
                self.pool[slot(seq, position)] = 666


def slot(seq: Sequence, position: int) -> int:
    """Where the pool holds the K/V of a position."""
    return seq.block_table[position // seq.block_size] * seq.block_size + position % seq.block_size


def _scheduled_positions(seq: Sequence) -> range:
    return range(seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens)


def complete_alone(
    token_ids: list[int],
    max_tokens: int,
    max_model_len: int = 4096,
    eos_token_ids: Collection[int] = (),
    vocab_size: int = 3,
) -> tuple[list[int], str]:
    """(completion, finish reason) that FakeModel must give this prompt, however it is batched, cut
    and preempted: a pure function, without a pool. For ignore_eos pass no eos_token_ids."""
    ids = list(token_ids)
    while True:
        kv = list(accumulate(ids, mix, initial=0))[1:]
        ids.append(sample(kv, vocab_size))
        completion = ids[len(token_ids) :]
        if ids[-1] in eos_token_ids:
            return completion, "stop"
        if len(completion) == max_tokens or len(ids) == max_model_len:
            return completion, "length"


class Step(NamedTuple):
    """What a step did: its phase, and how many positions of which sequences, in order."""

    is_prefill: bool
    work: list[tuple[Sequence, int]]


def run_step(scheduler: Scheduler, model: FakeModel) -> Step:
    """schedule, run, postprocess; with the invariants checked at each point where they hold."""
    batch = scheduler.schedule()
    check_step(scheduler, batch)
    seqs, is_prefill = batch
    step = Step(is_prefill, [(seq, seq.num_scheduled_tokens) for seq in seqs])
    scheduler.postprocess(seqs, model.run(seqs, is_prefill), is_prefill)
    check_invariants(scheduler)
    return step


def fail_step(scheduler: Scheduler, model: FakeModel) -> list[Sequence]:
    """schedule, fail while running, roll back; the sequences of the step."""
    seqs, _ = scheduler.schedule()
    model.spoil(seqs)
    scheduler.rollback(seqs)
    check_invariants(scheduler)
    return seqs


def run_to_end(scheduler: Scheduler, model: FakeModel) -> list[Step]:
    """Step until all requests have finished.

    Asserts I7 in its sharpest form. A token once accepted is never lost, and only the chunks of
    one prompt can follow each other without a token, so that many steps in a row give one.
    """
    steps: list[Step] = []
    idle = 0
    while not scheduler.is_finished():
        live = [*scheduler.waiting, *scheduler.running]
        num_tokens = sum(map(len, live))
        most_chunks = -(-max(map(len, live)) // scheduler.max_num_batched_tokens)
        steps.append(run_step(scheduler, model))
        idle = idle + 1 if sum(map(len, live)) == num_tokens else 0
        assert idle < most_chunks, f"I7: {idle} steps in a row accepted no token"
    return steps


def assert_cache_still_hits(scheduler: Scheduler, model: FakeModel) -> None:
    """I8, second half: the longest prompt that the pool can take is hit when it comes again."""
    block_size = scheduler.block_manager.block_size
    pool = len(scheduler.block_manager.blocks) * block_size
    length = min(pool, scheduler.max_model_len - 1)
    for num_hits in (0, (length - 1) // block_size):
        seq = make_sequence(scheduler, [9] * length, max_tokens=1)  # 9 is in no other prompt
        assert scheduler.block_manager.can_allocate(seq) == num_hits, "I8"
        scheduler.add(seq)
        run_to_end(scheduler, model)
