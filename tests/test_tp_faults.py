"""Tensor parallel: a rank that raises or is killed. Nobody waits for ever, the caller learns which
rank it was and why, and nothing is left.

An engine that a test has broken is replaced in the same process for the next test, and has to work.
"""

import atexit
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from processes import (
    BOUND,
    PARAMS,
    PROMPTS,
    damage_messages,
    generate,
    is_running,
    kill,
    killed_while_waited_for,
    message_of_end,
    remains,
    start,
    wait_until_gone,
    worker,
)

from nanovllm import LLM
from nanovllm.engine import model_runner
from nanovllm.engine import worker as worker_module
from nanovllm.engine.worker import Report
from nanovllm.engine.workers import Workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """The completions of one rank."""
    with start(folder, size=1) as llm:
        return generate(llm)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LLM]]:
    running: list[LLM] = []
    yield running
    for llm in running:
        llm.exit()


@pytest.fixture
def llm(folder: Path, engines: list[LLM], expected: list[list[int]]) -> LLM:
    """A working engine of two ranks; a new one if the test before broke it."""
    if engines and engines[0].model_runner._workers.failure is not None:
        engines.pop()  # without exit(): it has ended by itself
    if not engines:
        engines.append(start(folder))
    llm = engines[0]
    llm.runs_ahead = False
    assert generate(llm) == expected
    return llm


def assert_ended(llm: LLM, pids: list[int]) -> None:
    """All ranks are gone, the memory of rank 0 is free, and every use says why; exit() is quiet."""
    assert not any(map(is_running, pids))
    assert not {child.pid for child in multiprocessing.active_children()} & set(pids)
    assert llm.model_runner.model is None and llm.model_runner.kv_cache is None
    assert not llm.model_runner._workers._watch_thread.is_alive()
    failure = llm.model_runner._workers.failure
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            generate(llm)
        assert str(caught.value) == failure
    for use in (llm.add_request, llm.stream, lambda *_: llm.step()):
        with pytest.raises(RuntimeError, match="the engine has ended"):
            use(PROMPTS[0], PARAMS)
    assert llm.is_finished()
    llm.exit()
    llm.exit()


# --- a worker raises ------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_worker_that_raises(llm: LLM, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets its rank and its traceback, whatever rank 0 met by losing it."""
    pids = [worker(llm).pid]
    llm.add_request(PROMPTS[0], PARAMS)
    if phase == "decode":
        llm.step()
    damage_messages(llm, monkeypatch)
    message = message_of_end(llm.step)
    assert message.startswith("the engine has ended, rank 1 failed:\nTraceback")
    assert "model_runner.py" in message and "IndexError" in message
    llm.abort(llm.scheduler.waiting[0].seq_id)  # the step was undone
    assert_ended(llm, pids)


def test_a_kernel_that_fails_is_noticed_while_the_worker_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a message that rank 0 cannot send, as its own GPU waits for this one."""
    asked: list[torch.device] = []

    def stream(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(query=lambda: 1 // (2 - len(asked)))  # fails when asked again

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    runner = SimpleNamespace(block_size=4, device=torch.device("cuda", 1))
    mine, _theirs = multiprocessing.Pipe()
    with pytest.raises(ZeroDivisionError):
        worker_module._serve(runner, mine)
    assert asked == [runner.device] * 2


def test_rank_0_that_raises(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own error reaches the caller as it was raised; the ranks are out of step, so all end."""
    pids = [worker(llm).pid]

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of rank 0")

    monkeypatch.setattr(llm.model_runner, "_sample", fail)
    with pytest.raises(ZeroDivisionError, match="of rank 0"):
        generate(llm)
    assert "rank 0 failed: ZeroDivisionError" in llm.model_runner._workers.failure
    assert_ended(llm, pids)


# --- a worker is killed ---------------------------------------------------------------------------


def test_killed_when_idle(llm: LLM) -> None:
    pids = [worker(llm).pid]
    kill(worker(llm))
    message = message_of_end(lambda: generate(llm))
    assert f"rank 1 (process {pids[0]}) was killed by SIGKILL" in message
    assert_ended(llm, pids)


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["plain loop", "ahead"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_killed_while_rank_0_waits_for_it(llm: LLM, phase: str, runs_ahead: bool) -> None:
    """In the midst of a collective of a prefill or decode step."""
    pids = [worker(llm).pid]
    llm.runs_ahead = runs_ahead
    stream = llm.stream(PROMPTS, PARAMS)
    if phase == "decode":
        next(stream)
    with killed_while_waited_for(worker(llm)):
        message = message_of_end(lambda: list(stream), llm)
    assert f"rank 1 (process {pids[0]}) was killed by SIGKILL" in message
    assert_ended(llm, pids)


@pytest.mark.parametrize("phase", ["idle", "decode"])
def test_killed_one_of_four(folder: Path, expected: list[list[int]], phase: str) -> None:
    """The rank that was killed is named, not one of those that lost it; all the others end, though
    nobody uses the engine."""
    llm = start(folder, size=4)
    assert generate(llm) == expected
    pids = [worker(llm, rank).pid for rank in (1, 2, 3)]
    llm.add_request(PROMPTS[0], PARAMS)
    llm.step()
    if phase == "idle":
        kill(worker(llm, 2))
        wait_until_gone(pids)
        message = message_of_end(llm.step)
    else:
        with killed_while_waited_for(worker(llm, 2)):
            message = message_of_end(llm.step)
    assert f"rank 2 (process {pids[1]}) was killed by SIGKILL" in message
    for seq in (*llm.scheduler.waiting, *llm.scheduler.running):
        llm.abort(seq.seq_id)
    assert_ended(llm, pids)


@pytest.mark.parametrize("last", ["killed", "raised"])
def test_the_first_cause_is_named(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks are lost at the same moment: the one that was killed before those that report to
    have lost a peer, else the one that reported first."""
    ends = [multiprocessing.Pipe() for _ in range(3)]
    ends[0][1].send(Report(9.0, "lost a peer"))
    ends[1][1].send(Report(8.0, "the cause"))
    if last == "raised":
        ends[2][1].send(Report(10.0, "lost a peer"))
    for _, theirs in ends:
        theirs.close()
    workers = object.__new__(Workers)
    workers._pipes = [ours for ours, _ in ends]
    workers._woken, _ = multiprocessing.Pipe()
    reasons: list[str] = []
    monkeypatch.setattr(Workers, "_how_it_died", lambda self, rank: f"rank {rank} was killed")
    monkeypatch.setattr(Workers, "_stop", lambda self, reason: reasons.append(reason))
    workers._watch_all()
    first = "rank 3 was killed" if last == "killed" else "rank 2 failed:\nthe cause"
    assert reasons == [first]


def test_killed_by_a_signal_without_a_name(llm: LLM) -> None:
    pids = [worker(llm).pid]
    os.kill(pids[0], signal.SIGRTMIN + 3)
    message = message_of_end(lambda: generate(llm))
    number = signal.SIGRTMIN + 3
    assert f"was killed by signal {number}, exit code -{number}" in message
    assert_ended(llm, pids)


def test_a_watch_that_fails_ends_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = [worker(llm).pid]
    monkeypatch.setattr(Workers, "_how_it_died", lambda self, rank: 1 // 0)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    kill(worker(llm))
    message = message_of_end(lambda: generate(llm))
    assert "its watch failed" in message and "ZeroDivisionError" in message
    assert_ended(llm, pids)


def test_a_second_ctrl_c_ends_ranks_that_are_stuck(llm: LLM) -> None:
    """The first waits for the end of a step that never ends, while rank 1 is stopped."""
    pids = [worker(llm).pid]
    os.kill(pids[0], signal.SIGSTOP)
    timers = [threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)) for after in (1, 2)]
    for timer in timers:
        timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        generate(llm)
    assert 2 <= time.monotonic() - begin < BOUND
    assert "interrupted twice" in llm.model_runner._workers.failure
    assert_ended(llm, pids)


def test_ctrl_c_does_not_leave_an_exit_halfway(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start(folder)
    pids = [worker(llm).pid]
    monkeypatch.setattr(model_runner.gc, "collect", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.exit()
    assert llm.model_runner.kv_cache is None
    assert not any(map(is_running, pids))
    assert not llm.model_runner._workers._watch_thread.is_alive()


def test_a_fork_leaves_the_engine_to_its_parent(llm: LLM, expected: list[list[int]]) -> None:
    """Also one that ends as any process does, and multiprocessing's with it."""
    if (child := os.fork()) == 0:
        llm.exit()
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert generate(llm) == expected


def test_a_signal_in_a_step_reaches_the_callers_event_loop(llm: LLM) -> None:
    """It waits for the signal's number in a socket of its own."""
    theirs, mine = socket.socketpair()
    mine.setblocking(False)
    theirs.settimeout(BOUND)
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    before = signal.set_wakeup_fd(mine.fileno())
    try:
        with llm.model_runner._workers.ended_by_interrupts():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert theirs.recv(1) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(before) == mine.fileno()
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR1, handler)
        theirs.close()
        mine.close()


def test_one_ctrl_c_that_comes_twice_is_one(llm: LLM, expected: list[list[int]]) -> None:
    """A launcher may pass on what the terminal sends to all."""
    launch = llm.model_runner.launch

    def interrupted(*args: Any) -> Any:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return launch(*args)

    llm.model_runner.launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        generate(llm)
    del llm.model_runner.launch
    assert generate(llm) == expected


def test_ctrl_c_while_ranks_are_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have been are ended."""
    before, start_one = remains(), Workers._start

    def interrupted(self: Workers, *args: Any) -> None:
        start_one(self, *args)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Workers, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(folder, size=4)
    assert remains() == before


def test_ctrl_c_ends_a_start_whose_rank_is_stuck(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the place where the ranks meet."""
    join_group = Workers.join_group

    def join(self: Workers, *args: Any) -> Any:
        os.kill(self._processes[0].pid, signal.SIGSTOP)
        timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        return join_group(self, *args)

    monkeypatch.setattr(Workers, "join_group", join)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        start(folder)
    assert time.monotonic() - begin < BOUND + 5


def test_how_it_died_while_another_thread_takes_the_exit_code() -> None:
    """The system tells an exit code once. Whoever asks while another thread has just been told, and
    has not written it down, gets None, and no wait: as when the caller joins a killed process."""

    class Process:
        pid = 7
        answers = iter([None, None, -9])

        def join(self, timeout: float | None = None) -> None:
            pass

        @property
        def exitcode(self) -> int | None:
            return next(self.answers)

    workers = object.__new__(Workers)
    workers._processes = [Process()]
    assert workers._how_it_died(1) == "rank 1 (process 7) was killed by SIGKILL, exit code -9"
