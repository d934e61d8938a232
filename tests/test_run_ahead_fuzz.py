"""The loop that runs a step ahead, under schedules that nobody would think of: the real RunAhead
and scheduler, and a model made of arithmetic whose tokens depend on the whole content of the pool.

Each request must end as its prompt alone determines, with no trace of what was computed too much.
"""

import random
from collections import Counter
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from invariants import chain_hashes, check_invariants, check_step
from scheduling import (
    FakeModel,
    assert_cache_still_hits,
    complete_alone,
    make_scheduler,
    make_sequence,
)

from nanovllm.engine.run_ahead import RunAhead
from nanovllm.engine.scheduler import ScheduledBatch, Scheduler
from nanovllm.engine.sequence import PENDING, Sequence

LETTERS = (0, 1, 2)  # few, so that prefixes collide
EOS = 3
VOCAB_SIZE = 4


class Launched(NamedTuple):
    """Stands for LaunchedStep."""

    seqs: list[Sequence]
    token_ids: list[int]
    logprobs: dict[int, dict[int, float]]


class FakeRunner:
    """Computes a step when it is launched, as a device does in its order, and gives the tokens out
    when they are collected. Fails when told to: a failed launch has spoiled what it may write."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.model = FakeModel(scheduler, VOCAB_SIZE)
        self.failing: str | None = None
        self.calls: list[str] = []
        self.wasted: Counter[int] = Counter()  # seq_id -> positions computed after its end

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        failing = self.failing == method
        if failing:
            self.failing = None
        return getattr(self, method)(failing, *args)

    def launch(self, failing: bool, seqs: list[Sequence], is_prefill: bool) -> Launched:
        check_step(self.scheduler, ScheduledBatch(seqs, is_prefill))
        if failing:
            self.model.spoil(seqs)
            raise RuntimeError("made to fail")
        return Launched(list(seqs), self.model.run(seqs, is_prefill), {})

    def collect(self, failing: bool, step: Launched) -> list[int]:
        if failing:
            raise RuntimeError("made to fail")
        self.wasted.update(seq.seq_id for seq in step.seqs if seq.is_finished)
        return step.token_ids


class Engine:
    """What LLMEngine does around RunAhead, with a stop rule in place of stop strings: a request may
    have to end when the same letter comes twice in a row."""

    def __init__(self, **pool: Any) -> None:
        self.scheduler = make_scheduler(eos_token_ids=[EOS], **pool)
        self.runner = FakeRunner(self.scheduler)
        self.loop = RunAhead(self.scheduler, self.runner)
        self.doubles: dict[int, int] = {}  # seq_id -> the letter that must not come twice
        self.accepted: dict[int, list[int]] = {}
        self.seqs: list[Sequence] = []
        self.returned: dict[int, list[int]] = {}

    def add(self, seq: Sequence, double: int | None = None) -> None:
        self.scheduler.add(seq)
        self.seqs.append(seq)
        self.accepted[seq.seq_id] = []
        if double is not None:
            self.doubles[seq.seq_id] = double

    def _on_tokens(self, accepted: list[tuple[Sequence, int]], logprobs: dict) -> None:
        for seq, token_id in accepted:
            own = self.accepted[seq.seq_id]
            own.append(token_id)
            assert own == seq.completion_token_ids
            if self.ends(seq, own):
                self.scheduler.finish(seq, "stop")

    def ends(self, seq: Sequence, completion: list[int]) -> bool:
        double = self.doubles.get(seq.seq_id)
        return double is not None and completion[-2:] == [double, double]

    def step(self) -> None:
        self._note(*self.loop.step(self._on_tokens))

    def drain(self) -> None:
        self._note(*self.loop.drain(self._on_tokens))

    def _note(self, finished: list[tuple[int, list[int]]], num_tokens: int) -> None:
        for seq_id, token_ids in finished:
            assert seq_id not in self.returned, "finished twice"
            self.returned[seq_id] = token_ids
        self.check()

    def live(self) -> list[Sequence]:
        return [seq for seq in self.seqs if not seq.is_finished]

    def check(self) -> None:
        """The invariants, and the index: each entry is for a block that the plain loop would have
        computed, up to the last known token of its sequence exclusively."""
        in_flight = self.loop.in_flight.progress if self.loop.in_flight else []
        check_invariants(self.scheduler, in_flight)
        allowed: set[int] = set()
        for seq in self.seqs:
            known = seq.token_ids[:-1] if seq.last_token == PENDING else seq.token_ids
            allowed.update(chain_hashes(known[:-1], seq.block_size))
        assert self.scheduler.block_manager.hash_to_block_id.keys() <= allowed
        assert all(count == 1 for count in self.runner.wasted.values())

    def finish_all(self) -> None:
        """Step until nothing lives; I7 as `scheduling.run_to_end` states it, one step later."""
        idle = 0
        while self.live():
            before = sum(map(len, self.accepted.values()))
            longest = max(map(len, self.live()))
            self.step()
            idle = idle + 1 if sum(map(len, self.accepted.values())) == before else 0
            assert idle <= -(-longest // self.scheduler.max_num_batched_tokens) + 2, "I7"
        self.drain()  # the last one may have ended by EOS
        assert self.loop.in_flight is None and self.scheduler.is_finished()
        check_invariants(self.scheduler)

    def assert_as_alone(self, seq: Sequence) -> None:
        """Tokens and finish reason are what the prompt determines, whatever else ran."""
        ids, reason = complete_alone(
            seq.prompt_token_ids,
            seq.max_tokens,
            self.scheduler.max_model_len,
            () if seq.ignore_eos else (EOS,),
            VOCAB_SIZE,
        )
        for count in range(1, len(ids) + 1):
            if self.ends(seq, ids[:count]):
                ids, reason = ids[:count], "stop"
                break
        assert (seq.completion_token_ids, seq.finish_reason) == (ids, reason)
        assert seq.is_finished and seq.num_cached_tokens == 0 and seq.block_table == []
        assert self.accepted[seq.seq_id] == ids == self.returned[seq.seq_id]


class AnySchedule(RuleBasedStateMachine):
    """Requests come, steps run, launches and collections fail, requests are aborted: in any order,
    with a step in flight or not, in any pool."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_blocks=st.integers(1, 12),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        max_model_len=st.integers(2, 40),
        learns_headroom=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        max_model_len: int,
        learns_headroom: bool,
    ) -> None:
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self.scheduler = self.engine.scheduler
        self.scheduler.learns_headroom = learns_headroom
        self.expected: list[Sequence] = []  # added, and not aborted

    @rule(
        prompt=st.lists(st.sampled_from(LETTERS), min_size=1, max_size=14),
        max_tokens=st.integers(1, 20),
        ignore_eos=st.booleans(),
        double=st.sampled_from([None, *LETTERS]),
    )
    def add(self, prompt: list[int], max_tokens: int, ignore_eos: bool, double: int | None) -> None:
        seq = make_sequence(self.scheduler, prompt, max_tokens=max_tokens, ignore_eos=ignore_eos)
        try:
            self.engine.add(seq, double)
        except ValueError:  # could never run here: test_scheduler_fuzz.py tests which
            return
        self.expected.append(seq)

    @precondition(lambda self: self.engine.live())
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule()
    def drain(self) -> None:
        self.engine.drain()
        assert self.engine.loop.in_flight is None

    @precondition(lambda self: self.engine.live())
    @rule(method=st.sampled_from(["launch", "collect"]))
    def step_that_fails(self, method: str) -> None:
        """It may not come to that call; if it does, nothing is in flight afterwards."""
        self.engine.runner.failing = method
        calls = len(self.engine.runner.calls)
        try:
            self.engine.step()
        except RuntimeError:
            assert self.engine.loop.in_flight is None
            assert not any(PENDING in seq.token_ids for seq in self.engine.seqs)
        else:
            assert method not in self.engine.runner.calls[calls:]
        self.engine.runner.failing = None

    @precondition(lambda self: self.engine.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Also of one that the step in flight makes full: it is in no queue."""
        seq = data.draw(st.sampled_from(self.engine.live()))
        self.scheduler.abort(seq)
        assert seq.completion_token_ids == self.engine.accepted[seq.seq_id]
        self.expected.remove(seq)

    @invariant()
    def holds(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.finish_all()
        for seq in self.expected:
            self.engine.assert_as_alone(seq)
        assert_cache_still_hits(self.scheduler, self.engine.runner.model)


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True
)


@pytest.mark.parametrize("learns_headroom", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_case_15_sixty_requests_a_step_ahead(seed: int, learns_headroom: bool) -> None:
    """Through preemptions, with many ends by EOS or by the stop rule in the middle."""
    rng = random.Random(seed)
    engine = Engine(num_blocks=12, block_size=4, max_num_batched_tokens=24, max_num_seqs=6)
    engine.scheduler.learns_headroom = learns_headroom
    for i in range(60):
        prompt = rng.choices(LETTERS, k=rng.randint(1, 14))
        seq = make_sequence(
            engine.scheduler, prompt, max_tokens=rng.randint(1, 20), ignore_eos=i % 3 == 0
        )
        engine.add(seq, rng.choice([None, *LETTERS]))
    engine.finish_all()
    for seq in engine.seqs:
        engine.assert_as_alone(seq)
    assert_cache_still_hits(engine.scheduler, engine.runner.model)
    assert engine.scheduler.num_preemptions >= (1 if learns_headroom else 10)
    assert len(engine.runner.wasted) >= 10, "nothing ended in the middle of its way"


def test_waiting_requests_are_admitted_when_a_step_in_flight_has_filled_the_pool() -> None:
    """All that run are full with the step in flight, and the next prompt does not fit yet: the loop
    takes the step in and goes on, instead of finding nothing that can run."""
    engine = Engine(num_blocks=2, block_size=4)
    for _ in range(3):
        engine.add(make_sequence(engine.scheduler, [1] * 6, max_tokens=2, ignore_eos=True))
    engine.finish_all()
    for seq in engine.seqs:
        engine.assert_as_alone(seq)
