"""What the tests of several ranks share: small engines, their processes, and how these end."""

import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from recording import GREEDY

from nanovllm import LLM, SamplingParams

BOUND = 10  # seconds in which whoever lost a process must know
PROMPTS = [[1, 2, 3, 4, 5], [6, 7]]
PARAMS = SamplingParams(max_tokens=4, **GREEDY)


def start(folder: Path, size: int = 2, **settings: Any) -> LLM:
    settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 64, **settings}
    return LLM(folder, device="cpu", tensor_parallel_size=size, **settings)


def generate(llm: LLM) -> list[list[int]]:
    return [out["token_ids"] for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def worker(llm: LLM, rank: int = 1) -> BaseProcess:
    return llm.model_runner._workers._processes[rank - 1]


def kill(process: BaseProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


@contextmanager
def killed_while_waited_for(process: BaseProcess) -> Iterator[None]:
    """The process stops taking part, so that the others wait for it, and is killed a second on."""
    os.kill(process.pid, signal.SIGSTOP)
    timer = threading.Timer(1, os.kill, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def message_of_end(
    call: Callable[[], Any], llm: LLM | None = None, killed_at: list[float] | None = None
) -> str:
    """`call` must raise RuntimeError in time; its message. The engine's memory is free by then,
    though the error, and so its traceback, is still there."""
    left = [] if llm is None else [weakref.ref(llm.model_runner.model)]
    begin = [time.monotonic()] if killed_at is None else killed_at
    with pytest.raises(RuntimeError) as caught:
        call()
    assert time.monotonic() - begin[0] < BOUND
    assert not any(ref() for ref in left)
    return str(caught.value)


def is_running(pid: int) -> bool:
    """A process that has ended but was not waited for (by init, say) runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + BOUND
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.05)


def remains() -> tuple[set[Any], set[threading.Thread], set[str]]:
    """What a half-started engine could leave: processes, threads, shared memory."""
    children, threads = multiprocessing.active_children(), threading.enumerate()
    return set(children), set(threads), set(os.listdir("/dev/shm"))
