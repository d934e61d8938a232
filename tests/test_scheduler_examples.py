"""The worked examples of the README and the docstrings, as far as they are bookkeeping: who runs,
how many positions, which blocks. test_inputs.py has the tensors of the same steps."""

from scheduling import (
    FakeModel,
    add_request,
    make_scheduler,
    make_sequence,
    put_first,
    run_step,
    run_to_end,
)

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus


def lengths(seq: Sequence) -> tuple[int, int]:
    """(total, cached), as the examples write T/C."""
    return seq.num_tokens, seq.num_cached_tokens


def num_free(scheduler: Scheduler) -> int:
    return len(scheduler.block_manager.free_block_ids)


def test_example_a_one_request() -> None:
    scheduler = make_scheduler(num_blocks=4)
    model = FakeModel(scheduler, vocab_size=701)
    seq = add_request(scheduler, [100, 200, 300], max_tokens=3, ignore_eos=True)
    assert run_step(scheduler, model) == (True, [(seq, 3)])
    assert lengths(seq) == (4, 3) and seq.num_completion_tokens == 1
    assert run_step(scheduler, model) == (False, [(seq, 1)])
    assert lengths(seq) == (5, 4)
    assert run_step(scheduler, model) == (False, [(seq, 1)])
    assert lengths(seq) == (6, 0) and seq.block_table == []
    assert seq.status is SequenceStatus.FINISHED and scheduler.is_finished()


def test_example_b_two_requests_in_five_steps() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2)
    model = FakeModel(scheduler)
    r1 = add_request(scheduler, [1, 2, 3], max_tokens=2)
    r2 = add_request(scheduler, [4, 5, 6, 7], max_tokens=5)
    assert run_step(scheduler, model) == (True, [(r1, 3), (r2, 4)])
    assert lengths(r1) == (4, 3) and lengths(r2) == (5, 4) and num_free(scheduler) == 2
    assert run_step(scheduler, model) == (False, [(r1, 1), (r2, 1)])
    assert r1.is_finished and num_free(scheduler) == 3
    for expected_free in (3, 3, 4):
        assert run_step(scheduler, model) == (False, [(r2, 1)])
        assert num_free(scheduler) == expected_free
    assert r2.is_finished and scheduler.is_finished()


def test_example_b_one_sequence_per_step_in_seven_steps() -> None:
    """max_num_seqs caps a step, not the number of live requests."""
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=1)
    model = FakeModel(scheduler)
    r1 = add_request(scheduler, [1, 2, 3], max_tokens=2)
    r2 = add_request(scheduler, [4, 5, 6, 7], max_tokens=5)
    steps, free = [], []
    while not scheduler.is_finished():
        steps.append(run_step(scheduler, model))
        free.append(num_free(scheduler))
    prefills = [(True, [(r1, 3)]), (True, [(r2, 4)])]
    assert steps == [*prefills, (False, [(r1, 1)]), *[(False, [(r2, 1)])] * 4]
    assert free == [3, 2, 3, 3, 3, 3, 4]


def test_example_c_a_block_boundary() -> None:
    scheduler = make_scheduler(num_blocks=4)
    model = FakeModel(scheduler)
    seq = add_request(scheduler, [7] * 256, max_tokens=3)
    run_step(scheduler, model)
    assert lengths(seq) == (257, 256)
    assert seq.num_blocks == 2 and seq.block_table == [0], "the new token has no slot yet"
    run_step(scheduler, model)
    assert lengths(seq) == (258, 257) and seq.block_table == [0, 1]
    run_step(scheduler, model)
    assert lengths(seq) == (259, 0) and seq.block_table == [] and num_free(scheduler) == 4


def test_example_lifecycle() -> None:
    scheduler = make_scheduler(num_blocks=4)
    model = FakeModel(scheduler)
    a = add_request(scheduler, range(64), max_tokens=2)
    b = add_request(scheduler, range(96), max_tokens=3)
    assert run_step(scheduler, model) == (True, [(a, 64), (b, 96)])
    assert lengths(a) == (65, 64) and lengths(b) == (97, 96)
    assert run_step(scheduler, model) == (False, [(a, 1), (b, 1)])
    assert lengths(a) == (66, 0) and lengths(b) == (98, 97)
    assert run_step(scheduler, model) == (False, [(b, 1)])
    assert scheduler.is_finished()


def test_example_chunk() -> None:
    scheduler = make_scheduler(num_blocks=32, max_num_batched_tokens=512)
    put_first(scheduler.block_manager, 17, 5, 23, 11)
    model = FakeModel(scheduler)
    a = add_request(scheduler, [i % 701 for i in range(700)])
    b = add_request(scheduler, range(32))
    assert run_step(scheduler, model) == (True, [(a, 512)])
    assert lengths(a) == (700, 512) and a.num_completion_tokens == 0, "the candidate is dropped"
    assert a.status is SequenceStatus.WAITING and list(scheduler.waiting) == [a, b]
    assert a.block_table == [17, 5, 23] and b.block_table == []
    assert run_step(scheduler, model) == (True, [(a, 188), (b, 32)])
    assert lengths(a) == (701, 700) and lengths(b) == (33, 32)
    assert b.block_table == [11] and list(scheduler.running) == [a, b]
    assert run_step(scheduler, model) == (False, [(a, 1), (b, 1)])
    assert lengths(a) == (702, 701) and lengths(b) == (34, 33)


def test_example_prefix_after_the_first_is_done() -> None:
    scheduler = make_scheduler(num_blocks=8)
    model = FakeModel(scheduler)
    shared = list(range(512))
    first = add_request(scheduler, shared + [601] * 108, max_tokens=1)
    run_step(scheduler, model)
    assert first.is_finished
    second = add_request(scheduler, shared + [602] * 108)
    batch = scheduler.schedule()
    assert batch.is_prefill and batch.seqs == [second]
    assert (second.num_cached_tokens, second.num_scheduled_tokens) == (512, 108)
    assert second.block_table[:2] == [0, 1]


def test_example_prefix_both_alive_hold_four_blocks() -> None:
    scheduler = make_scheduler(num_blocks=8)
    model = FakeModel(scheduler)
    shared = list(range(512))
    first = add_request(scheduler, shared + [601] * 108)
    assert run_step(scheduler, model) == (True, [(first, 620)])
    second = add_request(scheduler, shared + [602] * 108)
    assert run_step(scheduler, model) == (True, [(second, 108)])
    assert len(scheduler.block_manager.used_block_ids) == 4
    assert first.block_table[:2] == second.block_table[:2]
    assert first.block_table[2] != second.block_table[2]


def test_example_prefix_a_512_id_prompt_repeated_computes_its_last_block() -> None:
    scheduler = make_scheduler(num_blocks=8)
    model = FakeModel(scheduler)
    for expected in (512, 256, 256):
        seq = add_request(scheduler, range(512), max_tokens=1)
        assert run_step(scheduler, model) == (True, [(seq, expected)])


def test_example_preempt() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    model = FakeModel(scheduler)
    a, b, c = (add_request(scheduler, [i] * 4, max_tokens=3) for i in range(3))
    assert run_step(scheduler, model) == (True, [(a, 4), (b, 4), (c, 4)])
    assert num_free(scheduler) == 1
    ids = list(c.token_ids)
    assert run_step(scheduler, model) == (False, [(a, 1), (b, 1)])
    assert list(scheduler.waiting) == [c] and list(scheduler.running) == [a, b]
    assert c.status is SequenceStatus.WAITING and lengths(c) == (5, 0) and c.block_table == []
    assert c.token_ids == ids
    run_to_end(scheduler, model)
    assert [seq.num_completion_tokens for seq in (a, b, c)] == [3, 3, 3]


def test_example_slots_blocks_held_after_prefill() -> None:
    """Lengths 255/256/257/512/513 hold 1/1/2/2/3 blocks."""
    for length, expected in [(255, 1), (256, 1), (257, 2), (512, 2), (513, 3)]:
        scheduler = make_scheduler(num_blocks=4)
        seq = make_sequence(scheduler, range(length))
        scheduler.add(seq)
        scheduler.schedule()
        assert len(seq.block_table) == expected and num_free(scheduler) == 4 - expected
