"""Scheduler: the rules of a step, one by one. B is the block size."""

import pytest
from invariants import check_invariants
from scheduling import (
    FakeModel,
    add_request,
    make_scheduler,
    make_sequence,
    run_step,
)

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus

# --- prefill ---------------------------------------------------------------------------------


def test_requests_are_taken_in_the_order_of_arrival_up_to_max_num_seqs() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=2)
    model = FakeModel(scheduler)
    a, b, c = (add_request(scheduler, [i]) for i in range(3))
    assert list(scheduler.waiting) == [a, b, c] and not scheduler.running
    assert run_step(scheduler, model) == (True, [(a, 1), (b, 1)])
    assert list(scheduler.waiting) == [c] and list(scheduler.running) == [a, b]


def test_a_request_added_between_steps_joins_at_the_next_one_alone() -> None:
    """Continuous batching. Prefill comes first and is never mixed with decode."""
    scheduler = make_scheduler(num_blocks=8)
    model = FakeModel(scheduler)
    a = add_request(scheduler, [1, 2])
    run_step(scheduler, model)
    run_step(scheduler, model)
    b = add_request(scheduler, [3, 4, 5])
    assert run_step(scheduler, model) == (True, [(b, 3)])
    assert a.num_completion_tokens == 2, "a did not move"
    assert list(scheduler.running) == [a, b]
    assert run_step(scheduler, model) == (False, [(a, 1), (b, 1)])


def test_a_prefill_step_fills_the_budget_exactly() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=5)
    model = FakeModel(scheduler)
    a, b, c = (add_request(scheduler, [i] * n) for i, n in enumerate((3, 2, 1)))
    assert run_step(scheduler, model) == (True, [(a, 3), (b, 2)])
    assert run_step(scheduler, model) == (True, [(c, 1)])


def test_only_the_first_of_a_step_is_cut_and_a_later_one_that_does_not_fit_stops_the_walk() -> None:
    """Nobody overtakes: the one-token request behind waits as well."""
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=8)
    model = FakeModel(scheduler)
    a = add_request(scheduler, [1] * 6)
    b = add_request(scheduler, [2] * 11)
    c = add_request(scheduler, [3])
    assert run_step(scheduler, model) == (True, [(a, 6)])
    assert list(scheduler.waiting) == [b, c] and b.block_table == []
    assert run_step(scheduler, model) == (True, [(b, 8)])
    assert run_step(scheduler, model) == (True, [(b, 3), (c, 1)])


def test_a_cut_sequence_stays_at_the_left_with_blocks_for_its_whole_length() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=8)
    model = FakeModel(scheduler)
    a = add_request(scheduler, [1] * 17)
    b = add_request(scheduler, [2])
    for chunks_done in (1, 2):
        assert run_step(scheduler, model) == (True, [(a, 8)])
        assert a.status is SequenceStatus.WAITING and list(scheduler.waiting) == [a, b]
        assert (a.num_tokens, a.num_cached_tokens) == (17, 8 * chunks_done)
        assert a.block_table == [0, 1, 2, 3, 4] and not scheduler.running
    assert run_step(scheduler, model) == (True, [(a, 1), (b, 1)])
    assert list(scheduler.running) == [a, b] and a.status is SequenceStatus.RUNNING


def test_a_request_without_room_stops_the_walk() -> None:
    """First come, first served: a smaller request behind it is not let past."""
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    model = FakeModel(scheduler)
    a = add_request(scheduler, [1] * 11)
    b = add_request(scheduler, [2] * 5)
    c = add_request(scheduler, [3])
    assert run_step(scheduler, model) == (True, [(a, 11)])
    assert list(scheduler.waiting) == [b, c]
    assert run_step(scheduler, model) == (False, [(a, 1)])


def test_prefix_hits_count_for_room_and_for_budget() -> None:
    """One free block and a budget of 5, but 12 of the 13 positions are another's already."""
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=5)
    model = FakeModel(scheduler)
    first = add_request(scheduler, [1] * 12, max_tokens=2)
    for _ in range(3):  # chunks of 5, 5 and 2
        run_step(scheduler, model)
    assert list(scheduler.running) == [first] and len(scheduler.block_manager.free_block_ids) == 1
    second = add_request(scheduler, [1] * 12 + [2], max_tokens=1)
    assert run_step(scheduler, model) == (True, [(second, 1)])


def test_equal_prompts_of_one_first_batch_do_not_hit_each_other() -> None:
    """Hashes are registered after the K/V exists, so within a step there is nothing to hit."""
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    model = FakeModel(scheduler)
    a, b = (add_request(scheduler, [1] * 8) for _ in range(2))
    assert run_step(scheduler, model) == (True, [(a, 8), (b, 8)])
    assert not set(a.block_table) & set(b.block_table)
    c = add_request(scheduler, [1] * 8)
    assert run_step(scheduler, model) == (True, [(c, 4)])


# --- decode and preemption -------------------------------------------------------------------


def test_decode_takes_the_left_of_running_up_to_max_num_seqs() -> None:
    """The chosen keep their place, so the oldest run until one of them is done."""
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=2)
    model = FakeModel(scheduler)
    a, b, c = (add_request(scheduler, [i], max_tokens=3) for i in range(3))
    run_step(scheduler, model)
    assert run_step(scheduler, model) == (True, [(c, 1)])
    assert run_step(scheduler, model) == (False, [(a, 1), (b, 1)])
    assert list(scheduler.running) == [a, b, c]
    assert run_step(scheduler, model) == (False, [(a, 1), (b, 1)])
    assert a.is_finished and b.is_finished
    assert run_step(scheduler, model) == (False, [(c, 1)])


def test_the_rightmost_of_running_gives_way_first() -> None:
    """All open a block and one is free. A takes it, B takes that of D; C, then the last, yields."""
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    model = FakeModel(scheduler)
    a, b, c, d = (add_request(scheduler, [i] * 4, max_tokens=4) for i in range(4))
    run_step(scheduler, model)
    assert run_step(scheduler, model) == (False, [(a, 1), (b, 1)])
    assert list(scheduler.waiting) == [c, d], "d went first, c to the left of it"
    assert a.block_table == [0, 4] and b.block_table == [1, 3] and c.block_table == []
    assert c.num_tokens == d.num_tokens == 5, "they keep their accepted token"
    check_invariants(scheduler)


def test_the_last_of_running_preempts_itself() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    model = FakeModel(scheduler)
    a = add_request(scheduler, [1] * 4, max_tokens=4)
    b = add_request(scheduler, [2] * 4, max_tokens=4)
    run_step(scheduler, model)
    assert run_step(scheduler, model) == (False, [(a, 1)])
    assert list(scheduler.waiting) == [b] and b.status is SequenceStatus.WAITING
    assert list(scheduler.running) == [a]


def test_a_preempted_request_waits_left_of_newer_ones_and_prefills_all_its_tokens() -> None:
    """Prefix hits on its own blocks save what has not been overwritten."""
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    scheduler.learns_headroom = False
    model = FakeModel(scheduler)
    a = add_request(scheduler, [1] * 8, max_tokens=2)
    b = add_request(scheduler, [2] * 8, max_tokens=2)
    run_step(scheduler, model)
    c = add_request(scheduler, [3] * 5)
    assert run_step(scheduler, model) == (False, [(a, 1)]), "a took the last block; b gave way"
    assert a.is_finished and list(scheduler.waiting) == [b, c]
    assert run_step(scheduler, model) == (True, [(b, 1), (c, 5)])
    assert b.is_finished and b.num_completion_tokens == 2


def test_decode_needs_no_block_inside_one() -> None:
    """A full pool preempts nobody while every sequence writes into a block that it has."""
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    model = FakeModel(scheduler)
    a, b = (add_request(scheduler, [i], max_tokens=4) for i in range(2))
    run_step(scheduler, model)
    assert not scheduler.block_manager.free_block_ids
    for _ in range(3):
        assert run_step(scheduler, model) == (False, [(a, 1), (b, 1)])
    assert scheduler.is_finished()


# --- stopping --------------------------------------------------------------------------------


def emit(scheduler: Scheduler, token_id: int) -> None:
    """One step in which the model gives every sequence the same token."""
    seqs, is_prefill = scheduler.schedule()
    scheduler.postprocess(seqs, [token_id] * len(seqs), is_prefill)
    check_invariants(scheduler)


@pytest.mark.parametrize("eos", [5, 9])
def test_any_eos_id_stops_unless_ignored(eos: int) -> None:
    scheduler = make_scheduler(num_blocks=8, eos_token_ids=[5, 9])
    stops = add_request(scheduler, [1])
    goes_on = add_request(scheduler, [1], max_tokens=3, ignore_eos=True)
    emit(scheduler, 4)
    emit(scheduler, eos)
    assert stops.is_finished and stops.finish_reason == "stop"
    assert stops.completion_token_ids == [4, eos]
    assert list(scheduler.running) == [goes_on] and goes_on.finish_reason is None
    emit(scheduler, 4)
    assert goes_on.completion_token_ids == [4, eos, 4] and goes_on.finish_reason == "length"


def test_an_eos_id_in_the_prompt_stops_nothing() -> None:
    scheduler = make_scheduler(num_blocks=8, eos_token_ids=[5])
    seq = add_request(scheduler, [5, 1, 5], max_tokens=2)
    emit(scheduler, 1)
    assert not seq.is_finished
    emit(scheduler, 1)
    assert seq.finish_reason == "length"


def test_eos_as_the_last_allowed_token_is_a_stop() -> None:
    scheduler = make_scheduler(num_blocks=8, eos_token_ids=[5])
    seq = add_request(scheduler, [1], max_tokens=1)
    emit(scheduler, 5)
    assert seq.finish_reason == "stop" and seq.completion_token_ids == [5]


def test_what_would_end_it_before_min_tokens_does_not() -> None:
    """The sampler bans those ids; it has nothing else to give when they are all there are."""
    scheduler = make_scheduler(num_blocks=8, eos_token_ids=[5])
    seq = add_request(scheduler, [1, 2], min_tokens=3, stop_token_ids=[9])
    emit(scheduler, 5)
    emit(scheduler, 9)
    assert not seq.is_finished
    emit(scheduler, 5)
    assert seq.finish_reason == "stop" and seq.completion_token_ids == [5, 9, 5]


def test_the_candidate_of_a_cut_prompt_is_dropped_even_if_it_is_eos() -> None:
    scheduler = make_scheduler(num_blocks=8, eos_token_ids=[5], max_num_batched_tokens=2)
    seq = add_request(scheduler, [1, 2, 3])
    emit(scheduler, 5)
    assert not seq.is_finished and seq.token_ids == [1, 2, 3]
    emit(scheduler, 5)
    assert seq.finish_reason == "stop" and seq.token_ids == [1, 2, 3, 5]


def test_a_finished_sequence_leaves_running_and_frees_its_blocks_but_can_be_hit() -> None:
    """Its blocks are hashed before they are freed."""
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    model = FakeModel(scheduler)
    seq = add_request(scheduler, [1] * 8, max_tokens=1)
    run_step(scheduler, model)
    assert seq.status is SequenceStatus.FINISHED and not scheduler.running
    assert seq.num_cached_tokens == 0 and seq.block_table == [] and len(seq.token_ids) == 9
    assert list(scheduler.block_manager.free_block_ids) == [2, 3, 1, 0]
    assert scheduler.block_manager.can_allocate(seq) == 2


# --- the hand-off ----------------------------------------------------------------------------


def test_a_sequence_made_for_another_block_size_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="block_size=4"):
        scheduler.add(Sequence([1], block_size=256))
    assert scheduler.is_finished()


def test_the_batch_unpacks_as_the_loop_of_the_readme_writes_it() -> None:
    scheduler = make_scheduler(num_blocks=4)
    seq = make_sequence(scheduler, [1, 2])
    scheduler.add(seq)
    seqs, is_prefill = batch = scheduler.schedule()
    assert seqs is batch.seqs and seqs == [seq] and is_prefill is batch.is_prefill is True
    assert seq.num_scheduled_tokens == 2
