"""ProcessGroup: what of its work on GPUs can be seen without one."""

import threading
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

from nanovllm.utils import symmetric_memory
from nanovllm.utils.process_group import ProcessGroup, connect_store, open_store
from nanovllm.utils.symmetric_memory import OwnNumbers, SymmetricAllReduce, signals_to_set


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


class Memory:
    """torch's _SymmetricMemory, as far as no GPU is needed. `rendezvous` looks for the ranks as
    torch 2.11 does: in its registry."""

    found: list[tuple[int, int]]  # rank and size
    signal_pad_size = 64
    set_group_info = staticmethod(lambda name, rank, size, store: None)
    empty_strided_p2p = staticmethod(lambda size, stride, dtype, device: torch.empty(size))

    @classmethod
    def rendezvous(cls, buffer: torch.Tensor, name: str) -> Any:
        group = dist.distributed_c10d._resolve_process_group(name)
        cls.found.append((group.rank(), group.size()))
        return cls()

    def get_signal_pad(self, rank: int, shape: tuple[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is queued on the stream beside, by name; a graph is captured by doing what is in it."""
    queued: list[str] = []
    graph = SimpleNamespace(replay=lambda: queued.append("passes"))
    stream = SimpleNamespace(synchronize=lambda: queued.append("waited for"))
    monkeypatch.setattr(symmetric_memory, "_SymmetricMemory", Memory)
    monkeypatch.setattr(Memory, "found", [], raising=False)
    for name, stand_in in {
        "Stream": lambda device, priority: stream,
        "CUDAGraph": lambda: graph,
        "graph": lambda captured, stream: nullcontext(),
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
        "synchronize": lambda device: None,
        "_sleep": lambda cycles: queued.append("pause"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return queued


@pytest.mark.usefixtures("queued")
def test_torch_finds_the_ranks_by_the_name() -> None:
    """Until the owner of the name is gone; a second engine of the process has its own."""
    for _ in range(2):
        name = f"ranks-{uuid4()}"
        summer = SymmetricAllReduce(dist.HashStore(), name, 1, 2, torch.device("cpu"))
        del summer
        with pytest.raises(RuntimeError):
            dist.distributed_c10d._resolve_process_group(name)
    assert Memory.found == [(1, 2), (1, 2)]


def test_sums_are_let_go_before_nccl_ends_its_own(queued: list[str]) -> None:
    """All at once: while NCCL frees memory no thread can launch anything. And the memory that the
    barriers are in is not given back while that writes to it."""
    group = ProcessGroup(dist.HashStore(), 0, 1, torch.device("cpu"))
    group.device = torch.device("cuda")
    group.symmetric = SymmetricAllReduce(dist.HashStore(), "sums", 0, 2, torch.device("cpu"))
    group.backend = SimpleNamespace(abort=lambda: queued.append("abort"))
    group.abort()
    assert queued == ["pause", "passes"] * symmetric_memory.RELEASES + ["abort"]
    with pytest.raises(RuntimeError, match="another rank is lost"):
        group.all_reduce(torch.zeros(8))
    del queued[:]
    group.close()
    assert queued == ["waited for"]


class BlockAtBarriers:
    """One block of a kernel of `rank` that comes from barrier to barrier: sync_remote_blocks of
    torch's CUDASymmetricMemory-inl.h, which has a thread for each rank."""

    def __init__(self, pads: list[torch.Tensor], rank: int, block: int) -> None:
        size = self.size = len(pads)
        # What thread i sets when it is 0, and what it then takes when it is 1.
        self.signals = [
            (pads[i][block * size + rank :], pads[rank][block * size + i :]) for i in range(size)
        ]
        self.done = [0] * size  # by thread: 1 when it has set, 2 when it has taken
        self.num_passed = 0

    def run(self) -> None:
        """Until every thread waits."""
        moves = True
        while moves:
            moves = False
            for i, done in enumerate(self.done):
                if done < 2 and self.signals[i][done][0] == done:
                    self.signals[i][done][0] = 1 - done
                    self.done[i] += 1
                    moves = True
            if min(self.done) == 2:
                self.num_passed += 1
                self.done = [0] * self.size


@pytest.mark.parametrize("size", [2, 3])
def test_sums_that_wait_for_a_dead_rank_are_let_go(size: int) -> None:
    """Each time by one barrier at least, whatever the dead ranks have left in the signals."""
    for rank in range(size):
        pads = [torch.randint(2, (4 * size,), dtype=torch.int32) for _ in range(size)]
        pads[rank].view(-1, size)[:, rank] = 0  # that from itself nobody else touches
        blocks = [BlockAtBarriers(pads, rank, block) for block in range(4)]
        for times in range(1, 20):
            for signals, value in signals_to_set(pads, rank):
                signals.fill_(value)
            for block in blocks:
                block.run()
                assert block.num_passed >= times
