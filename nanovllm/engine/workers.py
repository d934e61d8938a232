"""Workers: the processes of ranks 1.. of a split model, seen from rank 0, which starts, watches and
ends them. What they do is in worker.py.

Nobody waits for a dead process. The caller's process watches the pipe of every worker: it reads
the traceback of one that raised, or meets the end of one that died, and then ends the others, which
frees whoever waits for them. A worker ends when its caller does.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import _children
from types import ModuleType
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.worker import Job, Report, work
from nanovllm.utils.hf import ModelConfig
from nanovllm.utils.interrupts import interrupts_held
from nanovllm.utils.parallel import TensorParallel
from nanovllm.utils.process_group import ProcessGroup, connect_store, open_store

GRACE = 5.0  # seconds for what should take a few milliseconds
_STARTING = threading.Lock()  # what is changed while processes start is the whole process's
_ALL: weakref.WeakSet[Workers] = weakref.WeakSet()


class Workers:
    """Ranks 1.. of one engine, seen from rank 0.

    `failure` is None until a worker, or rank 0 itself, fails; then it says why, and all workers are
    gone or on their way.
    """

    def __init__(
        self, config: Config, model_config: ModelConfig, eos_token_ids: frozenset[int]
    ) -> None:
        """Start the processes, without waiting for them."""
        self.size = config.tensor_parallel_size
        self.failure: str | None = None
        self.group: ProcessGroup | None = None
        self._changed = threading.Condition()  # guards what the watch writes, and tells of it
        self._num_ready = 0
        self._is_ending = False
        self._first_interrupt: float | None = None  # when it came, in this step
        self._others_wakeup = -1  # the caller's own wakeup fd, while a step has another
        self._woken, self._waker = socket.socketpair()  # by signals, see `ended_by_interrupts`
        self._waker.setblocking(False)
        self._server, self._port = open_store()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        _ALL.add(self)
        job = Job(0, self._port, config, model_config, eos_token_ids, os.getpid())
        self._watch_thread = threading.Thread(
            target=self._watch, name="nanovllm-watch", daemon=True
        )
        try:
            with interrupts_held():  # so that none is started and not noted down
                with _STARTING, _interrupts_blocked(), _main_module_hidden():
                    for rank in range(1, self.size):
                        self._start(job._replace(rank=rank))
                self._watch_thread.start()
        except BaseException:
            self.kill()
            self.end()
            raise

    def _start(self, job: Job) -> None:
        context = get_context("spawn")
        pipe, theirs = context.Pipe()
        num_threads = max(torch.get_num_threads() // self.size, 1)
        # A daemon: multiprocessing does not wait for it when the interpreter exits.
        process = context.Process(
            target=work,
            args=(job, num_threads, theirs),
            name=f"nanovllm-rank-{job.rank}",
            daemon=True,
        )
        process.start()
        theirs.close()  # so that the worker's end is the pipe's end
        self._pipes.append(pipe)
        self._processes.append(process)

    def join_group(self, device: torch.device) -> TensorParallel:
        """Meet the workers; rank 0's place among them."""
        # By a connection of its own: dropping the server frees whoever waits in it.
        store = connect_store(self._port)
        group = ProcessGroup(store, 0, self.size, device)
        with self._changed:
            self.group = group  # before it connects, so that the watch can abort that
            self.check()
        group.connect(store)
        return TensorParallel(0, self.size, group)

    def wait_until_ready(self) -> None:
        """Until all have started. Raises RuntimeError if one fails."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_ready == len(self._pipes) or self.failure)
            self.check()

    def check(self) -> None:
        """Raise RuntimeError if a worker has failed, with its rank and traceback."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    @contextmanager
    def ended_by_interrupts(self) -> Iterator[None]:
        """A step that all ranks do together: the first Ctrl-C comes after it; one that follows half
        a second later, or more, ends all ranks: one that is stuck (stopped, swapped out) may never
        let the step end.

        The watch learns of both by the signal's number in a socket: while this thread waits in a
        library, no Python code of a signal handler runs."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Ctrl-C does not reach it
            return
        with interrupts_held():
            self._first_interrupt = None
            fd = self._waker.fileno()
            self._others_wakeup = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(self._others_wakeup)

    def send(self, *message: Any) -> None:
        """Send one message to all; pickled once. Blocks only while a worker's pipe is full."""
        self.check()
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        for pipe in self._pipes:
            pipe.send_bytes(data)

    def fail(self, error: BaseException) -> BaseException:
        """Rank 0 got `error` in the midst of what the ranks do together: they are out of step, so
        end them. Returns what the caller must be told: that a worker failed, if that was why."""
        with self._changed:
            if isinstance(error, (RuntimeError, OSError)):  # what a lost peer looks like
                self._changed.wait_for(lambda: self.failure is not None, timeout=GRACE)
            failure = self.failure
            if failure is None:
                self.failure = f"the engine has ended, rank 0 failed: {error!r}"
        self.kill()  # the watch sees to the rest
        return error if failure is None or error.args == (failure,) else RuntimeError(failure)

    def kill(self) -> None:
        """End all at once; for a second time too."""
        for process in self._processes:
            process.kill()

    def end(self) -> None:
        """Wait until all have ended; kill those that take too long. For a second time too."""
        with self._changed:
            self._is_ending = True
        deadline = time.monotonic() + GRACE
        try:
            for process in self._processes:
                process.join(max(deadline - time.monotonic(), 0))
        finally:
            self.kill()
            for process in self._processes:
                process.join()
        if self._watch_thread.is_alive():
            self._watch_thread.join(GRACE)
        for end in (*self._pipes, self._woken, self._waker):
            end.close()
        if self.group is not None:
            self.group.close()
        self._server = None

    # --- the watch's thread -----------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._watch_all()
        except BaseException:  # without the watch somebody would wait for ever
            self._stop(f"its watch failed:\n{traceback.format_exc()}")
            raise

    def _watch_all(self) -> None:
        running = {pipe: rank for rank, pipe in enumerate(self._pipes, 1)}
        while running:
            failed: list[tuple[float, str]] = []
            for pipe in wait([*running, self._woken]):
                if pipe is self._woken:
                    self._on_signals(pipe.recv(64))
                    continue
                report = _read(pipe)
                if report is not None and report.error is None:
                    with self._changed:
                        self._num_ready += 1
                        self._changed.notify_all()
                    continue
                rank = running.pop(pipe)
                if report is None:
                    # First: what others report may be that they lost this one.
                    failed.append((0.0, self._how_it_died(rank)))
                else:
                    failed.append((report.time, f"rank {rank} failed:\n{report.error}"))
            if failed:
                self._stop(min(failed)[1])

    def _on_signals(self, numbers: bytes) -> None:
        if self._others_wakeup >= 0:  # such as an event loop's
            with suppress(OSError):
                os.write(self._others_wakeup, numbers)
        now = time.monotonic()
        if signal.SIGINT not in numbers:
            return
        if self._first_interrupt is None:
            self._first_interrupt = now
        elif now - self._first_interrupt >= 0.5:  # not one Ctrl-C that came twice
            self._stop("it was interrupted twice in one step")

    def _how_it_died(self, rank: int) -> str:
        process = self._processes[rank - 1]
        deadline = time.monotonic() + GRACE
        # Not one join: it returns at once, without a code, while another thread takes the code from
        # the system (a join of the caller's, or multiprocessing's own at every start of a process).
        while (code := process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        # A real-time signal has no name.
        name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        how = f"was killed by {name}" if code and code < 0 else "ended"
        return f"rank {rank} (process {process.pid}) {how}, exit code {code}"

    def _stop(self, reason: str) -> None:
        """One has ended; so must the others, and rank 0 if it waits for them."""
        with self._changed:
            if self._is_ending:
                return
            self.failure = self.failure or f"the engine has ended, {reason}"
            self._changed.notify_all()
            group = self.group
        self.kill()
        self._server = None
        if group is not None:
            group.abort()


def _read(pipe: Connection) -> Report | None:
    """None: there is nobody at the other end."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, which a terminal sends to all: rank 0 decides."""
    resource_tracker.ensure_running()  # multiprocessing's own; starting it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """multiprocessing would run the caller's script again in every process started. That is of no
    use here, and a script without `if __name__ == "__main__"` would start engines without end."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _leave_to_the_parent() -> None:
    """In a fork, whose normal end would terminate all children that multiprocessing knows of."""
    for workers in _ALL:
        _children.difference_update(workers._processes)


if hasattr(os, "fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
