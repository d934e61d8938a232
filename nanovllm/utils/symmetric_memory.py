"""SymmetricMemory: memory of each rank that all ranks' GPUs can read and write. A rank writes there
what is to be summed over the ranks; layers/rank_sum.py sums. Never uses NVLink multicast.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

from nanovllm.utils.parallel import Summand

MAX_ROWS = 512
MAX_BYTES = 8 << 20  # of one sum: 512 rows of 8,192 in bfloat16; NCCL is as good from there on
NUM_TURNS = 3


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

    A sum goes row by row. A rank that has written its summand into the buffer sets its signal of
    the row on every rank to the row's `epoch`, the number of its sums so far; it waits until the
    other ranks' signals here have come as far, and reads. Nobody waits after reading: a rank whose
    signal of a later sum, of another buffer, has come has left the earlier one, which may then be
    written again.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, device: torch.device
    ) -> None:
        """Collective, and another exchange in the current stream must follow before the first sum.
        `name` must be new in this process. Raises torch's error if the GPUs cannot."""
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
        self._memory[: self._signal_bytes].zero_()
        self.handle = _SymmetricMemory.rendezvous(self._memory, name)
        parts = [self.handle.get_buffer(i, shape, torch.uint8) for i in range(size)]
        # Whether a rank is lost. On the host, in memory that GPUs read too: when the GPU waits for
        # a rank, no call that gives it work can be relied on to return.
        self._is_lost = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        # For kernels: where each rank's memory begins, then where that is.
        where = [part.data_ptr() for part in (*parts, self._is_lost)]
        self.addresses = torch.tensor(where, device=device)
        self.epochs = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)

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
        """A rank is lost: let this sum and all that follow go on, with garbage; from any thread.
        The memory of a dead process stays while it is mapped here."""
        self._is_lost.fill_(1)
