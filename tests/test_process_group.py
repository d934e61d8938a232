"""ProcessGroup: what of its work on GPUs can be seen without one."""

import ctypes
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

from nanovllm.utils import process_group, symmetric_memory
from nanovllm.utils.process_group import ProcessGroup, connect_store, open_store
from nanovllm.utils.symmetric_memory import MAX_BYTES, OwnNumbers, SymmetricMemory


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
    set_group_info = staticmethod(lambda name, rank, size, store: None)

    @staticmethod
    def empty_strided_p2p(
        size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.randint(255, size, dtype=dtype)

    @classmethod
    def rendezvous(cls, buffer: torch.Tensor, name: str) -> Any:
        group = dist.distributed_c10d._resolve_process_group(name)
        cls.found.append((group.rank(), group.size()))
        return SimpleNamespace(get_buffer=lambda rank, shape, dtype: buffer)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "_SymmetricMemory", Memory)
    monkeypatch.setattr(Memory, "found", [], raising=False)


def memory(name: str, rank: int = 0) -> SymmetricMemory:
    return SymmetricMemory(dist.HashStore(), name, rank, 2, torch.device("cpu"))


@pytest.mark.usefixtures("stand_in")
def test_torch_finds_the_ranks_by_the_name() -> None:
    """Until the owner of the name is gone; a second engine of the process has its own."""
    for _ in range(2):
        name = f"ranks-{uuid4()}"
        mine = memory(name, 1)
        del mine
        with pytest.raises(RuntimeError):
            dist.distributed_c10d._resolve_process_group(name)
    assert Memory.found == [(1, 2), (1, 2)]


@pytest.mark.usefixtures("stand_in")
def test_summands_lie_apart() -> None:
    """From each other while they are in use, and from the signals, which begin at 0. A sum of
    more than there is room for is NCCL's."""
    mine = memory("summands")
    assert not mine._memory[: 512 * 2 * 4].any()
    largest = (512, MAX_BYTES // 512 // 2)
    summands = [mine.summand(*largest, torch.bfloat16, turn) for turn in range(3)]
    for turn, (x, offset, _) in enumerate(summands):
        assert (x.shape, x.dtype) == (largest, torch.bfloat16)
        assert x.data_ptr() - mine._memory.data_ptr() == offset == 512 * 2 * 4 + turn * MAX_BYTES
        x.fill_(turn + 1)
    assert [x.unique().tolist() for x, *_ in summands] == [[1], [2], [3]]
    assert not mine._memory[: 512 * 2 * 4].any()
    assert mine.summand(512, MAX_BYTES // 512 // 2 + 8, torch.bfloat16, 0) is None
    assert mine.summand(513, 8, torch.bfloat16, 0) is None


@pytest.mark.usefixtures("stand_in")
def test_sums_are_let_go_before_nccl_ends_its_own() -> None:
    """By a number at the address that the kernel looks at, so without a call that the waiting GPU
    could hold up: NCCL's abort frees memory, and that waits until the sums have gone on."""
    group = ProcessGroup(dist.HashStore(), 0, 1, torch.device("cpu"))
    group.device = torch.device("cuda")
    group.symmetric = memory("sums")
    is_lost = ctypes.c_int32.from_address(int(group.symmetric.addresses[2]))
    seen = []
    abort = lambda: seen.append(is_lost.value)  # noqa: E731
    group.backend = SimpleNamespace(abort=abort, allreduce=None)
    assert is_lost.value == 0
    group.abort()
    assert seen == [1]
    with pytest.raises(RuntimeError, match="another rank is lost"):
        group.all_reduce(torch.zeros(8))


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.usefixtures("stand_in")
def test_without_triton_nccl_sums_all(has_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first norm would ask for the kernel that sums, and fail."""
    monkeypatch.setattr(process_group, "find_spec", lambda name: has_triton or None)
    group = ProcessGroup(dist.HashStore(), 0, 1, torch.device("cpu"))
    monkeypatch.setattr(group, "all_reduce_min", int)
    found = group._symmetric_memory(dist.HashStore(), f"ranks-{uuid4()}")
    assert (found is not None) == has_triton
