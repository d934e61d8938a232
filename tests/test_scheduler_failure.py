"""A step that fails, and requests that are given up: nothing may leak, or be remembered wrongly."""

import pytest
from invariants import check_invariants
from scheduling import (
    FakeModel,
    add_request,
    complete_alone,
    fail_step,
    make_scheduler,
    run_step,
    run_to_end,
)

from nanovllm.engine.sequence import Sequence, SequenceStatus


def test_rollback_of_a_prefill_step() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_seqs=2)
    model = FakeModel(scheduler)
    a, b, c = (add_request(scheduler, [i] * 5, max_tokens=3) for i in range(3))
    assert fail_step(scheduler, model) == [a, b]
    assert list(scheduler.waiting) == [a, b, c] and not scheduler.running
    assert len(scheduler.block_manager.free_block_ids) == 8
    assert run_step(scheduler, model) == (True, [(a, 5), (b, 5)]), "nothing was registered"


def test_rollback_of_a_chunk_forgets_the_chunks_before_it_too_but_not_their_hashes() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=8)
    model = FakeModel(scheduler)
    seq = add_request(scheduler, [1] * 20)
    run_step(scheduler, model)
    assert fail_step(scheduler, model) == [seq]
    assert seq.num_cached_tokens == 0 and seq.block_table == []
    assert run_step(scheduler, model) == (True, [(seq, 8)])
    assert seq.num_cached_tokens == 16, "two blocks were hit, two computed"


def test_rollback_of_a_decode_step_keeps_the_order_and_the_accepted_tokens() -> None:
    """C was preempted while the step was scheduled; A and B go to the left of it."""
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    model = FakeModel(scheduler)
    a, b, c = (add_request(scheduler, [i] * 4, max_tokens=3) for i in range(3))
    run_step(scheduler, model)
    assert fail_step(scheduler, model) == [a, b]
    assert list(scheduler.waiting) == [a, b, c] and not scheduler.running
    assert [seq.num_completion_tokens for seq in (a, b, c)] == [1, 1, 1]
    run_to_end(scheduler, model)


@pytest.mark.parametrize("moment", ["waiting", "cut", "running", "preempted"])
def test_abort_forgets_a_request_wherever_it_is(moment: str) -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=8)
    model = FakeModel(scheduler)
    other = add_request(scheduler, [1] * 4, max_tokens=5)
    run_step(scheduler, model)
    seq = add_request(scheduler, [2] * (4 if moment == "running" else 10), max_tokens=3)
    if moment != "waiting":
        run_step(scheduler, model)
    if moment == "preempted":
        fail_step(scheduler, model)
    scheduler.abort(seq)
    check_invariants(scheduler)
    assert seq not in scheduler.waiting and seq not in scheduler.running
    assert (seq.status, seq.finish_reason) == (SequenceStatus.FINISHED, "abort")
    assert (seq.num_cached_tokens, seq.block_table) == (0, [])
    run_to_end(scheduler, model)
    assert other.num_completion_tokens == 5


def test_abort_of_an_unknown_or_finished_request_does_nothing() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    model = FakeModel(scheduler)
    finished = add_request(scheduler, [1], max_tokens=1)
    run_step(scheduler, model)
    live = add_request(scheduler, [1])
    scheduler.abort(finished)
    scheduler.abort(Sequence([1], block_size=4))
    assert list(scheduler.waiting) == [live] and finished.finish_reason == "length"


@pytest.mark.parametrize("failing_step", range(6))
def test_case_38_after_a_failed_step_and_abort_the_next_job_gets_only_its_own(
    failing_step: int,
) -> None:
    """Steps 0-2 prefill (two chunks of the first prompt, then the rest), later ones decode."""
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=8)
    model = FakeModel(scheduler)
    prompts = [[1] * 13, [1] * 9, [2] * 3]
    failed = [add_request(scheduler, prompt, max_tokens=6) for prompt in prompts]
    for _ in range(failing_step):
        run_step(scheduler, model)
    fail_step(scheduler, model)
    for seq in failed:
        scheduler.abort(seq)
    assert scheduler.is_finished()
    assert sorted(scheduler.block_manager.free_block_ids) == list(range(8))
    retried = [add_request(scheduler, prompt, max_tokens=6) for prompt in prompts]
    run_to_end(scheduler, model)
    assert {seq.finish_reason for seq in failed} == {"abort"}
    for prompt, seq in zip(prompts, retried, strict=True):
        assert seq.completion_token_ids == complete_alone(prompt, 6)[0]


def test_case_38_without_abort_the_failed_requests_go_on_as_if_nothing_had_happened() -> None:
    """`step()` callers may retry: the garbage of the failed step is never read."""
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=8)
    model = FakeModel(scheduler)
    prompts = [[1] * 13, [1] * 9, [2] * 3]
    seqs = [add_request(scheduler, prompt, max_tokens=6) for prompt in prompts]
    for _ in range(9):
        fail_step(scheduler, model)
        run_step(scheduler, model)
    run_to_end(scheduler, model)
    for prompt, seq in zip(prompts, seqs, strict=True):
        assert seq.completion_token_ids == complete_alone(prompt, 6)[0]
