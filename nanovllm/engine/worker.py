"""A worker: the process of one of the ranks 1.. of a split model, from its start to its end."""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from nanovllm.config import Config
from nanovllm.engine.control import StepReader
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.utils.device import resolve_device
from nanovllm.utils.hf import ModelConfig
from nanovllm.utils.parallel import TensorParallel
from nanovllm.utils.process_group import ProcessGroup, connect_store


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
