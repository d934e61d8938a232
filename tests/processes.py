"""What the tests of several ranks share: small engines, their processes, and how these end."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from recording import GREEDY

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.workers import Workers

ROOT = Path(__file__).parents[1]
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


def damage_messages(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a worker, but not rank 0, is told of a block that does not exist."""
    write = llm.model_runner._steps.write

    def damaged(seqs: list[Any], is_prefill: bool) -> Any:
        tables = [seq.block_table for seq in seqs]
        for seq in seqs:
            seq.block_table = [10**6] * len(seq.block_table)
        message = write(seqs, is_prefill)
        for seq, table in zip(seqs, tables, strict=True):
            seq.block_table = table
        return message

    monkeypatch.setattr(llm.model_runner._steps, "write", damaged)


def let_rank_1_look_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next engine's workers load their weights from there; rank 0 does not."""
    init = Workers.__init__

    def elsewhere(self: Workers, config: Config, *args: Any) -> None:
        init(self, replace(config, model=str(folder)), *args)

    monkeypatch.setattr(Workers, "__init__", elsewhere)


def let_rank_1_be_killed_at_the_meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the next engine, while rank 0 waits for it there."""
    join_group = Workers.join_group

    def join(self: Workers, *args: Any) -> Any:
        with killed_while_waited_for(self._processes[0]):
            return join_group(self, *args)

    monkeypatch.setattr(Workers, "join_group", join)


# Without `if __name__ == "__main__"`, which spawned processes would otherwise need.
SCRIPT = """
import json, multiprocessing, os, sys, time
from nanovllm import LLM, SamplingParams
folder, mode, settings = sys.argv[1:]
llm = LLM(folder, tensor_parallel_size=2, num_kvcache_blocks=200, **json.loads(settings))
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
if mode == "idle" and os.fork() == 0:
    time.sleep(600)
try:
    while mode != "idle":
        llm.generate([[1, 2, 3]], long, use_tqdm=False)
    time.sleep(600)
except KeyboardInterrupt:
    if mode == "leaves":
        raise
    outputs = llm.generate([[1, 2, 3, 4, 5], [6, 7]], short, use_tqdm=False)
    print([output["token_ids"] for output in outputs], flush=True)
"""


@contextmanager
def caller(
    folder: Path, mode: str, tmp_path: Path, **settings: Any
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A script with an engine of two ranks, in a session of its own as under a terminal, and the
    ids of its workers. An engine of this process goes on beside it. settings: without any a small
    one on the CPU."""
    settings = settings or {"device": "cpu", "kvcache_block_size": 4}
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, str(path), str(folder), mode, json.dumps(settings)]
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        workers = list(map(int, process.stdout.readline().split()))
        assert len(workers) == 1 and is_running(workers[0])
        time.sleep(0.5)  # well into the loop
        yield process, workers
    finally:
        with suppress(ProcessLookupError):  # the whole session, a fork too
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
