"""ProcessGroup: the exchange of tensors between one engine's ranks; gloo on CPU, NCCL on GPUs.

It is not torch.distributed's global default group: any number of engines live in one process,
beside whatever else uses torch.distributed there.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from nanovllm.utils.parallel import Summand
    from nanovllm.utils.symmetric_memory import SymmetricMemory

logger = logging.getLogger(__name__)

LOCALHOST = "127.0.0.1"  # all ranks are on this machine; its host name need not resolve
NO_LIMIT = timedelta(days=1)
CONNECT_TIMEOUT = timedelta(seconds=8)
# Read by NCCL and torch while a group is made.
GPU_ENVIRONMENT = {
    # torch's own watchdog would answer a lost peer by ending this process: engine/workers.py does
    # the watching, and the caller gets an exception.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # And a failed kernel by aborting it, before the next call could raise what went wrong.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # NVLink multicast is no part of what is used here, and not safe on every shared host.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def open_store() -> tuple[dist.Store, int]:
    """Where ranks meet: a store on a free port that only this machine can reach, and the port."""
    with socket.create_server((LOCALHOST, 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            LOCALHOST,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


def connect_store(port: int) -> dist.Store:
    """The same store, for a rank; it fails when the one that opened it is dropped."""
    return dist.TCPStore(LOCALHOST, port, is_master=False, wait_for_workers=False)


class ProcessGroup:
    """The constructor and all exchanges are collective: every rank makes the same calls, in the
    same order, with tensors of the same shapes. On a GPU they go into the current stream, or into
    the CUDA graph that is being captured."""

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        """Returns when all ranks have come. Raises RuntimeError if the store goes away. From here
        on a lost peer can be answered by `abort`; to be of use it needs `connect`."""
        self.rank, self.size, self.device = rank, size, device
        self.symmetric: SymmetricMemory | None = None
        self._starting = threading.Lock()  # held while an exchange is given to torch
        self._is_aborted = False
        if device.type == "cuda":
            # A GPU that cannot be used must show now: inside NCCL nothing can interrupt the others.
            torch.zeros(1, device=device)
        store.set(f"rank {rank}", "")
        while not store.check([f"rank {i}" for i in range(size)]):
            time.sleep(0.01)  # not wait(), in which no Ctrl-C would be heard
        if device.type == "cpu":
            options = dist.ProcessGroupGloo._Options()
            # All are there, so this takes milliseconds; it notices no peer that dies meanwhile.
            options._timeout = CONNECT_TIMEOUT
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOCALHOST)]
            self.backend = dist.ProcessGroupGloo(store, rank, size, options)
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NO_LIMIT  # NCCL ignores the timeouts of single exchanges
        with _environment(GPU_ENVIRONMENT):
            self.backend = dist.ProcessGroupNCCL(store, rank, size, options)

    def connect(self, store: dist.Store) -> None:
        """Once, with the same store, before the first exchange. On a GPU it takes the memory that
        connections need, so that what is measured afterwards is free."""
        if self.device.type == "cpu":
            return
        if self.rank == 0:
            store.set("name", f"nanovllm-{uuid4().hex}")
        name = store.get("name").decode()
        with _environment(GPU_ENVIRONMENT):
            self.all_reduce_min(0)
            self.symmetric = self._symmetric_memory(store, name)

    def _symmetric_memory(self, store: dist.Store, name: str) -> SymmetricMemory | None:
        """If all ranks can have it."""
        try:
            from nanovllm.utils.symmetric_memory import SymmetricMemory

            if find_spec("triton") is None:
                raise ImportError("triton, whose kernel sums there, is not installed")
            symmetric = SymmetricMemory(store, name, self.rank, self.size, self.device)
        except Exception as error:  # no peer access, another torch: whatever it is, NCCL serves
            logger.info("symmetric memory cannot be used, so NCCL sums all: %s", error)
            symmetric = None
        return symmetric if self.all_reduce_min(symmetric is not None) else None

    def summand(self, rows: int, size: int, dtype: torch.dtype, turn: int) -> Summand | None:
        """As SymmetricMemory.summand; None where that memory is not."""
        return self.symmetric and self.symmetric.summand(rows, size, dtype, turn)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, on each; `x` is overwritten."""
        self._exchange(self.backend.allreduce, [x], _limitless(dist.AllreduceOptions()))
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """All ranks' x side by side along the last dimension, on rank 0; None elsewhere."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = _limitless(dist.GatherOptions())
        options.rootRank = 0
        self._exchange(self.backend.gather, [parts] if parts else [], [x], options)
        return torch.cat(parts, dim=-1) if parts else None

    def broadcast(self, x: torch.Tensor) -> None:
        """Write rank 0's x, contiguous, into every rank's."""
        options = _limitless(dist.BroadcastOptions())
        options.rootRank = 0
        self._exchange(self.backend.broadcast, [x], options)

    def all_reduce_min(self, number: int) -> int:
        """The smallest of all ranks' numbers, on each. Waits for the GPU."""
        x = torch.tensor([number], dtype=torch.int64, device=self.device)
        options = _limitless(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp.MIN
        self._exchange(self.backend.allreduce, [x], options)
        return int(x)

    def abort(self) -> None:
        """A peer is lost: let the GPU, if it waits for it, go on with garbage. From any thread.
        gloo notices by itself, when the peer's sockets close."""
        symmetric, backend = self.symmetric, self.backend  # `close` may come meanwhile
        if self.device.type == "cuda" and backend is not None and not self._is_aborted:
            self._is_aborted = True
            if symmetric is not None:
                symmetric.release()
            # This does not end before the CUDA graphs with exchanges are gone, and who starts an
            # exchange meanwhile waits for its end: so from here on `_exchange` raises. Who is in it
            # already and waits for the GPU needs the abort to get out.
            if self._starting.acquire(timeout=1):
                self._starting.release()
            backend.abort()

    def close(self) -> None:
        """End this rank's part, when no exchange is running; for a second time too. The peers may
        be gone already."""
        if self.device.type == "cuda" and self.backend is not None and not self._is_aborted:
            self.backend.abort()  # unlike a shutdown it waits for nobody
        self.symmetric = self.backend = None

    def _exchange(self, start: Callable[..., dist.Work | None], *args: Any) -> None:
        """On CPU wait for it; on a GPU let the current stream wait. Raises RuntimeError if it fails
        or a peer is lost."""
        with self._start():
            work = start(*args)
        if work is not None:
            work.wait()

    @contextmanager
    def _start(self) -> Iterator[None]:
        """An exchange is given to torch inside the block. Raises RuntimeError if a peer is lost."""
        with self._starting:
            if self._is_aborted:
                raise RuntimeError("another rank is lost")
            yield


def _limitless(options: Any) -> Any:
    """Options of an exchange without a timeout."""
    options.timeout = NO_LIMIT
    # In the current stream, if this torch can: one of NCCL's own costs two waits for events.
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
