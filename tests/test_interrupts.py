"""Ctrl-C at any line of the engine's own code: no block is lost, no request left behind."""

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from invariants import check_invariants
from recording import script

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.interrupts import interrupts_held

PACKAGE = str(Path(nanovllm.__file__).parent)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5], [7] * 11]
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True, stop="zzz")


@pytest.fixture(scope="module")
def llm(wide_tq: Path) -> Iterator[LLM]:
    """A pool of 7 blocks, in which three requests of up to 4 blocks preempt each other, budget 8;
    the model is a fake whose tokens depend on all tokens before."""
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 7, "max_num_batched_tokens": 8}
    with LLM(wide_tq, device="cpu", **settings) as llm:
        script(llm, emit)
        yield llm


def emit(seq: Sequence) -> int:
    return hash(tuple(seq.token_ids)) % 2045


class InterruptAt:
    """Raises SIGINT, as Ctrl-C does, before the n-th line that the package runs in the block."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.fired = False

    def __enter__(self) -> "InterruptAt":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.fired = True
                signal.raise_signal(signal.SIGINT)
        return self._trace


def generate(llm: LLM) -> None:
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def stream(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS, PARAMS):
        pass


def by_hand(llm: LLM) -> None:
    """add_request, step, abort; who interrupts it has to end the requests."""
    try:
        ids = [llm.add_request(prompt, PARAMS) for prompt in PROMPTS]
        for _ in range(4):
            llm.step()
        llm.abort(ids[1])
        while not llm.is_finished():
            llm.step()
    finally:
        sys.settrace(None)
        check_invariants(llm.scheduler)
        assert {seq.seq_id for seq in live(llm)} == set(llm.requests)
        for request_id in list(llm.requests):
            llm.abort(request_id)
        llm.step()  # what has ended is still to be told


def live(llm: LLM) -> list[Sequence]:
    return [*llm.scheduler.waiting, *llm.scheduler.running]


@pytest.mark.parametrize(
    ("job", "ahead"),
    [(generate, False), (stream, False), (by_hand, False), (generate, True), (stream, True)],
)
def test_ctrl_c_at_any_line(
    llm: LLM, job: Callable[[LLM], None], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run after run, five lines later each time, until a run is over before its Ctrl-C. In the loop
    that runs ahead there are then up to two steps that were not taken in."""
    monkeypatch.setattr(llm, "runs_ahead", ahead)
    completions = [o["token_ids"] for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    fired = interrupted = 0
    before = llm.stats()["preemptions"]
    for line in range(1, 10**6, 5):
        with InterruptAt(line) as interrupt:
            try:
                job(llm)
            except KeyboardInterrupt:
                interrupted += 1
        check_invariants(llm.scheduler)
        assert llm.is_finished() and not llm.requests, line
        assert len(llm.scheduler.block_manager.free_block_ids) == 7, line
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, line
        assert gc.isenabled(), line
        fired += interrupt.fired
        if not interrupt.fired:
            break
    assert fired == interrupted > 100, "a Ctrl-C was swallowed, or the job is too short"
    assert llm.stats()["preemptions"] > before
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == completions


@pytest.mark.parametrize("ahead", [False, True])
def test_ctrl_c_in_generate_spares_other_requests(
    llm: LLM, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was added before goes on when `generate` is interrupted, at any line, and gets the
    tokens that it gets alone: none lost, none twice, none of the steps that were not taken in."""
    monkeypatch.setattr(llm, "runs_ahead", ahead)
    (alone,) = llm.generate([PROMPTS[1]], PARAMS, use_tqdm=False)
    for line in range(1, 10**6, 11):
        llm.add_request(PROMPTS[1], PARAMS)
        (seq,) = llm.scheduler.waiting
        with InterruptAt(line) as interrupt, suppress(KeyboardInterrupt):
            llm.generate(PROMPTS[::2], PARAMS, use_tqdm=False)
        check_invariants(llm.scheduler)
        assert live(llm) == ([] if seq.is_finished else [seq]), line
        while not llm.is_finished():
            llm.step()
        assert seq.completion_token_ids == alone["token_ids"], line
        if not interrupt.fired:
            break
    assert line > 1000


def test_held_back_to_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("whole block")
    assert done == ["whole block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_blocks_in_blocks_hold_to_the_end_of_the_outermost() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_an_error_in_the_block_comes_out_and_the_handler_is_back() -> None:
    with pytest.raises(ValueError), interrupts_held():
        raise ValueError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_callers_own_handler_is_called_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    handler = lambda number, frame: calls.append(number)  # noqa: E731
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_than_the_main_one_may_step(llm: LLM) -> None:
    """Signal handlers can be set in the main thread only, and Ctrl-C reaches no other."""
    expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    outputs: list[Any] = []
    thread = threading.Thread(
        target=lambda: outputs.extend(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    )
    thread.start()
    thread.join()
    assert outputs == expected


def test_a_step_whose_tokens_were_accepted_is_not_undone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C amid postprocess: it is raised behind it, and nothing is to be computed again."""
    on_tokens = LLM._on_tokens

    def interrupted(self: LLM, *args: Any) -> None:
        on_tokens(self, *args)
        signal.raise_signal(signal.SIGINT)

    seq_id = llm.add_request(PROMPTS[1], PARAMS)
    llm.step()
    (seq,) = llm.scheduler.running
    monkeypatch.setattr(LLM, "_on_tokens", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    assert list(llm.scheduler.running) == [seq]
    assert (seq.num_completion_tokens, seq.num_cached_tokens) == (2, 6)
    check_invariants(llm.scheduler)
    assert llm.abort(seq_id) and llm.is_finished()
