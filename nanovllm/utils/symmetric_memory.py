"""SymmetricMemory: memory that every rank's GPU can read and write, where each has what is to be
summed over the ranks. layers/rank_sum.py reads it and sums. Never uses NVLink multicast.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

from nanovllm.utils.parallel import Summand

MAX_ROWS = 512
MAX_BYTES = 8 << 20  # of one sum: 512 rows of 8,192 in bfloat16; NCCL is as good from there on
NUM_TURNS = 3
FAR = 1 << 30  # more sums than an engine has in ten hours of decoding
RELEASES, PAUSE_CYCLES = 40, 80_000_000  # of `release`: how often, after pauses of about 50 ms


class OwnNumbers(dist.Store):
    """The store as torch sees it while ranks exchange their memory. torch numbers that by process,
    in keys "what/number/...": rank 0's second engine would be at another number than its new rank
    1, and both would wait. Here the numbers begin at 0."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._own(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._own(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._own(key), value)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._store.wait([self._own(key) for key in keys], *timeout)

    def _own(self, key: str) -> str:
        what, number, *rest = key.split("/")
        first = self._first.setdefault(what, int(number))
        return "/".join(["symmetric", what, str(int(number) - first), *rest])


class SymmetricMemory:
    """On each rank the same: signals [MAX_ROWS, ranks], then NUM_TURNS buffers of MAX_BYTES.

    A sum goes row by row. Who has its summand in the buffer writes the row's `epoch`, the number
    of its sums so far, into its signals on all ranks, waits until theirs here have come as far, and
    reads. So nobody waits after reading: a buffer may be written again once a later sum, of another
    buffer, has begun, as then everybody has left the earlier one.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, device: torch.device
    ) -> None:
        """Collective, and another exchange in the current stream must follow before the first sum.
        `name` must be new in this process. Raises what torch raises where it or the GPUs cannot."""
        self.rank, self.size, self.device = rank, size, device
        store = OwnNumbers(store)  # torch calls its methods as long as the variable lives
        # By this name torch finds who takes part: older ones here, 2.11 in its registry of groups,
        # which keeps none alive. This group exchanges nothing itself.
        _SymmetricMemory.set_group_info(name, rank, size, store)
        self._group = dist.ProcessGroup(store, rank, size)
        _register_process_group(name, self._group)
        self._signal_bytes = MAX_ROWS * size * 4
        shape = (self._signal_bytes + NUM_TURNS * MAX_BYTES,)
        self._memory = _SymmetricMemory.empty_strided_p2p(shape, (1,), torch.uint8, device)
        self._handle = _SymmetricMemory.rendezvous(self._memory, name)
        parts = [self._handle.get_buffer(i, shape, torch.uint8) for i in range(size)]
        # Where each rank's memory begins, for kernels.
        self.addresses = torch.tensor([part.data_ptr() for part in parts], device=device)
        self.epochs = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        signals = self._memory[: self._signal_bytes].view(torch.int32)
        self._signals = signals.view(MAX_ROWS, size)
        # Of high priority: streams of the same one may share a queue, and this must overtake.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._release_once()  # loads the kernel: the GPU may be waiting when it is needed
        torch.cuda.synchronize(device)
        self._signals.zero_()

    def summand(self, rows: int, size: int, dtype: torch.dtype, turn: int) -> Summand | None:
        """Memory for x [rows, size], to be summed over the ranks; None if that is too much. Sums
        that follow each other must have different turns."""
        num_bytes = rows * size * dtype.itemsize
        if rows > MAX_ROWS or num_bytes > MAX_BYTES:
            return None
        offset = self._signal_bytes + turn * MAX_BYTES
        x = self._memory[offset : offset + num_bytes].view(dtype).view(rows, size)
        return Summand(x, offset, self)

    def release(self) -> None:
        """A rank is dead: let this sum and all that follow go on without waiting, with garbage;
        from any thread. The memory of a dead process stays while it is mapped here.

        Again and again, as kernels of the dead may still write their signals; all queued at once,
        as NCCL's abort, which follows, keeps every thread from launching anything meanwhile."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            for _ in range(RELEASES):
                self._release_once()
                torch.cuda._sleep(PAUSE_CYCLES)

    def _release_once(self) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            torch.add(self.epochs.unsqueeze(1), FAR, out=self._signals)

    def close(self) -> None:
        """Wait for what `release` writes to the memory, which goes now."""
        self._stream.synchronize()
