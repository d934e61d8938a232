"""The loop that runs a step ahead among several callers: requests that join, steps by hand, aborts,
streams left early, and steps that fail, each with a step in flight."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from ahead import (
    PROMPTS,
    SIXTEEN,
    Build,
    completions,
    engines_that_run_ahead,
    fail_at,
    finish_by_hand,
    plain,
)
from checkpoints import make_checkpoint
from invariants import check_invariants
from recording import GREEDY

from nanovllm import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TQ with a row for every id of the bundled tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=2048)


@pytest.fixture
def build(folder: Path) -> Iterator[Build]:
    with engines_that_run_ahead(folder) as build:
        yield build


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The sixteen greedy tokens of each of PROMPTS."""
    return [output["token_ids"] for output in plain(folder, PROMPTS, SIXTEEN)]


# --- other callers --------------------------------------------------------------------------------


@pytest.mark.parametrize("by_hand", [False, True])
def test_requests_added_while_a_stream_is_read(
    build: Build, expected: list[list[int]], by_hand: bool
) -> None:
    """One joins at every third increment; they run along, and end by hand or by a `generate`."""
    llm = build()
    added = []
    increments = []
    for increment in llm.stream(PROMPTS[:1], SIXTEEN):
        increments += increment["token_ids"]
        if len(increments) % 3 == 0 and len(added) < 3:
            llm.add_request(PROMPTS[1 + len(added)], SIXTEEN)
            added.append(llm.scheduler.waiting[-1])
    assert increments == expected[0]
    assert any(seq.num_completion_tokens for seq in added) and not llm.is_finished()
    if by_hand:
        finish_by_hand(llm)
    else:
        assert completions(llm, PROMPTS[:1], SIXTEEN) == expected[:1]
        finish_by_hand(llm)
    assert [seq.completion_token_ids for seq in added] == expected[1:]


def test_a_turn_tells_of_the_step_before_it(build: Build, expected: list[list[int]]) -> None:
    """The first has nothing to tell, the last one nothing to launch."""
    llm = build()
    seq_id = llm.add_request(PROMPTS[1], SamplingParams(max_tokens=2, **GREEDY))
    turns = [llm._loop_step() for _ in range(4)]
    end = [(seq_id, expected[1][:2])]
    assert turns == [([], 0), ([], len(PROMPTS[1])), (end, -1), ([], 0)]
    assert llm.step() == (end, 0), "`step` tells it to who added the request"


@pytest.mark.parametrize("stride", [1, 2, 5])
def test_steps_by_hand_while_a_stream_is_read(
    build: Build, expected: list[list[int]], stride: int
) -> None:
    """`step` takes in what is in flight: its tokens are accepted and visible when it returns, and
    what finished is returned once, by whoever took it in."""
    llm = build()
    last = llm.add_request(PROMPTS[3], SamplingParams(max_tokens=9, **GREEDY))
    (seq,) = llm.scheduler.waiting
    increments, finished = [], []
    for i, increment in enumerate(llm.stream(PROMPTS[:1], SIXTEEN)):
        increments += increment["token_ids"]
        if i % stride == 0:
            before = llm._run_ahead.in_flight
            done, num_tokens = llm.step()
            finished += done
            assert llm._run_ahead.in_flight is None
            assert before is None or num_tokens == before.num_tokens
            check_invariants(llm.scheduler)
    assert increments == expected[0]
    assert seq.completion_token_ids == expected[3][:9]
    assert finished.count((last, expected[3][:9])) <= 1


def test_is_finished_waits_for_the_step_in_flight(build: Build) -> None:
    """Two tokens: after the first increment the second is on its way, and nobody is queued."""
    llm = build()
    stream = llm.stream(PROMPTS[:1], SamplingParams(max_tokens=2, **GREEDY))
    next(stream)
    assert not llm.scheduler.running and not llm.scheduler.waiting
    assert not llm.is_finished()
    assert [increment["finish_reason"] for increment in stream] == ["length"]
    assert llm.is_finished()


def test_two_streams_and_a_generate_in_turn(build: Build, expected: list[list[int]]) -> None:
    llm = build()
    first, second = llm.stream(PROMPTS[:1], SIXTEEN), llm.stream(PROMPTS[1:2], SIXTEEN)
    from_first, from_second = [], []
    for _ in range(3):
        from_first += next(first)["token_ids"]
        from_second += next(second)["token_ids"]
    assert completions(llm, PROMPTS[2:], SIXTEEN) == expected[2:]
    from_second += [token_id for increment in second for token_id in increment["token_ids"]]
    from_first += [token_id for increment in first for token_id in increment["token_ids"]]
    assert [from_first, from_second] == expected[:2]


# --- early ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 2, 5])
def test_abort_with_a_step_in_flight(build: Build, expected: list[list[int]], after: int) -> None:
    """Of one of two; its blocks are free at once, what is in flight for it is dropped."""
    llm = build()
    tokens: dict[int, list[int]] = {0: [], 1: []}
    reasons = {}
    for i, increment in enumerate(llm.stream(PROMPTS[:2], SIXTEEN)):
        tokens[increment["index"]] += increment["token_ids"]
        reasons[increment["index"]] = increment["finish_reason"]
        if i + 1 == 2 * after:
            assert llm._run_ahead.in_flight is not None
            (request_id, *_) = llm.requests
            held = llm.requests[request_id].seq.block_table
            free = len(llm.scheduler.block_manager.free_block_ids)
            assert llm.abort(request_id) and not llm.abort(request_id)
            assert len(llm.scheduler.block_manager.free_block_ids) == free + len(held)
            check_invariants(llm.scheduler, llm._run_ahead.in_flight.progress)
    assert tokens == {0: expected[0][:after], 1: expected[1]}
    assert reasons == {0: "abort", 1: "length"}


@pytest.mark.parametrize("read", [1, 7, 40])
def test_a_stream_left_early(build: Build, expected: list[list[int]], read: int) -> None:
    """With a request of somebody else's beside it, which goes on."""
    llm = build()
    llm.add_request(PROMPTS[3], SIXTEEN)
    (other,) = llm.scheduler.waiting
    with closing(llm.stream(PROMPTS[:3], SIXTEEN)) as stream:
        for _ in range(read):
            next(stream)
    assert llm._run_ahead.in_flight is None
    check_invariants(llm.scheduler)
    assert {*llm.requests} == ({other.seq_id} if not other.is_finished else set())
    finish_by_hand(llm)
    assert other.completion_token_ids == expected[3]
    assert completions(llm, PROMPTS, SIXTEEN) == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["launch", "collect"])
@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_case_38_the_kth_launch_or_collection_fails(
    build: Build, expected: list[list[int]], k: int, method: str, error: type[BaseException]
) -> None:
    """This call's requests are dropped; another's goes on with the right tokens."""
    llm = build(max_num_batched_tokens=16)
    llm.add_request(PROMPTS[3], SIXTEEN)
    (other,) = llm.scheduler.waiting
    fail_at(llm, method, k, error)
    with pytest.raises(error, match="made to fail"):
        llm.generate(PROMPTS[:3], SIXTEEN, use_tqdm=False)
    assert llm._run_ahead.in_flight is None
    check_invariants(llm.scheduler)
    assert [*llm.scheduler.waiting, *llm.scheduler.running] == [other]
    assert {*llm.requests} == {other.seq_id}
    assert completions(llm, PROMPTS[:3], SIXTEEN) == expected[:3]
    finish_by_hand(llm)
    assert other.completion_token_ids == expected[3]


def test_exit_while_streaming(build: Build) -> None:
    llm = build()
    stream = llm.stream(PROMPTS, SIXTEEN)
    next(stream)
    llm.exit()
    with pytest.raises(RuntimeError, match="exited"):
        for _ in range(9):  # what has come already may still be read
            next(stream)
