"""ProcessGroup: what of its work on GPUs can be seen without one."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanovllm.utils.process_group import ProcessGroup


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
