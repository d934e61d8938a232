"""Streams left early, and abort: what is left behind, and that the engine goes on."""

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from invariants import check_invariants
from recording import GREEDY
from streaming import PROMPTS, SIXTEEN, assert_clean, joined, start_small

from nanovllm import LLM, SamplingParams
from nanovllm.engine.request import Increment


@pytest.fixture
def llm(wide_tq: Path) -> Iterator[LLM]:
    with start_small(wide_tq) as engine:
        yield engine


# --- streams left early ---------------------------------------------------------------------------

# name -> (settings, increments read before the end)
MOMENTS: dict[str, tuple[dict[str, Any], int]] = {
    "all running": ({}, 9),
    "some waiting": ({"max_num_seqs": 2, "max_num_batched_tokens": 64}, 1),
    # 9 + 2 positions of the first two, then the third's 30 in chunks of 16.
    "in the chunks of one": ({"max_num_batched_tokens": 16}, 2),
    "one finished": ({}, 4 * 3 + 2),
}


def at_moment(wide_tq: Path, moment: str) -> tuple[LLM, Iterator[Increment]]:
    """An engine, and a stream of it that has come to this moment."""
    settings, count = MOMENTS[moment]
    llm = start_small(wide_tq, **settings)
    lengths = (16, 3 if moment == "one finished" else 16, 16, 16)
    params = [SamplingParams(max_tokens=length, **GREEDY) for length in lengths]
    stream = llm.stream(PROMPTS, params)
    for _ in range(count):
        next(stream)
    if moment == "in the chunks of one":
        llm.step()
        (cut,) = [seq for seq in llm.scheduler.waiting if seq.block_table]
        assert 0 < cut.num_cached_tokens < 30
    assert bool(llm.scheduler.waiting) == (moment in ("some waiting", "in the chunks of one"))
    assert len(llm.requests) == (3 if moment == "one finished" else 4)
    return llm, stream


@pytest.mark.parametrize("moment", MOMENTS)
def test_closing_early_frees_everything(
    wide_tq: Path, sixteen_greedy: list[list[int]], moment: str
) -> None:
    llm, stream = at_moment(wide_tq, moment)
    stream.close()
    assert_clean(llm, sixteen_greedy)
    assert list(stream) == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_dropping_the_iterator_frees_everything(
    wide_tq: Path, sixteen_greedy: list[list[int]], moment: str
) -> None:
    llm, stream = at_moment(wide_tq, moment)
    del stream
    gc.collect()
    assert_clean(llm, sixteen_greedy)


@pytest.mark.parametrize("when", ["before the run", "after the run", "scheduling"])
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["plain loop", "ahead"])
def test_a_stream_collected_in_the_midst_of_another_loops_step(
    llm: LLM, sixteen_greedy: list[list[int]], runs_ahead: bool, when: str
) -> None:
    """A forgotten stream in a reference cycle is closed whenever the collector comes by, be it
    between the schedule and the end of a step. That step goes on as if nothing had been, then the
    stream's requests are gone."""
    llm.runs_ahead = runs_ahead
    owner, name = {
        "scheduling": (llm.scheduler, "schedule"),
        "before the run": (llm.model_runner, "launch"),
        "after the run": (llm.model_runner, "collect"),
    }[when]
    inner, live = getattr(owner, name), []

    def allocating(*args: Any) -> Any:
        """The collector comes by at every allocation of a container, if it may."""
        result = inner(*args)
        if not live:
            gc.set_threshold(1)
            forgotten.clear()
            _ = [[] for _ in range(1000)]
            live.extend(llm.requests)
        return result

    stream = llm.stream(PROMPTS[:2], SIXTEEN)
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    forgotten = [cycle]
    del stream, cycle
    setattr(owner, name, allocating)
    thresholds = gc.get_threshold()
    try:
        outputs = llm.generate(PROMPTS[2:], SIXTEEN, use_tqdm=False)
    finally:
        gc.set_threshold(*thresholds)
    assert len(live) == 4, "all lived on to the end of the step"
    assert [output["token_ids"] for output in outputs] == sixteen_greedy[2:]
    assert_clean(llm, sixteen_greedy)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("count", [1, 5, 30])
def test_an_exception_in_the_callers_loop(
    llm: LLM, sixteen_greedy: list[list[int]], count: int, error: type[BaseException]
) -> None:
    with pytest.raises(error, match="the caller's"):
        for i, _ in enumerate(llm.stream(PROMPTS, SIXTEEN), start=1):
            if i == count:
                raise error("the caller's")
    assert_clean(llm, sixteen_greedy)


def test_an_exception_while_the_stream_has_a_name(
    llm: LLM, sixteen_greedy: list[list[int]]
) -> None:
    """The traceback keeps it alive; `closing` is how a caller makes sure."""
    with pytest.raises(ValueError), closing(llm.stream(PROMPTS, SIXTEEN)) as stream:
        for _ in stream:
            raise ValueError
    assert_clean(llm, sixteen_greedy)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("step", [1, 2, 9])
def test_case_38_an_exception_in_the_runner(
    llm: LLM, sixteen_greedy: list[list[int]], step: int, error: type[BaseException]
) -> None:
    """It comes out of `next`, after which the stream is over."""
    run, calls = llm.model_runner.run, 0

    def failing(*args: Any) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == step:
            raise error("made to fail")
        return run(*args)

    llm.model_runner.run = failing
    stream = llm.stream(PROMPTS, SIXTEEN)
    increments = []
    with pytest.raises(error, match="made to fail"):
        for increment in stream:
            increments.append(increment)
    assert len(increments) == 4 * (step - 1) and list(stream) == []
    assert_clean(llm, sixteen_greedy)


def test_exit_while_streaming(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, SIXTEEN)
    for _ in range(4):
        next(stream)
    llm.exit()
    with pytest.raises(RuntimeError, match="exited"):
        next(stream)
    with pytest.raises(RuntimeError, match="exited"):
        llm.stream(PROMPTS, SIXTEEN)


# --- abort ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["waiting", "prefilling in chunks", "running", "last step"])
def test_abort_of_an_added_request(
    wide_tq: Path, sixteen_greedy: list[list[int]], moment: str
) -> None:
    """Its blocks are free at once, and the other requests end as if it had never been."""
    with start_small(wide_tq, max_num_batched_tokens=16) as llm:
        other = llm.add_request(PROMPTS[0], SIXTEEN)
        (other_seq,) = llm.scheduler.waiting
        llm.step()
        request_id = llm.add_request(PROMPTS[2], SIXTEEN)
        seq = llm.scheduler.waiting[-1]
        steps = {"waiting": 0, "prefilling in chunks": 1, "running": 4, "last step": 2 + 14}
        for _ in range(steps[moment]):
            llm.step()
        assert (seq.status.name, bool(seq.block_table)) == {
            "waiting": ("WAITING", False),
            "prefilling in chunks": ("WAITING", True),
        }.get(moment, ("RUNNING", True))
        free = len(llm.scheduler.block_manager.free_block_ids)
        held = len(seq.block_table)
        assert llm.abort(request_id) is True
        check_invariants(llm.scheduler)
        assert len(llm.scheduler.block_manager.free_block_ids) == free + held
        assert (seq.finish_reason, seq.block_table, seq.is_finished) == ("abort", [], True)
        finished = []
        while not llm.is_finished():
            finished += llm.step()[0]
        assert request_id not in dict(finished)
        assert other_seq.completion_token_ids == sixteen_greedy[0]
        assert other in dict(finished)
        assert_clean(llm, sixteen_greedy)


def test_abort_of_what_is_not_live(llm: LLM) -> None:
    """Finished, aborted before, never added: False, and nothing happens."""
    done = llm.add_request([1], SamplingParams(max_tokens=1, **GREEDY))
    llm.step()
    live = llm.add_request([1], SIXTEEN)
    assert llm.abort(done) is False and llm.abort(10**9) is False
    assert llm.abort(live) is True and llm.abort(live) is False
    assert llm.is_finished()


@pytest.mark.parametrize("after", [1, 6])
def test_abort_of_one_of_a_streams_requests(
    llm: LLM, sixteen_greedy: list[list[int]], after: int
) -> None:
    """It ends with the reason "abort" and what it had; the others go on to their ends."""
    increments = []
    for increment in llm.stream(PROMPTS, SIXTEEN):
        increments.append(increment)
        if len(increments) == after:
            request_id = next(i["request_id"] for i in increments if i["index"] == 0)
            assert llm.abort(request_id)
    text, token_ids, reasons = joined(increments, 0)
    assert reasons[-1] == "abort" and "abort" not in reasons[:-1]
    assert token_ids == sixteen_greedy[0][: len(token_ids)] and len(token_ids) == -(-after // 4)
    assert text == llm.tokenizer.decode(token_ids, skip_special_tokens=True)
    for index in (1, 2, 3):
        _, token_ids, reasons = joined(increments, index)
        assert (token_ids, reasons[-1]) == (sixteen_greedy[index], "length")
    assert_clean(llm, sixteen_greedy)


def test_abort_of_all_of_a_streams_requests_ends_it(
    llm: LLM, sixteen_greedy: list[list[int]]
) -> None:
    stream = llm.stream(PROMPTS, SIXTEEN)
    next(stream)
    for request_id in list(llm.requests):
        llm.abort(request_id)
    assert [increment["finish_reason"] for increment in stream] == ["abort"] * 4
    assert_clean(llm, sixteen_greedy)


def test_abort_in_the_middle_of_generate(llm: LLM, sixteen_greedy: list[list[int]]) -> None:
    """By whoever has a foot in the loop: generate ends all the same, with what there was."""
    step = llm._loop_step

    def step_then_abort() -> Any:
        result = step()
        if llm.stats()["steps"] == 7:
            assert llm.abort(min(llm.requests))
        return result

    llm._loop_step = step_then_abort
    outputs = llm.generate(PROMPTS, SIXTEEN, use_tqdm=False)
    assert [output["finish_reason"] for output in outputs] == ["abort", *["length"] * 3]
    assert outputs[0]["token_ids"] == sixteen_greedy[0][:7]
    assert [output["token_ids"] for output in outputs[1:]] == sixteen_greedy[1:]
    assert_clean(llm, sixteen_greedy)
