"""ProcessGroup: what of its work on GPUs can be seen without one."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanovllm.utils.process_group import ProcessGroup, connect_store, open_store
from nanovllm.utils.symmetric_memory import OwnNumbers


class NcclAsLocksGo:
    """As ProcessGroupNCCL with exchanges in CUDA graphs: an abort holds its lock until the graphs
    are gone, and starting an exchange needs it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.aborts, self.graphs_are_gone = threading.Event(), threading.Event()

    def abort(self) -> None:
        with self.lock:
            self.aborts.set()
            self.graphs_are_gone.wait(60)

    def allreduce(self, *args: Any) -> None:
        assert self.lock.acquire(timeout=5), "it waits for the abort, which waits for it"
        self.lock.release()


def test_no_exchange_starts_once_a_peer_is_lost() -> None:
    """A rank that is amid a step gets an error and can drop its graphs, which the abort awaits."""
    group = ProcessGroup(dist.HashStore(), 0, 1, torch.device("cpu"))
    group.backend, group.device = NcclAsLocksGo(), torch.device("cuda")
    backend, x = group.backend, torch.zeros(1)
    group.all_reduce(x)
    abort = threading.Thread(target=group.abort)
    abort.start()
    assert backend.aborts.wait(10)
    with pytest.raises(RuntimeError, match="another rank is lost"):
        group.all_reduce(x)
    group.close()
    backend.graphs_are_gone.set()
    abort.join(10)
    assert not abort.is_alive()


def test_exchanges_of_memory_are_numbered_from_0() -> None:
    """Rank 0 has made seven in its process, rank 1 is new: they meet. torch's own code calls the
    store as PrefixStore does here, with any bytes for values."""
    server, port = open_store()
    stores = [OwnNumbers(connect_store(port)) for _ in range(2)]
    for number in range(3):
        ranks = [
            dist.PrefixStore(f"CUDASymmetricMemory/{first + number}", store)
            for first, store in zip((7, 0), stores, strict=True)
        ]
        values = [bytes([number, 0xFF, rank]) for rank in range(2)]
        for rank, store in enumerate(ranks):
            store.set(str(rank), values[rank])
        for rank, store in enumerate(ranks):
            store.wait([str(1 - rank)], timedelta(seconds=10))
            assert store.get(str(1 - rank)) == values[1 - rank]
            assert store.multi_get(["0", "1"]) == values
            assert store.add("count", 1) == rank + 1
    del server
