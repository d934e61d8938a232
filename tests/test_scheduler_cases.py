"""Cases that broke engines of this kind, at the level of scheduler and block manager."""

import subprocess
import sys

import pytest
from scheduling import (
    SOME_FOLDER,
    FakeModel,
    add_request,
    complete_alone,
    make_scheduler,
    run_step,
    run_to_end,
)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "fits"),
    [(8, 5, False), (8, 2, False), (8, 1, True), (4, 6, False), (4, 5, True), (9, 1, False)],
)
def test_case_01_what_can_outgrow_the_pool_is_refused_when_added(
    prompt_len: int, max_tokens: int, fits: bool
) -> None:
    """Pool of 2 blocks of 4: 8 positions. The last accepted token needs none."""
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    model = FakeModel(scheduler)
    prompt = [1] * prompt_len
    if fits:
        seq = add_request(scheduler, prompt, max_tokens=max_tokens, ignore_eos=True)
        run_to_end(scheduler, model)
        assert seq.num_completion_tokens == max_tokens
        return
    with pytest.raises(ValueError, match=r"2 blocks of 4.*lower max_tokens or enlarge the pool"):
        add_request(scheduler, prompt, max_tokens=max_tokens, ignore_eos=True)
    assert scheduler.is_finished() and len(scheduler.block_manager.free_block_ids) == 2
    after = add_request(scheduler, [1] * 4, max_tokens=5)
    run_to_end(scheduler, model)
    assert after.num_completion_tokens == 5


def test_case_01_case_06_are_refused_without_asserts() -> None:
    """Under `python -O` as well, or the pool would run dry in the middle of a step."""
    script = f"""
from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
config = Config(model={SOME_FOLDER!r}, kvcache_block_size=4, max_model_len=64)
for num_blocks, prompt_len in ((2, 8), (99, 64)):
    scheduler = Scheduler(config, num_blocks, ())
    try:
        scheduler.add(Sequence([1] * prompt_len, SamplingParams(max_tokens=5), 4))
    except ValueError:
        print("refused", len(scheduler.waiting))
"""
    result = subprocess.run(
        [sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["refused 0", "refused 0"]


def test_case_03_a_third_request_waits_its_turn_and_nobody_starves() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=2)
    model = FakeModel(scheduler)
    seqs = [add_request(scheduler, [i], max_tokens=6) for i in range(2)]
    run_step(scheduler, model)
    run_step(scheduler, model)
    seqs.append(add_request(scheduler, [2], max_tokens=6))
    steps = run_to_end(scheduler, model)
    assert max(len(step.work) for step in steps) == 2
    for i, seq in enumerate(seqs):
        assert seq.completion_token_ids == complete_alone([i], 6)[0]


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "expected"), [(63, 9, 1), (60, 4, 4), (60, 9, 4)]
)
def test_case_06_prompt_and_completion_never_exceed_max_model_len(
    prompt_len: int, max_tokens: int, expected: int
) -> None:
    """The pool holds just these 64 positions; the fake model would raise past the table."""
    scheduler = make_scheduler(num_blocks=16, block_size=4, max_model_len=64)
    seq = add_request(scheduler, range(prompt_len), max_tokens=max_tokens)
    run_to_end(scheduler, FakeModel(scheduler))
    assert seq.num_completion_tokens == expected and seq.finish_reason == "length"
    assert seq.num_tokens == prompt_len + expected <= 64


@pytest.mark.parametrize("prompt_len", [64, 65])
def test_case_06_a_prompt_that_leaves_no_room_for_one_token_is_refused(prompt_len: int) -> None:
    scheduler = make_scheduler(num_blocks=99, block_size=4, max_model_len=64)
    with pytest.raises(ValueError, match="no room for a completion within max_model_len=64"):
        add_request(scheduler, range(prompt_len), max_tokens=1)
    assert scheduler.is_finished()


def test_case_09_a_repeated_prompt_hits_all_but_its_last_block() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    model = FakeModel(scheduler)
    prompt = list(range(8))
    first = add_request(scheduler, prompt, max_tokens=6)
    run_to_end(scheduler, model)
    second = add_request(scheduler, prompt, max_tokens=6)
    assert run_step(scheduler, model) == (True, [(second, 4)])
    assert second.num_cached_tokens == 8
    run_to_end(scheduler, model)
    expected, _ = complete_alone(prompt, 6)
    assert first.completion_token_ids == second.completion_token_ids == expected


def test_case_10_lengths_across_block_boundaries() -> None:
    """ceil(positions / B) blocks at each step, while six requests decode over two boundaries."""
    scheduler = make_scheduler(num_blocks=32, block_size=4)
    model = FakeModel(scheduler)
    seqs = [add_request(scheduler, [i] * n, max_tokens=9) for i, n in enumerate((3, 4, 5, 7, 8, 9))]
    while not scheduler.is_finished():
        run_step(scheduler, model)
        held = [len(seq.block_table) for seq in scheduler.running]
        assert held == [-(-(len(seq) - 1) // 4) for seq in scheduler.running]
    for seq in seqs:
        assert seq.completion_token_ids == complete_alone(seq.prompt_token_ids, 9)[0]


def test_case_14_equal_prompts_in_one_step_leak_no_block_and_are_hit_later() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    model = FakeModel(scheduler)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    twins = [add_request(scheduler, prompt, max_tokens=2) for _ in range(2)]
    assert run_step(scheduler, model) == (True, [(twins[0], 9), (twins[1], 9)])
    run_to_end(scheduler, model)
    assert len(scheduler.block_manager.free_block_ids) == 8
    third = add_request(scheduler, prompt, max_tokens=2)
    assert scheduler.block_manager.can_allocate(third) == 2
    assert run_step(scheduler, model) == (True, [(third, 1)])
    run_to_end(scheduler, model)
    for seq in (*twins, third):
        assert seq.completion_token_ids == complete_alone(prompt, 2)[0]


def test_case_16_chunks_give_what_one_prefill_gives() -> None:
    scheduler = make_scheduler(num_blocks=16, block_size=4, max_num_batched_tokens=8)
    model = FakeModel(scheduler)
    a = add_request(scheduler, range(20), max_tokens=3)
    b = add_request(scheduler, [7, 8], max_tokens=3)
    for _ in range(2):
        assert run_step(scheduler, model) == (True, [(a, 8)])
        assert a.num_completion_tokens == 0
    assert run_step(scheduler, model) == (True, [(a, 4), (b, 2)])
    assert a.num_completion_tokens == b.num_completion_tokens == 1
    run_to_end(scheduler, model)
    assert a.completion_token_ids == complete_alone(list(range(20)), 3)[0]
    assert b.completion_token_ids == complete_alone([7, 8], 3)[0]


def test_case_18_a_request_that_does_not_fit_the_budget_holds_no_blocks() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=8)
    model = FakeModel(scheduler)
    first = add_request(scheduler, [1] * 6)
    second = add_request(scheduler, [2] * 5)
    assert run_step(scheduler, model) == (True, [(first, 6)])
    assert second.block_table == [] and list(scheduler.waiting) == [second]
    assert len(scheduler.block_manager.free_block_ids) == 6
