"""Admission under pressure: the learned headroom, on big jobs that are simulated with the real
scheduler (tests/simulate_admission.py does the same at full size)."""

from typing import Any

import pytest
from scheduling import FakeModel, add_request, make_scheduler, run_step, run_to_end
from simulate_admission import Outcome, Wish, blocks_wanted, make_job, simulate, that_fit

from nanovllm.engine import scheduler as scheduler_module
from nanovllm.engine.scheduler import Scheduler

BLOCK = 16
Schedule = list[tuple[bool, list[tuple[int, int]]]]

# Prompts and completions of 10 to 102 tokens: a tenth of the classic workload's.
LENGTHS = (10, 102)
JOBS: dict[str, list[Wish]] = {
    "to max_tokens": make_job(3000, LENGTHS, LENGTHS),
    "stops early": make_job(3000, LENGTHS, (5, 40), max_tokens=102),
    "long prompts": make_job(1500, (100, 300), (5, 60)),
    "long completions": make_job(3000, (5, 20), (60, 120)),
}


def a_tenth(job: list[Wish]) -> int:
    """Blocks for a tenth of what 512 of these requests want."""
    return blocks_wanted(job[:512], BLOCK) // 10


@pytest.fixture(scope="module", params=JOBS)
def under_pressure(request: pytest.FixtureRequest) -> tuple[list[Wish], int, Outcome]:
    job = JOBS[request.param]
    return job, a_tenth(job), simulate(job, a_tenth(job), BLOCK)


# --- no thrashing ---------------------------------------------------------------------------------


def test_hardly_a_position_is_computed_twice(
    under_pressure: tuple[list[Wish], int, Outcome],
) -> None:
    """512 sequences may run, and the pool holds a tenth of what they want. What is computed twice
    are some two pools full, once, while the headroom is learned: the longer the job, the less."""
    _, _, outcome = under_pressure
    assert outcome.preemptions > 0, "no pressure, no test"
    assert outcome.computed / outcome.needed <= 1.05, outcome


def test_throughput_is_not_below_a_pool_sized_batch_run_alone(
    under_pressure: tuple[list[Wish], int, Outcome],
) -> None:
    """By the clock of `step_seconds`: what the first requests, as many as fit in the pool at their
    full lengths, reach without anybody beside or behind them."""
    job, num_blocks, outcome = under_pressure
    alone = simulate(that_fit(job, num_blocks, BLOCK), num_blocks, BLOCK)
    assert alone.preemptions == 0
    assert outcome.tokens_per_second >= alone.tokens_per_second


def test_nor_below_the_plain_rule(under_pressure: tuple[list[Wish], int, Outcome]) -> None:
    """Keeping blocks free costs less than it saves: by the clock, and in positions computed."""
    job, num_blocks, outcome = under_pressure
    plain = simulate(job, num_blocks, BLOCK, learns_headroom=False)
    assert outcome.tokens_per_second >= 0.99 * plain.tokens_per_second
    assert outcome.preemptions < plain.preemptions / 2
    assert outcome.computed < plain.computed


def test_case_41_five_thousand_prompts_on_a_pool_that_holds_sixty() -> None:
    """No avalanche of preemption and repeated prefill, which the plain rule shows here."""
    job = make_job(5000, LENGTHS, LENGTHS)
    num_blocks = blocks_wanted(job[:60], BLOCK)
    outcome = simulate(job, num_blocks, BLOCK)
    assert outcome.waste <= 1.05 and outcome.preemptions < 500
    plain = simulate(job[:1000], num_blocks, BLOCK, learns_headroom=False)
    assert plain.waste > 1.15 and plain.preemptions > 500


# --- with ample memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [40, 16384])
def test_with_ample_memory_the_schedule_is_the_plain_one_step_by_step(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same phases, requests, order and positions; with chunks and with max_num_seqs in the way."""
    monkeypatch.setattr("simulate_admission.make_scheduler", _with(max_num_batched_tokens=budget))
    job = make_job(120, LENGTHS, (5, 40), max_tokens=60)
    schedules: list[Schedule] = [[], []]
    for learns, schedule in zip((True, False), schedules, strict=True):
        ample = blocks_wanted(job, BLOCK)
        outcome = simulate(job, ample, BLOCK, learns, max_num_seqs=20, schedule=schedule)
        assert outcome.preemptions == 0 and outcome.waste == 1.0
    assert schedules[0] == schedules[1] and len(schedules[0]) > 100


def _with(**settings: Any) -> Any:
    return lambda *args, **kwargs: make_scheduler(*args, **kwargs, **settings)


def test_the_schedule_is_the_plain_one_up_to_the_first_preemption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scarce pool alone changes nothing: the rule begins with what it is meant to prevent."""
    job = make_job(60, (10, 20), (60, 100))
    preempted_at: list[int] = []
    schedules: list[Schedule] = [[], []]
    preempt = Scheduler.preempt

    def noting(self: Scheduler, seq: Any) -> None:
        preempted_at.append(self.num_steps)
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "preempt", noting)
    for learns, schedule in zip((True, False), schedules, strict=True):
        simulate(job, 120, BLOCK, learns, schedule=schedule)
    first = preempted_at[0]
    assert first > 10 and schedules[0][: first + 1] == schedules[1][: first + 1]
    assert schedules[0] != schedules[1]


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("learns", [True, False])
def test_example_preempt_with_headroom_0(learns: bool) -> None:
    """Blocks of 4, a pool of 4, three prompts of 4: A takes the last block, B needs one, C is
    preempted. With headroom 0 and under either rule."""
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.learns_headroom = learns
    model = FakeModel(scheduler)
    a, b, c = (add_request(scheduler, [i] * 4, max_tokens=3) for i in range(3))
    assert scheduler.headroom == 0
    assert run_step(scheduler, model) == (True, [(a, 4), (b, 4), (c, 4)])
    assert run_step(scheduler, model) == (False, [(a, 1), (b, 1)])
    assert list(scheduler.waiting) == [c] and list(scheduler.running) == [a, b]
    assert (c.num_tokens, c.num_cached_tokens, c.block_table) == (5, 0, [])
    assert (scheduler.headroom > 0) == learns
    run_to_end(scheduler, model)


def running_and_waiting(headroom: float, num_blocks: int = 10) -> Scheduler:
    """Blocks of 4. Two run: 8 + 1 tokens, 3 blocks each once stored, with 8 and 16
    tokens left to grow, 2 and 4 blocks. One of 4 tokens (1 block) with 4 to grow waits."""
    scheduler = make_scheduler(num_blocks, block_size=4)
    for i, length in enumerate((9, 17)):
        add_request(scheduler, [i] * 8, max_tokens=length)
    model = FakeModel(scheduler)
    run_step(scheduler, model)
    run_step(scheduler, model)  # the ninth tokens are stored: 3 blocks each
    scheduler.headroom = headroom
    add_request(scheduler, [9] * 4, max_tokens=4)
    return scheduler


@pytest.mark.parametrize(
    ("headroom", "num_blocks", "joins"),
    [
        # Growths in blocks: 1 (the new one), 1.75 and 3.75; now held: 1, 3, 3. At the end of the
        # first all three have grown by 1; of the second two by 1.75, less the 1 given back; of the
        # third one by 3.75, less 4: the peak is 3, and 4 - 1 are free.
        (1.0, 10, True),
        (1.0, 9, False),
        # 1.5 times that: 4.5.
        (1.5, 11, False),
        (1.5, 12, True),
        # The plain rule asks for the block alone.
        (0.0, 7, True),
        (0.0, 6, False),
    ],
)
def test_a_request_joins_if_the_peak_of_what_is_to_come_fits(
    headroom: float, num_blocks: int, joins: bool
) -> None:
    assert running_and_waiting(headroom, num_blocks).schedule().is_prefill == joins


@pytest.mark.parametrize(
    ("num_blocks", "num_join"),
    [(36, 0), (37, 4), (38, 5), (80, 5)],
)
def test_under_pressure_requests_join_in_company(num_blocks: int, num_join: int) -> None:
    """16 run, in two blocks each. Each waiting one wants a block: the first joins where four others
    could as well, 1 + 16 // 4 in all; those after it as long as something is left to grow in."""
    scheduler = make_scheduler(num_blocks, block_size=4)
    for i in range(16):
        add_request(scheduler, [i] * 6, max_tokens=2)
    run_step(scheduler, FakeModel(scheduler))
    scheduler.headroom = 1e-9
    for i in range(5):
        add_request(scheduler, [i] * 3, max_tokens=2)
    seqs, is_prefill = scheduler.schedule()
    assert (len(seqs) if is_prefill else 0) == num_join


def test_company_wants_no_more_than_a_sixth_of_the_pool() -> None:
    """Else a long prompt would wait for half of those who run: 16 in a block each, 17 free of
    33, and one of 9 blocks, with company 45."""
    scheduler = make_scheduler(num_blocks=33, block_size=4)
    for i in range(16):
        add_request(scheduler, [i] * 2, max_tokens=2)
    run_step(scheduler, FakeModel(scheduler))
    scheduler.headroom = 1e-9
    add_request(scheduler, [9] * 34, max_tokens=2)
    assert scheduler.schedule().is_prefill


def test_growth_is_expected_up_to_the_longest_completion_so_far() -> None:
    """Where completions stop long before max_tokens, that is what counts."""
    scheduler = running_and_waiting(headroom=1.0)
    waiting = scheduler.waiting[0]
    for seq in (*scheduler.running, waiting):
        assert scheduler._blocks_to_grow(seq) == (seq.max_tokens - seq.num_completion_tokens) / 4
    scheduler.longest_completion = 3
    assert [scheduler._blocks_to_grow(seq) for seq in scheduler.running] == [1 / 4, 1 / 4]
    assert scheduler._blocks_to_grow(waiting) == 3 / 4
    scheduler.longest_completion = 1
    assert scheduler._blocks_to_grow(scheduler.running[0]) == 0, "never negative"
    scheduler.longest_completion, scheduler.max_model_len = 100, 11
    assert [scheduler._blocks_to_grow(seq) for seq in scheduler.running] == [1 / 4, 1 / 4]


def test_a_request_joins_when_nothing_runs_whatever_the_headroom() -> None:
    """Else nobody would ever run: `add` has made sure that it fits alone."""
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    add_request(scheduler, [1] * 8, max_tokens=5)
    scheduler.headroom = 1e6
    run_to_end(scheduler, FakeModel(scheduler))


def test_preemptions_raise_headroom_and_finished_requests_ease_it() -> None:
    most, raise_, ease = (
        getattr(scheduler_module, f"HEADROOM_{name}") for name in ("MOST", "RAISE", "EASE")
    )
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    model = FakeModel(scheduler)
    for i in range(3):
        add_request(scheduler, [i] * 4, max_tokens=3)
    run_step(scheduler, model)
    run_step(scheduler, model)
    raised = most * raise_
    assert scheduler.num_preemptions == 1 and scheduler.headroom == raised
    run_step(scheduler, model)  # A and B finish
    assert len(scheduler.running) == 0
    assert scheduler.headroom == pytest.approx(raised * (1 - ease) ** 2)
    assert scheduler.longest_completion == 3
    run_to_end(scheduler, model)
    add_request(scheduler, [5] * 4)
    assert (scheduler.headroom, scheduler.longest_completion) == (0, 0), "a new job"


def test_a_preemption_by_hand_teaches_nothing() -> None:
    """Nor does a step that failed: neither says that the pool is scarce."""
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    model = FakeModel(scheduler)
    add_request(scheduler, [1] * 4, max_tokens=3)
    run_step(scheduler, model)
    scheduler.preempt(scheduler.running.popleft())
    scheduler.rollback(scheduler.schedule().seqs)
    assert scheduler.headroom == 0 and scheduler.num_preemptions == 0
