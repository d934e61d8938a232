"""The scheduler under schedules that nobody would think of, with the invariants after every action.

The fake model's tokens depend on the whole content of the pool as the scheduler laid it out, so
each request must end with exactly the tokens that its prompt alone determines.
"""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from invariants import check_invariants
from scheduling import (
    FakeModel,
    add_request,
    assert_cache_still_hits,
    complete_alone,
    fail_step,
    make_scheduler,
    make_sequence,
    run_step,
    run_to_end,
)

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

LETTERS = (0, 1, 2)  # few, so that prefixes collide
EOS = 3
VOCAB_SIZE = 4


def assert_as_alone(seq: Sequence, scheduler: Scheduler) -> None:
    """The finished `seq` has the tokens and the finish reason that its prompt determines."""
    eos_token_ids = () if seq.ignore_eos else scheduler.eos_token_ids
    expected = complete_alone(
        seq.prompt_token_ids, seq.max_tokens, scheduler.max_model_len, eos_token_ids, VOCAB_SIZE
    )
    assert (seq.completion_token_ids, seq.finish_reason) == expected
    assert seq.is_finished and seq.num_cached_tokens == 0 and seq.block_table == []


class AnySchedule(RuleBasedStateMachine):
    """Requests come, steps run or fail, requests are aborted: any order, any pool."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_blocks=st.integers(1, 12),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        max_model_len=st.integers(2, 40),
    )
    def start(
        self, block_size: int, num_blocks: int, budget: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.scheduler = make_scheduler(
            num_blocks,
            block_size,
            eos_token_ids=[EOS],
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self.model = FakeModel(self.scheduler, VOCAB_SIZE)
        self.accepted: list[Sequence] = []  # and not aborted
        self.in_order = True  # no step has failed yet

    @rule(
        prompt=st.lists(st.sampled_from(LETTERS), min_size=1, max_size=14),
        max_tokens=st.integers(1, 20),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> None:
        """A request is accepted exactly when it can run alone in the whole pool."""
        manager, limit = self.scheduler.block_manager, self.scheduler.max_model_len
        seq = make_sequence(self.scheduler, prompt, max_tokens=max_tokens, ignore_eos=ignore_eos)
        most_positions = min(len(prompt) + max_tokens, limit) - 1
        if len(prompt) < limit and most_positions <= len(manager.blocks) * manager.block_size:
            self.scheduler.add(seq)
            self.accepted.append(seq)
        else:
            with pytest.raises(ValueError):
                self.scheduler.add(seq)

    @precondition(lambda self: not self.scheduler.is_finished())
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.scheduler.is_finished():
                run_step(self.scheduler, self.model)

    @precondition(lambda self: not self.scheduler.is_finished())
    @rule()
    def step_that_fails(self) -> None:
        seqs = fail_step(self.scheduler, self.model)
        assert list(self.scheduler.waiting)[: len(seqs)] == seqs, "they wait in the step's order"
        self.in_order = False  # those that the step left running come before them from now on

    @precondition(lambda self: not self.scheduler.is_finished())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [*self.scheduler.waiting, *self.scheduler.running]
        seq = data.draw(st.sampled_from(live))
        self.scheduler.abort(seq)
        self.accepted.remove(seq)

    @invariant()
    def holds(self) -> None:
        check_invariants(self.scheduler)
        if self.in_order:
            # Preempting the newest, to the left of waiting, never lets anybody overtake.
            queued = [seq.seq_id for seq in (*self.scheduler.running, *self.scheduler.waiting)]
            assert queued == sorted(queued)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        run_to_end(self.scheduler, self.model)
        for seq in self.accepted:
            assert_as_alone(seq, self.scheduler)
        assert_cache_still_hits(self.scheduler, self.model)


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.parametrize("seed", range(5))
def test_case_15_sixty_requests_through_many_preemptions(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of 12 blocks of 4 holds about four of the six requests that a step may run."""
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_blocks=12, block_size=4, max_num_batched_tokens=24, max_num_seqs=6
    )
    scheduler.learns_headroom = False  # the plain rule preempts again and again
    preempted = []
    preempt = scheduler.preempt
    monkeypatch.setattr(scheduler, "preempt", lambda seq: (preempted.append(seq), preempt(seq)))
    model = FakeModel(scheduler, VOCAB_SIZE)
    seqs = [
        add_request(
            scheduler, rng.choices(LETTERS, k=rng.randint(1, 14)), max_tokens=rng.randint(1, 20)
        )
        for _ in range(60)
    ]
    run_to_end(scheduler, model)
    for seq in seqs:
        assert seq.num_completion_tokens == seq.max_tokens
        assert_as_alone(seq, scheduler)
    assert sorted(scheduler.block_manager.free_block_ids) == list(range(12))
    assert_cache_still_hits(scheduler, model)
    assert len(preempted) >= 30, "the pool is too large to test what this test is about"
