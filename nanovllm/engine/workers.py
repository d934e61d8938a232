"""Workers: the processes of ranks 1.. of a split model; they are started, watched and ended here.

Nobody waits for a dead process. The caller's process watches the pipe of every worker: it reads
the traceback of one that raised, or meets the end of one that died, and then ends the others, which
frees whoever waits for them. A worker ends when its caller does.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, NamedTuple

import torch

from nanovllm.config import Config
from nanovllm.engine.control import StepReader
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.utils.device import resolve_device
from nanovllm.utils.hf import ModelConfig
from nanovllm.utils.parallel import TensorParallel
from nanovllm.utils.process_group import ProcessGroup, connect_store, open_store

GRACE = 5.0  # seconds for what should take a few milliseconds
_STARTING = threading.Lock()  # what is changed while processes start is the whole process's


class Job(NamedTuple):
    """What a worker is started with."""

    rank: int
    port: int  # of the store where the ranks meet
    config: Config
    model_config: ModelConfig
    eos_token_ids: frozenset[int]
    caller: int  # process id


class Report(NamedTuple):
    """What a worker says: that it has started (no error), or why it ends."""

    time: float  # by the clock that all processes share
    error: str | None


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
        self._server, self._port = open_store()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        job = Job(0, self._port, config, model_config, eos_token_ids, os.getpid())
        try:
            with _STARTING, _interrupts_blocked(), _main_module_hidden():
                for rank in range(1, self.size):
                    self._start(job._replace(rank=rank))
        except BaseException:
            self.kill()
            for process in self._processes:
                process.join()
            raise
        self._watch_thread = threading.Thread(
            target=self._watch, name="nanovllm-watch", daemon=True
        )
        self._watch_thread.start()

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

    def send(self, *message: Any) -> None:
        """Send one message to all; pickled once. Waits only for a worker that is a long message
        behind."""
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
        self._watch_thread.join(GRACE)
        for pipe in self._pipes:
            pipe.close()
        if self.group is not None:
            self.group.close()
        self._server = None

    # --- the watch's thread -----------------------------------------------------------------------

    def _watch(self) -> None:
        running = {pipe: rank for rank, pipe in enumerate(self._pipes, 1)}
        while running:
            failed: list[tuple[float, str]] = []
            for pipe in wait(list(running)):
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

    def _how_it_died(self, rank: int) -> str:
        process = self._processes[rank - 1]
        deadline = time.monotonic() + GRACE
        # Not one join: it returns at once, without a code, while another thread takes the code from
        # the system (a join of the caller's, or multiprocessing's own at every start of a process).
        while (code := process.exitcode) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else "ended"
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


def work(job: Job, num_threads: int, pipe: Connection) -> None:
    """A worker's whole life. What it raises goes to rank 0."""
    threading.Thread(target=_end_with, args=(job.caller,), daemon=True).start()
    try:
        torch.set_num_threads(num_threads)
        size = job.config.tensor_parallel_size
        device = resolve_device(job.config.device, job.rank, size)
        store = connect_store(job.port)
        group = ProcessGroup(store, job.rank, size, device)
        group.connect(store)
        tp = TensorParallel(job.rank, size, group)
        runner = ModelRunner(job.config, job.model_config, job.eos_token_ids, tp)
        pipe.send(Report(time.monotonic(), None))
        _serve(runner, pipe)
    except BaseException:
        with suppress(OSError):  # the caller may be gone
            pipe.send(Report(time.monotonic(), traceback.format_exc()))
    # At once: whatever may still be waited for would be waited for at a normal exit, too.
    os._exit(0)


def _serve(runner: ModelRunner, pipe: Connection) -> None:
    steps = StepReader(runner.block_size)
    while True:
        while not pipe.poll(1):
            if runner.device.type == "cuda":
                # Raises what a kernel failed with, which shows in no call before the next one: and
                # that rank 0 cannot ask for while its GPU waits for this one.
                torch.cuda.current_stream(runner.device).query()
        method, *args = pickle.loads(pipe.recv_bytes())
        if method == "launch":
            message, is_prefill, resample = args
            runner.launch(steps.read(message, is_prefill), is_prefill, resample)
        else:
            getattr(runner, method)(*args)
        if method == "exit":
            return


def _end_with(caller: int) -> None:
    """End this process soon after its caller, however that ended, whatever this one waits for."""
    while os.getppid() == caller:
        time.sleep(0.5)
    os._exit(1)


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
